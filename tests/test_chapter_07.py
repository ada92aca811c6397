"""Chapter 7: its worked examples, the numbers in its text, and its deliberate breaks."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ceilings import Sizes, Step
from liteinfer.cache.block_pool import BlockPool
from liteinfer.cache.radix import BlockKey, Node, RadixTree
from liteinfer.loading import LoadedModel
from liteinfer.plots import ch07
from liteinfer.radix_manager import RadixManager
from liteinfer.request import Counters, Request, SamplingParams
from tests.conftest import build, outputs

pytestmark = pytest.mark.ch07
README = (Path(__file__).parents[1] / "chapters" / "07_radix" / "README.md").read_text(encoding="utf-8")
PROMPT = [9, 44, 1, 62, 15, 33, 8, 2, 60]
NAN = float("nan")


def says(*texts: str) -> None:
    """The chapter's text has these words, wherever its lines break."""
    readme = " ".join(README.split())
    assert [text for text in texts if " ".join(text.split()) not in readme] == []


@dataclass(frozen=True)
class Served:
    """What came of requests: their tokens, what was found of each, errors, and broken invariants in words."""

    outputs: list[list[int]]
    cached: list[int | None]
    errors: list[str]
    broken: list[str]
    counters: Counters


def serve(model: LoadedModel, prompts: Sequence[Sequence[int]], max_tokens: int = 8, together: bool = False,
          salts: Sequence[str | None] = (), fill: float | None = None, fail_at: int | None = None,
          num_blocks: int = 64, block_size: int = 4) -> Served:
    """Run prompts through the row `radix`, one after the other or all at once, with `check()` after each step.

    Args:
        fill: what lies in every slot at first. With NaN, one that nobody wrote is noticed.
        fail_at: the number of the pass that fails, from 0.
    """
    engine, kv = ch07.radix_engine(model, num_blocks=num_blocks, block_size=block_size, max_num_seqs=8)
    if fill is not None:
        kv.cache.keys.fill_(fill)
        kv.cache.values.fill_(fill)
    passes, forward = iter(range(10**6)), engine.runner.run

    def failing(chunks):
        if next(passes) == fail_at:
            raise RuntimeError("the pass failed")
        return forward(chunks)

    runner: Any = engine.runner
    runner.run = failing
    requests = [Request(str(i), list(p), SamplingParams(max_tokens=max_tokens, ignore_eos=True), cache_salt=salt)
                for i, (p, salt) in enumerate(zip(prompts, salts or [None] * len(prompts), strict=True))]
    errors, broken = list[str](), list[str]()
    for batch in [requests] if together else [[request] for request in requests]:
        for request in batch:
            engine.add(request)
        while engine.has_unfinished():
            errors += [event.error for event in engine.step() if event.error]
            try:
                kv.check()
            except AssertionError as error:
                broken.append(str(error))
    return Served([r.output_token_ids for r in requests], [r.num_cached_tokens for r in requests], errors, broken,
                  engine.counters)


def alone(model: LoadedModel, prompts: Sequence[Sequence[int]], max_tokens: int = 8) -> list[list[int]]:
    """What rung 1 says to each prompt."""
    return outputs(build("nocache", model), [list(p) for p in prompts], SamplingParams(max_tokens=max_tokens,
                                                                                      ignore_eos=True))


# --- worked by hand --------------------------------------------------------------------------------------------------


def shape(node: Node) -> dict:
    """The tree below a node as nested dictionaries."""
    return {tuple(child.key): shape(child) for child in node.children.values()}


def test_three_prompts_by_hand(tiny_llama: LoadedModel) -> None:
    engine, kv = ch07.radix_engine(tiny_llama, num_blocks=16, block_size=2, max_num_seqs=1)
    trees, computed, hits = [], [], []
    for name, prompt in ch07.HAND.items():
        before = engine.counters.tokens_computed
        request = Request(name, list(prompt), SamplingParams(max_tokens=1))
        engine.add(request)
        while engine.has_unfinished():
            engine.step()
        trees.append(shape(kv.tree.root))
        computed.append(engine.counters.tokens_computed - before)
        hits.append(request.num_cached_tokens)
    one, two, three, other = (1, 2), (3, 4), (5, 6), (5, 9)
    assert trees == [{(one, two, three): {}}, *[{(one, two): {(three,): {}, (other,): {}}}] * 2]
    assert (computed, hits) == ([7, 3, 2], [0, 4, 4])
    assert engine.counters.prompt_tokens == 20 and engine.counters.prefix_hit_tokens == 8
    assert kv.cache.pool.num_used == 4                                     # C's own copy of 5 6 is gone
    says("| A 1 2 3 4 5 6 7 | nothing | 0 | 7 |", "| B 1 2 3 4 5 9 2 | `1 2`, `3 4` | 4 | 3 |",
         "| C 1 2 3 4 5 6 | `1 2`, `3 4`, `5 6` | 4 | 2 |", "root -- 1 2 | 3 4 --+-- 5 6 +-- 5 9",
         "12 tokens are computed instead of 20, and 8 of 20 are hits: 40 %")
    assert all(len(prompt) <= 10 for prompt in ch07.HAND.values())


def test_the_story_of_the_picture(tiny_llama: LoadedModel) -> None:
    """Insert, hit and split, lock, a duplicate, unlocked, evicted."""
    frames = ch07.story(tiny_llama)
    first, split, ended, duplicate, quiet, evicted = frames
    assert [(f.free, f.evictable) for f in frames] == [(5, 0), (3, 0), (3, 2), (1, 1), (2, 7), (0, 4)]
    assert [edge.locks for edge in first.edges] == [1] and first.edges[0].blocks == (0, 1, 2)
    shared, = split.edges
    assert shared.key == ((1, 2), (3, 4)) and shared.locks == 2
    assert [(child.key, child.locks) for child in shared.children] == [(((5, 6),), 1), (((5, 9),), 1)]
    assert [child.locks for child in ended.edges[0].children] == [0, 1]
    assert duplicate.tables["C"] == [0, 1, 7] and duplicate.edges[0].children[0].blocks == (2,)
    assert duplicate.edges[0].children[0].locks == 1 and not quiet.tables
    gone = blocks_of(quiet.edges) - blocks_of(evicted.edges[:1])
    assert gone == {2, 3, 6} and set(evicted.tables["D"]) >= gone
    says("C stands on `5 6` in block 2, and its table has block 7: the copy it had to compute",
         "`7 4`, then `5 6`, then the end of B's path")


def blocks_of(edges: Sequence[ch07.Edge]) -> set[int]:
    return {block for edge in edges for block in (*edge.blocks, *blocks_of(edge.children))}


def test_what_went_first(tiny_llama: LoadedModel) -> None:
    """The order of moment 6, one block at a time."""
    engine, kv = ch07.radix_engine(tiny_llama, num_blocks=9, block_size=2, max_num_seqs=4)
    for (name, prompt), n in zip(ch07.HAND.items(), (3, 4, 2), strict=True):
        engine.add(Request(name, list(prompt), SamplingParams(max_tokens=n, ignore_eos=True)))
        for _ in range(1 if name == "A" else 2):
            engine.step()
    order = []
    for _ in range(3):
        before = {block: ids for node in kv.tree.nodes() for block, ids in zip(node.blocks, node.key, strict=True)}
        assert kv.tree.evict(1) == 1
        after = {block for node in kv.tree.nodes() for block in node.blocks}
        order += [ids for block, ids in before.items() if block not in after]
    assert order == [(7, 4), (5, 6), (34, 37)]


# --- the numbers in the text -----------------------------------------------------------------------------------------


def test_a_chat(tiny_llama: LoadedModel) -> None:
    without, cached = (ch07.chat(tiny_llama, row) for row in ("continuous", "radix"))
    assert without.answers == cached.answers
    assert (sum(without.computed), sum(cached.computed)) == (1800, 408)
    assert (without.computed[-1], cached.computed[-1]) == (351, 47) and max(cached.computed[1:]) == 51
    assert without.counters.forward_passes == cached.counters.forward_passes == 128
    assert (ch07.SYSTEM, ch07.TURN, ch07.ANSWER, ch07.TURNS) == (64, 20, 16, 8)
    says("a system prompt of 64 tokens, questions of 20, answers of 16", "1,800", "In turn 8 it computes 351",
         "in blocks of 16, the whole chat takes 408", "408 tokens instead of 1,800, and makes 128 passes either way")


def test_tokens_on_a_hit(tiny_llama: LoadedModel) -> None:
    """A prefix and a question of 8, cold and cached; here with the lengths that a tiny model can have."""
    for prefix in (256, 480):
        shared = [(i * i + 3) % 64 for i in range(prefix)]
        served = serve(tiny_llama, [[*shared, *range(8)], [*shared, *range(20, 28)]], 1, block_size=16)
        assert served.cached == [0, prefix]
        assert served.counters.tokens_computed == prefix + 8 + 8
    assert [round((prefix + 8) / 8) for prefix in (256, 512, 1024, 2048)] == [33, 65, 129, 257]
    says("264 cold, 8 cached; 520, 8; 1,032, 8; 2,056, 8", "33, 65, 129, 257 times")


def test_a_prompt_of_whole_blocks_computes_a_block(tiny_llama: LoadedModel) -> None:
    prompt = [(i * i + 3) % 64 for i in range(256)]
    assert serve(tiny_llama, [prompt] * 2, 1, block_size=16).cached == [0, 240]
    common = [(i * i + 5) % 64 for i in range(271)]
    assert serve(tiny_llama, [[*common, 1], [*common, 2]], 1, block_size=16).cached == [0, 256]
    says("A prompt of 256 tokens sent twice computes 16 of them again", "271 equal tokens share 256")


def test_the_floor(smol: LoadedModel) -> None:
    """Operations and bytes of the first token, cold and cached."""
    sizes = Sizes.of(smol.config, smol.dtype)
    gflop = [round(Step(tokens, 264, cached=True).flops(sizes) / 1e9, 1) for tokens in (264, 8)]
    assert gflop == [58.5, 1.9]
    assert round(Step(8, 264, cached=True).bytes(sizes) / 1e6) == 550
    weights, token = (sizes.layer_linear + sizes.head) * 4, sizes.kv_per_token * 4
    least, most = (weights + 3 * token * length for length in (264, 2056))
    assert (round(least / 1e6), round(most / 1e6), round(most / least, 2)) == (574, 822, 1.43)
    says("264 tokens are 58.5 GFLOP", "1.9 GFLOP", "550 MB", "574 MB become 822 MB", "1.43 times")


def test_tenants(tiny_llama: LoadedModel) -> None:
    prompt = [(i * i + 3) % 64 for i in range(16)]
    served = serve(tiny_llama, [prompt] * 5, salts=["a", "a", "b", "b", None])
    assert served.cached == [0, 12, 0, 12, 0] and served.outputs == alone(tiny_llama, [prompt]) * 5
    says("| cached tokens | 0 | 12 | 0 | 12 | 0 |")
    tree = RadixTree(BlockPool(4, 1))
    assert tree._keys([2345], "org_1") != tree._keys([], "org_12345")
    assert "org_1" + "2345" == "org_12345" + ""


@pytest.mark.parametrize(("prompts", "later_hits"), [(4, 8), (6, 0)])
def test_a_cycle_that_does_not_fit(prompts: int, later_hits: int, tiny_llama: LoadedModel) -> None:
    each = [[prompt, *range(20, 28)] for prompt in range(prompts)]         # 9 tokens, 2 whole blocks
    served = serve(tiny_llama, each * 4, 1, num_blocks=10)
    assert served.cached == [0] * prompts + [later_hits] * 3 * prompts
    says("Four prompts of 9 tokens", "in a pool of 10 blocks: 8 of 9 tokens are hits from the second round on. With "
         "six prompts the hit rate is 0")


def test_who_finds_the_examples_of_the_few_shot_questions() -> None:
    """The budget of 512 lets two prompts of 272 begin in the first step, before anything is published."""
    rows = json.loads((ch07.RESULTS / "sharing.json").read_text(encoding="utf-8"))["rows"]
    row, = (row for row in rows if (row["workload"], row["name"]) == ("fewshot", "liteinfer-radix"))
    assert (row["prompts"], row["prompt_tokens"], row["prefix_hit_tokens"]) == (12, 12 * 272, 10 * 256)
    says("the first two start in one step, and both compute the examples; the other ten find 256 tokens each")


def test_the_answers_to_the_questions() -> None:
    pool = BlockPool(16, 16)
    tree = RadixTree(pool)
    tree.insert(list(range(100)), pool.allocate(7))
    assert len(tree.match([*range(100), *range(30)]).blocks) * 16 == 96
    pool = BlockPool(16, 1)
    tree = RadixTree(pool)
    for ids in ([1, 2], [1, 3]):
        blocks = pool.allocate(2)
        tree.lock(tree.insert(ids, blocks))
        pool.free(blocks)
    node, = tree.root.children.values()
    tree.lock(node)
    assert [node.lock_count, *(child.lock_count for child in node.children.values())] == [3, 1, 1]
    assert tree.num_evictable == 0 and tree.evict(9) == 0


# --- the deliberate breaks -------------------------------------------------------------------------------------------


def agreed(got: Sequence[int], right: Sequence[int]) -> int:
    """Tokens before the first that differs or is missing."""
    return next((i for i, b in enumerate(right) if i >= len(got) or got[i] != b), len(right))


def sum_of_ids(self: RadixTree, ids: Sequence[int], salt: str | None) -> list[BlockKey]:
    """A hash in place of the ids, and a weak one."""
    size = self.pool.block_size
    return [(sum(ids[i:i + size]),) for i in range(0, len(ids) - size + 1, size)]


def test_a_hash_that_collides_gives_another_prompts_keys(tiny_llama: LoadedModel,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    twisted = [44, 9, *PROMPT[2:]]                                         # the same sum in its first block
    expected = alone(tiny_llama, [PROMPT, twisted])
    assert serve(tiny_llama, [PROMPT, twisted]).outputs == expected
    monkeypatch.setattr(RadixTree, "_keys", sum_of_ids)
    wrong = serve(tiny_llama, [PROMPT, twisted])
    assert wrong.cached == [0, 8] and not wrong.broken
    assert [agreed(got, right) < 8 for got, right in zip(wrong.outputs, expected, strict=True)] == [False, True]


def publish_up_to(self: RadixManager, request: Request, length: int) -> None:
    """Tell the tree of the whole blocks among the first `length` tokens."""
    name, full = request.request_id, length // self.cache.pool.block_size
    if full > self.published[name]:
        node = self.tree.insert(request.token_ids[:full * self.cache.pool.block_size], self.cache.tables[name])
        self.tree.lock(node)
        self.tree.unlock(self.locked[name])
        self.locked[name], self.published[name] = node, full


def with_the_last_token(self: RadixManager, request: Request) -> None:
    """All tokens that are known, the one not fed yet among them, if it has a slot."""
    slots = len(self.cache.tables[request.request_id]) * self.cache.pool.block_size
    publish_up_to(self, request, min(request.num_tokens, slots))


def when_allocated(self: RadixManager, request: Request, length: int) -> bool:
    """Blocks are found from the moment they are handed out."""
    if not ALLOCATE(self, request, length):
        return False
    publish_up_to(self, request, min(length, request.num_tokens))
    return True


ALLOCATE = RadixManager.allocate


def test_an_unwritten_last_token_is_right_if_its_owner_goes_on(tiny_llama: LoadedModel,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tokens and four more are two blocks, of which seven slots are written (X12)."""
    prompt = PROMPT[:4]
    answer, = alone(tiny_llama, [prompt], 4)
    again = [*prompt, *answer, 9]
    right = serve(tiny_llama, [prompt, again], 4, fill=NAN)
    assert right.cached == [0, 4] and right.outputs == [answer, *alone(tiny_llama, [again], 4)]
    monkeypatch.setattr(RadixManager, "publish", with_the_last_token)
    unseen = serve(tiny_llama, [prompt, again], 7, fill=NAN)               # the next step writes the slot
    assert unseen.cached == [0, 8] and unseen.outputs == alone(tiny_llama, [prompt, again], 7)
    zeros, nan = (serve(tiny_llama, [prompt, again], 4, fill=fill) for fill in (0.0, NAN))
    assert zeros.cached == nan.cached == [0, 8] and not zeros.broken and not nan.broken
    assert zeros.outputs[0] == answer and zeros.outputs[1] != right.outputs[1]
    assert len(nan.errors) == 1 and "NaN" in nan.errors[0]


def test_publishing_when_allocated_is_right_until_a_pass_fails(tiny_llama: LoadedModel,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    expected, = alone(tiny_llama, [PROMPT])
    right = serve(tiny_llama, [PROMPT, PROMPT], together=True)
    assert right.outputs == [expected] * 2 and right.cached == [0, 0]      # twins in one step compute everything (X7)
    failed = serve(tiny_llama, [PROMPT, PROMPT], fill=NAN, fail_at=0)
    assert failed.errors == ["RuntimeError: the pass failed"] and failed.outputs == [[], expected]
    monkeypatch.setattr(RadixManager, "allocate", when_allocated)
    twins = serve(tiny_llama, [PROMPT, PROMPT], together=True)
    assert twins.outputs == [expected] * 2 and twins.cached == [0, 8]      # each layer writes before anybody reads
    wrong = serve(tiny_llama, [PROMPT, PROMPT], fill=NAN, fail_at=0)
    assert wrong.cached == [0, 8] and wrong.outputs != [[], expected] and not wrong.broken


def lock_alone(self: RadixTree, node: Node) -> None:
    if node.parent is not None:
        if node.lock_count == 0:
            self.num_evictable -= len(node.blocks)
        node.lock_count += 1


def unlock_alone(self: RadixTree, node: Node) -> None:
    if node.parent is not None:
        node.lock_count -= 1
        if node.lock_count == 0:
            self.num_evictable += len(node.blocks)


def overlapping() -> list[list[int]]:
    """A dozen prompts of 5 to 16 tokens, of which the first 4 or 8 are the same."""
    draw = random.Random(3)
    base = [draw.randrange(64) for _ in range(8)]
    return [base[:draw.choice([4, 8])] + [draw.randrange(64) for _ in range(draw.randrange(1, 9))] for _ in range(12)]


def test_a_lock_on_the_last_node_only(tiny_llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, expected = overlapping(), alone(tiny_llama, overlapping(), 4)
    right = serve(tiny_llama, prompts, 4, together=True, num_blocks=12)
    assert right.outputs == expected and not right.errors and not right.broken
    monkeypatch.setattr(RadixTree, "lock", lock_alone)
    monkeypatch.setattr(RadixTree, "unlock", unlock_alone)
    assert serve(tiny_llama, prompts, 4).outputs == expected               # nobody is short of blocks
    wrong = serve(tiny_llama, prompts, 4, together=True, num_blocks=12)
    assert any("slots" in error for error in wrong.errors)
    assert "a lock stops half way" in wrong.broken


def evict_anywhere(self: RadixTree, n: int) -> int:
    """The least recently used node, whatever hangs below it."""
    left = n
    for node in sorted(self.nodes(), key=lambda each: each.last_use):
        if left and not node.lock_count and node.parent is not None:
            gone, first = node.blocks[-left:], node.key[0]
            self.pool.free(gone)
            self.num_evictable -= len(gone)
            left -= len(gone)
            del node.key[-len(gone):], node.blocks[-len(gone):]
            if not node.blocks:
                del node.parent.children[first]
    return n - left


def test_eviction_from_the_middle_is_not_seen_in_a_token(tiny_llama: LoadedModel,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, expected = overlapping(), alone(tiny_llama, overlapping(), 4)
    right = serve(tiny_llama, prompts, 4, num_blocks=6)
    assert right.outputs == expected and not right.broken
    monkeypatch.setattr(RadixTree, "evict", evict_anywhere)
    wrong = serve(tiny_llama, prompts, 4, num_blocks=6)
    assert all(got == right[:len(got)] for got, right in zip(wrong.outputs, expected, strict=True))
    assert wrong.outputs[:8] == expected[:8] and "blocks are evictable" in wrong.broken[0]
    assert wrong.errors and all("slots" in error for error in wrong.errors)   # the pool is full of what none can find


def the_last_token_too(self: RadixManager, request: Request) -> int:
    """All of the prompt, if all of it is known."""
    found, name = self.tree.match(request.token_ids, request.cache_salt), request.request_id
    self.tree.lock(found.node)
    self.locked[name], self.published[name] = found.node, len(found.blocks)
    self.cache.pool.share(found.blocks)
    self.cache.tables[name], self.cache.lengths[name] = found.blocks, len(found.blocks) * self.cache.pool.block_size
    return self.cache.lengths[name]


def test_a_hit_on_everything_leaves_no_token_to_compute(tiny_llama: LoadedModel,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    expected = alone(tiny_llama, [PROMPT[:8], PROMPT])
    assert serve(tiny_llama, [PROMPT[:8]] * 2).outputs == [expected[0]] * 2
    monkeypatch.setattr(RadixManager, "match", the_last_token_too)
    assert serve(tiny_llama, [PROMPT] * 2).outputs == [expected[1]] * 2    # the ninth token fills no block
    wrong = serve(tiny_llama, [PROMPT[:8]] * 2)
    assert wrong.cached == [0, 8] and len(wrong.errors) == 1 and wrong.outputs == [expected[0], []]


# --- the pictures ----------------------------------------------------------------------------------------------------


def test_the_tree_picture_draws_every_block(tiny_llama: LoadedModel) -> None:
    frames = ch07.story(tiny_llama)
    figure = ch07.tree_picture(frames)
    for moment, axes in zip(frames, figure.axes, strict=True):
        drawn = {int(text.get_text().removeprefix("block ")) for text in axes.texts
                 if text.get_text().startswith("block ")}
        assert drawn == blocks_of(moment.edges)


def test_the_ttft_picture_shows_times_and_ceilings() -> None:
    rows = [{"prefix": n, "cold_ms": 4.0 * n, "cached_ms": 90.0, "cold_tokens": n + 8, "cached_tokens": 8}
            for n in (256, 512)]
    machine = {"bandwidth_gb_s": 20.0, "peak_gflop_s": 100.0}
    result = {"rows": rows, "question": 8, "machine": machine, "model": {"name": "smollm2-135m", "dtype": "float32"}}
    axes = ch07.ttft_picture(result).axes[0]
    assert [bar.get_height() for bar in axes.patches] == [1024.0, 2048.0, 90.0, 90.0]
    cold, cached = (ch07.ceilings(result, what) for what in ("cold", "cached"))
    assert cold[0] == pytest.approx(585.3, abs=0.1) and cached[0] == pytest.approx(550.08 / 20, abs=0.01)
    assert ch07.ceilings({**result, "machine": {}}, "cold") == []
