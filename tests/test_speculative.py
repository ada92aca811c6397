"""Speculation in the engine: the same tokens with every drafter, drafts that follow the request, the cases D1 to D7."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from scipy.stats import binomtest

from liteinfer.engines.continuous import ContinuousEngine, NoDrafter
from liteinfer.kv_manager import KVManager
from liteinfer.llm import LLM
from liteinfer.loading import LoadedModel, tiny_model
from liteinfer.model.linear import Plain
from liteinfer.radix_manager import RadixManager
from liteinfer.request import Request, SamplingParams
from liteinfer.sampling import processed_probs
from liteinfer.speculative.choose import MakeDrafter, drafter
from liteinfer.speculative.draft_head import DraftHeadDrafter
from liteinfer.speculative.draft_model import DraftModelDrafter, choose
from liteinfer.speculative.drafter import Draft, Pause, SpeculativeDrafter
from liteinfer.speculative.early_exit import EarlyExitDrafter
from liteinfer.speculative.fallback import FallbackDrafter
from liteinfer.speculative.ngram import NgramDrafter, NgramIndex
from liteinfer.trace import StepTrace
from tests import scripted
from tests.conftest import build, outputs
from tests.heads import random_head
from tests.scripted import RandomRunner, check, drain, expected, script_engine
from tests.test_ladder import random_prompts
from tests.test_radix_engine import overlapping

pytestmark = pytest.mark.ch08

DRAFTS = ("ngram", "copy", "other", "early-exit", "head", "both")


def make(name: str, model: LoadedModel, k: int = 4, **options: Any) -> MakeDrafter:
    """The drafter of this name: a copy of the target, another model, ..."""
    if name == "ngram":
        return partial(NgramDrafter, num_speculative_tokens=k, **options)
    if name == "early-exit":
        return partial(EarlyExitDrafter, layers=1, num_speculative_tokens=k, **options)
    if name in ("head", "both"):
        head = partial(DraftHeadDrafter, weights=random_head(model), num_speculative_tokens=k, **options)
        ngram = partial(NgramDrafter, num_speculative_tokens=k, prompt_lookup_min=2)
        return head if name == "head" else partial(FallbackDrafter, first=ngram, then=head, num_speculative_tokens=k)
    other = tiny_model("llama", seed=5) if name == "other" else model
    return partial(DraftModelDrafter, model=other, num_speculative_tokens=k, linear=Plain(), **options)


def altered(model: LoadedModel, tokenizer: Any = None, **config: Any) -> LoadedModel:
    """The same weights under another config."""
    other: Any = copy(model)
    other.config, other.tokenizer = replace(model.config, **config), tokenizer
    return other


def ended(engine: ContinuousEngine) -> None:
    """Nothing is left of anybody, in the engine or in its drafter."""
    tree = getattr(engine.scheduler.kv, "tree", None)
    assert engine.cache.pool.num_used == (tree.num_evictable if tree else 0)
    over(engine.drafter)


def over(drafter: Any) -> None:
    """A drafter that has forgotten everybody."""
    assert isinstance(drafter, SpeculativeDrafter) and not drafter.drafts
    if isinstance(drafter, FallbackDrafter):
        over(drafter.first)
        over(drafter.then)
    if isinstance(drafter, DraftHeadDrafter):
        assert drafter.cache.pool.num_used == 0 and not (drafter.cache.tables or drafter.heard or drafter.next)
    if isinstance(drafter, DraftModelDrafter):
        assert drafter.cache.pool.num_used == 0 and not drafter.cache.tables and not drafter.fed
    if isinstance(drafter, NgramDrafter):
        assert not drafter.indexes


# --- tier A -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rung_1(tiny: LoadedModel) -> list[list[int]]:
    return outputs(build("nocache", tiny), *workload(tiny))


def workload(model: LoadedModel) -> tuple[list[list[int]], list[SamplingParams]]:
    """40 prompts, greedy and seeded, and one that comes twice."""
    prompts, params = random_prompts(model.config.vocab_size)
    return [*prompts[:39], prompts[7]], [*params[:39], params[7]]


SITUATIONS: dict[int, dict] = {   # one for each k
    1: {"max_num_seqs": 1}, 2: {"max_num_seqs": 4, "block_size": 4, "num_blocks": 22, "watermark": 0.0},
    3: {"max_num_seqs": 32}, 4: {"max_num_seqs": 8, "max_prefill_chunk": 3, "max_num_batched_tokens": 16},
    5: {"max_num_seqs": 32, "block_size": 1, "num_blocks": 90, "watermark": 0.0},
    6: {"max_num_seqs": 2, "block_size": 2}, 7: {"max_num_seqs": 16, "max_prefill_chunk": 7, "num_blocks": 9},
    8: {"max_num_seqs": 32, "max_num_batched_tokens": 40}}


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("k", SITUATIONS)
def test_tier_a_every_drafter_k_1_to_8(name: str, k: int, tiny: LoadedModel, rung_1: list[list[int]]) -> None:
    """Batches of 1 to 32, prefix cache on and off, tight pools, chunked prefill; greedy and seeded requests."""
    prompts, params = workload(tiny)
    kv_manager = (KVManager, RadixManager)[(k + DRAFTS.index(name)) % 2]   # each drafter with both, each k with both
    engine = build("continuous", tiny, drafter=make(name, tiny, k), kv_manager=kv_manager, **SITUATIONS[k])
    requests = [Request(str(i), p, s) for i, (p, s) in enumerate(zip(prompts, params, strict=True))]
    for each in requests:
        engine.add(each)
    budget = engine.scheduler.config.max_num_batched_tokens
    while engine.has_unfinished():
        before = engine.counters.tokens_computed
        assert not any(event.error for event in engine.step())
        check(engine)
        assert engine.counters.tokens_computed - before <= budget, "the budget counts drafted tokens"
    wrong = [i for i, each in enumerate(requests) if each.output_token_ids != rung_1[i]]
    assert not wrong, f"{len(wrong)} of {len(requests)} prompts differ, first prompt {wrong[0]}"
    counters = engine.counters
    assert counters.drafted_tokens == sum(each.num_drafted_tokens for each in requests) > 0
    assert counters.accepted_tokens == sum(each.num_accepted_tokens for each in requests)
    assert counters.accepted_tokens > 0 or name in ("other", "head")
    assert (counters.preemptions > 0) == (k in (2, 5, 7))
    ended(engine)


def test_a_model_that_is_not_seeded_gives_what_it_would_have_given(tiny_llama: LoadedModel) -> None:
    """Drawn drafts at temperature 1e-6 and top_k 1: the same tokens as greedy, by the way of rejection sampling."""
    prompts, _ = workload(tiny_llama)
    want = outputs(build("nocache", tiny_llama), prompts, SamplingParams(max_tokens=8))
    for name in ("copy", "other", "early-exit", "head", "both"):
        for settings in ({"temperature": 1e-6}, {"temperature": 1.0, "top_k": 1}):
            engine = build("radix", tiny_llama, drafter=make(name, tiny_llama))
            assert outputs(engine, prompts, SamplingParams(max_tokens=8, **settings)) == want
            assert (engine.counters.accepted_tokens == engine.counters.drafted_tokens) == (name == "copy")


@pytest.mark.slow
def test_tier_b_with_every_drafter(smol: LoadedModel) -> None:
    from tests import tier_b

    reference = tier_b.load()
    prompts = [item["prompt_token_ids"] for item in reference]
    for name in ("ngram", "draft-head", "ngram+draft-head", "early-exit:20"):
        for k, width in ((2, 1), (4, 32), (8, 8)):
            engine = build("radix", smol, max_num_seqs=width, drafter=drafter(name, k))
            tier_b.check(reference, outputs(engine, prompts, tier_b.GREEDY))
            assert engine.counters.accepted_tokens > 0


# --- the draft model's cache ------------------------------------------------------------------------------------------


def stored(drafter: DraftModelDrafter, request_id: str) -> torch.Tensor:
    """The keys [layers, S, K, D] that a draft cache holds of a request."""
    cache = drafter.cache
    slots = cache.keys[:, cache.tables[request_id]].flatten(1, 2)
    return slots[:, :cache.lengths[request_id]]


def test_d5_a_copy_of_the_target_is_always_right(tiny_llama: LoadedModel) -> None:
    """64 tokens at k = 4: the first, then 12 rounds of five, then three, of which a draft may be two."""
    engine = build("radix", tiny_llama, drafter=make("copy", tiny_llama))
    engine.add(each := Request("a", [3, 1, 4, 1, 5], SamplingParams(max_tokens=64)))
    lengths, d = [], engine.drafter
    while engine.has_unfinished():
        event, = engine.step()
        lengths.append(len(event.token_ids))
        if not event.finish_reason:
            assert engine.cache.lengths["a"] == each.num_tokens - 1, "the target holds all but the last token"
            assert d.fed.get("a", []) == each.token_ids[:len(d.fed.get("a", []))], "the draft holds no refused token"
    assert lengths == [1] + [5] * 12 + [3] and each.num_accepted_tokens == each.num_drafted_tokens == 12 * 4 + 2
    assert d.counters.tokens_computed == each.num_tokens - 2, "each token was fed to the draft once"


class Sometimes(DraftModelDrafter):
    """Drafts in every third step only."""

    calls = 0

    def propose(self, requests):
        self.calls += 1
        return super().propose(requests) if self.calls % 3 == 0 else {}


@pytest.mark.parametrize("kind", [DraftModelDrafter, Sometimes])
def test_d5_a_draft_that_is_now_right_now_wrong_is_rewound_exactly(kind: type[DraftModelDrafter],
                                                                  tiny_llama: LoadedModel) -> None:
    """The draft's cache, after any number of refusals, is that of a model that was fed the request and nothing else."""
    other = partial(kind, model=tiny_model("llama", seed=5), num_speculative_tokens=3, linear=Plain())
    engine = build("radix", tiny_llama, max_num_seqs=4, drafter=other, block_size=4)
    d = engine.drafter
    requests = [Request(f"r{i}", [7 * i + j for j in range(3 + i)], SamplingParams(max_tokens=20)) for i in range(3)]
    for each in requests:
        engine.add(each)
    looked, seen, guess = 0, list[tuple[list[int], list[int], torch.Tensor]](), d.guess

    def fresh(ids: list[int]) -> torch.Tensor:
        clean = DraftModelDrafter(engine, tiny_model("llama", seed=5), linear=Plain())
        with torch.inference_mode():
            clean._reserve("x", len(ids))
            clean._feed({"x": ids})
        return stored(clean, "x")

    def looking(rooms: Mapping[Request, int]) -> dict[str, Draft]:
        drafts = guess(rooms)
        seen.extend((r.token_ids, list(d.fed[r.request_id]), stored(d, r.request_id).clone()) for r in rooms)
        return drafts

    d.guess = looking
    while engine.has_unfinished():
        engine.step()
        d.cache.check()
        for ids, fed, keys in seen:
            assert fed[:len(ids)] == ids, "fed: all its tokens, the last one included"
            torch.testing.assert_close(keys, fresh(fed), rtol=0, atol=1e-12)
            looked += 1
        seen.clear()
    refused = engine.counters.drafted_tokens - engine.counters.accepted_tokens
    assert looked > 10 and refused > 30


def test_rounds_without_drafts_are_caught_up_with(tiny_llama: LoadedModel) -> None:
    engine = build("radix", tiny_llama, drafter=partial(Sometimes, model=tiny_llama, linear=Plain()))
    outputs(engine, [[5, 6, 7], [9, 8]], SamplingParams(max_tokens=30))
    assert engine.counters.accepted_tokens == engine.counters.drafted_tokens > 20


def test_a_prefix_hit_and_a_preemption_are_caught_up_with(tiny_llama: LoadedModel) -> None:
    """The target finds 32 tokens in its tree, or computes a preempted request again; the draft was never fed them."""
    prompt = [(5 * i) % 64 for i in range(40)]
    engine = build("radix", tiny_llama, drafter=make("copy", tiny_llama))
    for _ in range(2):
        outputs(engine, [prompt], SamplingParams(max_tokens=12))
    assert engine.counters.prefix_hit_tokens == 32
    assert engine.counters.accepted_tokens == engine.counters.drafted_tokens == 2 * (2 * 4 + 0)
    tight = build("radix", tiny_llama, drafter=make("copy", tiny_llama), num_blocks=10, block_size=4, watermark=0.0)
    outputs(tight, [[i] * 9 for i in range(4)], SamplingParams(max_tokens=16))
    assert tight.counters.preemptions > 0
    assert tight.counters.accepted_tokens == tight.counters.drafted_tokens > 0


def test_a_preempted_request_keeps_no_draft_blocks(tiny_llama: LoadedModel) -> None:
    engine = build("radix", tiny_llama, drafter=make("copy", tiny_llama), num_blocks=10, block_size=4, watermark=0.0)
    for i in range(4):
        engine.add(Request(str(i), [i] * 9, SamplingParams(max_tokens=16)))
    seen = 0
    while engine.has_unfinished():
        waiting = {r.request_id for r in engine.scheduler.waiting}   # since the step before, or longer
        engine.step()
        waiting &= {r.request_id for r in engine.scheduler.waiting}
        seen += engine.counters.preemptions > 0 and len(waiting)
        assert not waiting & set(engine.drafter.fed)
        engine.drafter.cache.check()
    assert seen > 0 and engine.counters.preemptions > 0


def test_a_long_prompt_is_caught_up_with_over_several_steps(tiny_llama: LoadedModel) -> None:
    """Nobody waits for the draft model to read 100 tokens: a step's draft passes read no more than the budget of 16."""
    engine = build("radix", tiny_llama, max_num_seqs=4, max_num_batched_tokens=16, drafter=make("copy", tiny_llama, 2))
    long, short = (Request(name, [i + 1 for i in range(n)], SamplingParams(max_tokens=24))
                   for name, n in (("long", 60), ("short", 3)))
    engine.add(short)
    engine.add(long)
    first = None
    while engine.has_unfinished():
        before, drafted = engine.drafter.counters.tokens_computed, long.num_drafted_tokens
        engine.step()
        assert engine.drafter.counters.tokens_computed - before <= 16 + 2 * (2 - 1)
        if first is None and long.num_drafted_tokens > drafted:
            first = len(long.output_token_ids)
    assert first is not None and first > 4, "it decoded without drafts meanwhile"
    assert engine.counters.accepted_tokens == engine.counters.drafted_tokens


def test_a_request_without_draft_blocks_goes_without_a_draft(tiny_llama: LoadedModel) -> None:
    prompts = [[i + 1] * 20 for i in range(4)]
    want = outputs(build("nocache", tiny_llama), prompts, SamplingParams(max_tokens=9))
    engine = build("radix", tiny_llama, block_size=4, drafter=make("copy", tiny_llama, num_blocks=14))
    requests = [Request(str(i), p, SamplingParams(max_tokens=9)) for i, p in enumerate(prompts)]
    for each in requests:
        engine.add(each)
    engine.step()
    engine.step()
    assert [each.num_drafted_tokens for each in requests] == [4, 4, 0, 0], "14 blocks hold two of them"
    drain(engine)
    assert [each.output_token_ids for each in requests] == want
    ended(engine)


def test_past_the_draft_models_own_length_there_are_no_drafts(tiny_llama: LoadedModel) -> None:
    short = replace(tiny_llama.config, max_position_embeddings=16)
    engine = build("radix", tiny_llama, drafter=make("copy", tiny_llama))
    engine.drafter.max_model_len = short.max_position_embeddings
    engine.add(each := Request("a", [3, 1, 4, 1, 5], SamplingParams(max_tokens=40)))
    while engine.has_unfinished():
        engine.step()
        assert len(engine.drafter.fed.get("a", ())) <= 16
    assert 0 < each.num_drafted_tokens <= 12 and len(each.output_token_ids) == 40


def test_models_with_other_tokens_are_refused(tiny_llama: LoadedModel) -> None:
    small = altered(tiny_llama, vocab_size=60)
    with pytest.raises(ValueError, match=r"vocab_size 60, target .* 64"):
        build("radix", tiny_llama, drafter=make("copy", small))

    class Words:
        def __init__(self, words: str) -> None:
            self.words = words

        def get_vocab(self) -> dict[str, int]:
            return {word: i for i, word in enumerate(self.words)}

    speaks, other = (altered(tiny_llama, Words(words)) for words in ("abc", "abd"))
    assert build("radix", speaks, drafter=partial(DraftModelDrafter, model=copy(speaks), linear=Plain()))
    with pytest.raises(ValueError, match="64 tokens each, but not the same ones"):
        build("radix", speaks, drafter=partial(DraftModelDrafter, model=other, linear=Plain()))


@pytest.mark.parametrize("layers", [0, 2, 3, -1])
def test_early_exit_needs_layers_that_are_there(layers: int, tiny_llama: LoadedModel) -> None:
    with pytest.raises(ValueError, match=f"1 to 1 of the target's 2 layers, got {layers}"):
        build("radix", tiny_llama, drafter=partial(EarlyExitDrafter, layers=layers))


def test_early_exit_leaves_the_targets_cache_as_it_was(tiny_llama: LoadedModel) -> None:
    """Its guesses lie past what is stored; blocks taken for them go back before anything is scheduled."""
    engine = build("radix", tiny_llama, block_size=2, drafter=make("early-exit", tiny_llama, 6))
    engine.add(each := Request("a", [3, 1, 4, 1, 5], SamplingParams(max_tokens=12)))
    engine.step()
    held, length = list(engine.cache.tables["a"]), engine.cache.lengths["a"]
    before = engine.cache.keys[:, held].flatten(1, 2)[:, :length].clone()
    with torch.inference_mode():
        proposed = engine.drafter.propose([each])
    assert len(proposed["a"]) == 6
    assert engine.cache.tables["a"] == held and engine.cache.lengths["a"] == length
    assert torch.equal(engine.cache.keys[:, held].flatten(1, 2)[:, :length], before)
    check(engine)


# --- n-grams ----------------------------------------------------------------------------------------------------------


def follows(ids: list[int], count: int = 4, sizes: range = range(1, 4)) -> list[int]:
    index = NgramIndex(sizes)
    index.extend(ids)
    return index.follows(ids, count)


def test_the_longest_match_wins_and_then_the_latest() -> None:
    assert follows([5, 6, 7, 8, 9, 5, 6]) == [7, 8, 9], "two tokens match, so three are copied"
    assert follows([1, 2, 3, 9, 2, 3, 8, 4, 1, 2, 3], 2) == [9, 2], "three tokens match, though two did later"
    assert follows([2, 3, 9, 2, 3, 8, 4, 2, 3], 1) == [8], "the latest of two"
    assert follows([1, 2, 3, 4]) == [], "the last token is not its own earlier occurrence"
    assert follows([5, 6, 7, 8, 9, 1, 5, 6, 7]) == [8, 9, 1, 5]
    assert follows([4, 4]) == [4, 4], "it runs on into what it has copied"
    assert follows([7, 1, 7], sizes=range(2, 4)) == []
    assert follows([7]) == []


def test_an_index_that_grew_knows_what_a_new_one_knows() -> None:
    rng, ids, grown = random.Random(1), list[int](), NgramIndex(range(1, 4))
    for _ in range(300):
        ids += [rng.randrange(5) for _ in range(rng.randint(1, 5))]
        grown.extend(ids)
        whole = NgramIndex(range(1, 4))
        whole.extend(ids)
        assert grown.ends == whole.ends and grown.follows(ids, 4) == whole.follows(ids, 4)


def test_d7_nothing_is_proposed_after_an_eos(tiny_llama: LoadedModel) -> None:
    eos, prompt = 12, [7, 12, 9, 9, 7]
    model = altered(tiny_llama, eos_token_ids=(eos,))
    lookup = partial(NgramDrafter, prompt_lookup_max=1)
    for params, proposed in ((SamplingParams(max_tokens=12), [eos]),
                             (SamplingParams(max_tokens=12, ignore_eos=True), [eos, 9]),
                             (SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=(9,)), [eos, 9])):
        engine = build("radix", model, drafter=lookup)
        each = Request("a", prompt[:-1], params, output_token_ids=[7], num_computed_tokens=4)
        assert engine.drafter.propose([each]) == {"a": proposed}
        want = outputs(build("nocache", model), [prompt], params)
        assert outputs(build("radix", model, drafter=lookup), [prompt], params) == want


@pytest.mark.parametrize(("low", "high"), [(0, 2), (3, 2), (-1, 4)])
def test_lookup_sizes_that_contradict_each_other_are_refused(low: int, high: int, tiny_llama: LoadedModel) -> None:
    with pytest.raises(ValueError, match=f"prompt_lookup_min {low}.*prompt_lookup_max {high}"):
        build("radix", tiny_llama, drafter=partial(NgramDrafter, prompt_lookup_min=low, prompt_lookup_max=high))


# --- how a request ends -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", range(5))
def test_d1_an_eos_anywhere_in_an_accepted_run(offset: int, tiny_llama: LoadedModel) -> None:
    prompt = [3, 1, 4, 1, 5]
    free = outputs(build("nocache", tiny_llama), [prompt], SamplingParams(max_tokens=16, ignore_eos=True))[0]
    at = next(i for i in range(6 + offset, 16, 5) if free[i] not in free[:i])   # 1, then rounds of five from 1 on
    model = altered(tiny_llama, eos_token_ids=(free[at],))
    for name in DRAFTS:
        engine = build("radix", model, drafter=make(name, model))
        engine.add(each := Request("a", prompt, SamplingParams(max_tokens=16)))
        assert drain(engine)[-1].finish_reason == "stop"
        assert each.output_token_ids == free[:at + 1]
        ended(engine)


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_d2_exactly_as_many_tokens_as_asked_for(name: str, max_tokens: int, tiny_llama: LoadedModel) -> None:
    prompt = [5, 6, 5, 6, 5]
    want = outputs(build("nocache", tiny_llama), [prompt], SamplingParams(max_tokens=5))[0][:max_tokens]
    engine = build("radix", tiny_llama, drafter=make(name, tiny_llama), num_blocks=-(-(5 + max_tokens - 1) // 4),
                   block_size=4, watermark=0.0)   # not a block more than the request itself needs
    engine.add(each := Request("a", prompt, SamplingParams(max_tokens=max_tokens)))
    assert drain(engine)[-1].finish_reason == "length"
    assert each.output_token_ids == want
    assert max_tokens > 2 or not each.num_drafted_tokens, "the first token has no draft, and the last needs none"


class ScriptDrafter(SpeculativeDrafter):
    """Guesses from the script of tests.scripted: every `wrong_every`-th guess is wrong."""

    def __init__(self, engine: ContinuousEngine, k: int = 5, wrong_every: int = 99) -> None:
        super().__init__(engine, k)
        self.wrong_every = wrong_every

    def guess(self, rooms: Mapping[Request, int]) -> dict[str, Draft]:
        return {r.request_id: Draft([self.one(r, i) for i in range(room)]) for r, room in rooms.items()}

    def one(self, r: Request, i: int) -> int:
        wrong = i % self.wrong_every == self.wrong_every - 1
        return (scripted.scripted(r.request_id, r.num_tokens - 1 + i) + wrong) % scripted.V


def script(tokens: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripted, "scripted", lambda request_id, position: tokens[position % len(tokens)])


@pytest.mark.parametrize(("max_tokens", "want", "reason"), [(6, [9, 10, 11, 12], "stop"), (3, [9, 10, 11], "length"),
                                                            (4, [9, 10, 11, 12], "stop")])
def test_d3_a_stop_comes_before_the_cap(max_tokens: int, want: list[int], reason: str,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """The run [10, 11, STOP 12, 20, 21, 22] after a first token 9: the stop ends it, or a nearer cap."""
    script([9, 10, 11, 12, 20, 21, 22], monkeypatch)
    engine = script_engine(drafter=ScriptDrafter, kv_manager=RadixManager)
    engine.add(each := Request("a", [1], SamplingParams(max_tokens=max_tokens, stop_token_ids=(12,))))
    events = drain(engine)
    assert each.output_token_ids == want and events[-1].finish_reason == reason
    assert [t for e in events for t in e.token_ids] == want
    assert engine.counters.forward_passes == 2


def test_x12_refused_drafts_are_not_published() -> None:
    """4 + 4 tokens, 7 of them stored: one whole block, whatever was guessed on top."""
    engine = script_engine(drafter=partial(ScriptDrafter, k=4, wrong_every=1), kv_manager=RadixManager, block_size=4)
    first = Request("first", [1, 2, 3, 4], SamplingParams(max_tokens=4))
    engine.add(first)
    drain(engine)
    assert first.num_drafted_tokens > 0 == first.num_accepted_tokens
    again = Request("again", [*first.token_ids, 9], SamplingParams(max_tokens=4))
    engine.add(again)
    drain(engine)
    assert again.num_cached_tokens == 4 and again.output_token_ids == expected(again)


# --- what else may happen ---------------------------------------------------------------------------------------------


def test_a_draft_that_blocks_are_short_for_is_cut_before_anybody_is_preempted() -> None:
    """A pool of 6 blocks of 4: `a` needs 2, and while it runs `b` needs 3, but with a draft of 12 tokens up to 5."""
    counted = []
    for each_drafter in (partial(ScriptDrafter, k=12, wrong_every=1), NoDrafter):
        engine = script_engine(drafter=each_drafter, num_blocks=6, block_size=4, watermark=0.0)
        requests = [Request(name, [1] * 4, SamplingParams(max_tokens=n)) for name, n in (("a", 5), ("b", 20))]
        for each in requests:
            engine.add(each)
        drain(engine)
        assert all(each.output_token_ids == expected(each) for each in requests)
        counted.append((engine.counters.preemptions, engine.counters.drafted_tokens > 0))
    assert counted == [(0, True), (0, False)]


class Drawn(SpeculativeDrafter):
    """Draws its guesses from the very distributions of the target: all of them stand."""

    def guess(self, rooms: Mapping[Request, int]) -> dict[str, Draft]:
        drafts = {request.request_id: Draft() for request in rooms}
        for r, room in rooms.items():
            for i in range(room):
                choose(self.engine.runner.row(r.request_id, r.num_tokens - 1 + i), r, drafts[r.request_id])
        return drafts


def test_a_draft_is_cut_short_whatever_its_guesses_are() -> None:
    """A guess that ends the request makes its draft short, and a short draft fits where a long one does not.

    If the long one were dropped whole, and tokens drawn anew, an end would come twice as often as it should.
    """
    sampled: dict[str, Any] = {"temperature": 1.0, "top_k": 4}
    engine = script_engine(RandomRunner, drafter=Drawn, num_blocks=26, block_size=1, watermark=0.0, max_num_seqs=2)
    first, second = (processed_probs(engine.runner.row("r", i), SamplingParams(**sampled)) for i in (3, 4))
    end = int((second * (first == 0)).argmax())
    trials, ends, cut = 2000, 0, 0
    for trial in range(trials):
        r = Request("r", [1] * 4, SamplingParams(max_tokens=6, stop_token_ids=(end,), **sampled))
        r.generator.manual_seed(trial)
        engine.add(r)
        engine.add(Request("n", [5] * 20, SamplingParams(max_tokens=7)))
        while len(r.output_token_ids) < 2:
            engine.step()
        ends += r.output_token_ids[1] == end
        cut += r.num_drafted_tokens == 1
        engine.abort("r")
        engine.abort("n")
        engine.step()
    chance = float(second[end])
    assert 0.1 < chance < 0.6 and cut == trials, "there was room for one guess"
    assert binomtest(ends, trials, chance).pvalue > 1e-3, f"{ends / trials:.3f} end, where {chance:.3f} should"


class Broken(ScriptDrafter):
    """Fails in its third step."""

    calls = 0

    def guess(self, rooms: Mapping[Request, int]) -> dict[str, Draft]:
        self.calls += 1
        if self.calls == 3:
            raise RuntimeError("the draft's pass broke")
        return super().guess(rooms)


def test_a_drafter_that_fails_costs_its_drafts_and_nothing_else() -> None:
    engine = script_engine(drafter=partial(Broken, k=2, wrong_every=2))
    engine.add(each := Request("a", [1, 2], SamplingParams(max_tokens=12)))
    with pytest.warns(UserWarning, match="no drafts in this step: RuntimeError: the draft's pass broke"):
        drain(engine)
    assert each.output_token_ids == expected(each) and each.num_accepted_tokens >= 3


def test_nan_from_a_draft_model_is_no_draft(tiny_llama: LoadedModel) -> None:
    engine = build("radix", tiny_llama, drafter=make("copy", tiny_llama))
    d, want = engine.drafter, outputs(build("nocache", tiny_llama), [[1, 2], [3, 4]], SamplingParams(max_tokens=8))
    feed = d._feed

    def poisoned(sequences: Mapping[str, list[int]]) -> torch.Tensor:
        logits = feed(sequences)
        for i, name in enumerate(sequences):
            if name == "1":
                logits[i] = float("nan")
        return logits

    d._feed = poisoned
    requests = [Request(str(i), p, SamplingParams(max_tokens=8)) for i, p in enumerate(([1, 2], [3, 4]))]
    for each in requests:
        engine.add(each)
    drain(engine)
    assert [each.output_token_ids for each in requests] == want
    assert requests[0].num_accepted_tokens > 0 == requests[1].num_drafted_tokens


class NanRunner(scripted.ScriptRunner):
    def row(self, request_id: str, position: int) -> torch.Tensor:
        return super().row(request_id, position) * (float("nan") if request_id == "bad" and position > 5 else 1)


def test_nan_in_a_checked_run_is_one_requests_fault() -> None:
    engine = script_engine(NanRunner, drafter=partial(ScriptDrafter, k=3))
    bad, good = (Request(name, [1] * 4, SamplingParams(max_tokens=9)) for name in ("bad", "good"))
    engine.add(bad)
    engine.add(good)
    error, = (e for e in drain(engine) if e.error)
    assert error.request_id == "bad" and "64 of 64 logits are NaN" in str(error.error)
    assert good.output_token_ids == expected(good)


@pytest.mark.parametrize("name", ["copy", "early-exit", "head"])
def test_an_interrupted_draft_pass_can_be_made_again(name: str, tiny_llama: LoadedModel,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[3, 1, 4], [9, 2]]
    want = outputs(build("nocache", tiny_llama), prompts, SamplingParams(max_tokens=15))
    engine, calls = build("radix", tiny_llama, drafter=make(name, tiny_llama)), 0
    owner, method = ((engine.drafter, "_feed") if name == "head" else (engine.drafter.llama, "hidden_states"))
    hidden_states = getattr(owner, method)

    def interrupted(*args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        hidden = hidden_states(*args)
        if calls == 6:
            raise KeyboardInterrupt
        return hidden

    setattr(owner, method, interrupted)
    try:
        requests = [Request(str(i), p, SamplingParams(max_tokens=15)) for i, p in enumerate(prompts)]
        for each in requests:
            engine.add(each)
        with pytest.raises(KeyboardInterrupt):
            drain(engine)
        drain(engine)
    finally:
        delattr(owner, method)
    assert [each.output_token_ids for each in requests] == want
    ended(engine)


def test_an_abort_while_a_draft_is_checked_harms_nobody() -> None:
    engine = script_engine(drafter=partial(ScriptDrafter, k=3), kv_manager=RadixManager, block_size=4)
    requests = [Request(name, [1] * 4, SamplingParams(max_tokens=12)) for name in "ab"]
    for each in requests:
        engine.add(each)
    engine.step()

    def abort(chunks: object) -> None:
        engine.abort("a")
        engine.runner.before = None

    engine.runner.before = abort
    events = engine.step()
    check(engine)
    assert [(e.request_id, e.finish_reason, len(e.token_ids)) for e in events] == [("a", "abort", 0), ("b", None, 4)]
    drain(engine)
    assert requests[1].output_token_ids == expected(requests[1])


def test_a_request_id_that_comes_again_starts_anew(tiny_llama: LoadedModel) -> None:
    for name in DRAFTS:
        engine = build("radix", tiny_llama, drafter=make(name, tiny_llama))
        for prompt in ([5, 6, 5, 6, 5], [9, 8, 9, 8], [5, 6, 7]):
            want = outputs(build("nocache", tiny_llama), [prompt], SamplingParams(max_tokens=9))
            assert outputs(engine, [prompt], SamplingParams(max_tokens=9)) == want
            ended(engine)


# --- the pause rule ---------------------------------------------------------------------------------------------------


def test_the_pause_rule_by_hand() -> None:
    pause = Pause(cost=0.25, after=8)
    assert [pause(a, d) for a, d in ((0, 7), (0, 8), (1, 8), (2, 8), (24, 100), (25, 100))] == [
        False, True, True, False, True, False]
    with pytest.raises(ValueError, match=r"cost -0.1 and after 16"):
        Pause(cost=-0.1)
    with pytest.raises(ValueError, match=r"after 0"):
        Pause(cost=0.1, after=0)


def test_a_request_whose_drafts_do_not_pay_gets_no_more() -> None:
    """At k = 4 and one right guess in five: 16 drafted, 3 or 4 right, below a half; the others' drafts go on."""
    class Right(ScriptDrafter):
        def one(self, r: Request, i: int) -> int:
            return super().one(r, i) if r.request_id == "good" else (super().one(r, i) + 1) % scripted.V

    def make(engine: ContinuousEngine) -> Right:
        made = Right(engine, k=4)
        made.pause = Pause(cost=0.5, after=16)
        return made

    engine = script_engine(drafter=make)
    good, bad = (Request(name, [1, 2], SamplingParams(max_tokens=40)) for name in ("good", "bad"))
    engine.add(good)
    engine.add(bad)
    drain(engine)
    assert (bad.num_drafted_tokens, bad.num_accepted_tokens) == (16, 0)
    assert good.num_drafted_tokens == good.num_accepted_tokens > 16
    assert bad.output_token_ids == expected(bad) and good.output_token_ids == expected(good)


# --- random traffic ---------------------------------------------------------------------------------------------------


def random_run(seed: int) -> Counter:
    rng = random.Random(seed)
    seqs = rng.randint(1, 6)
    budget = rng.randint(seqs, seqs + 16)
    choices: list[Callable[[ContinuousEngine], SpeculativeDrafter]] = [
        partial(ScriptDrafter, k=rng.randint(1, 6), wrong_every=rng.randint(1, 5)),
        partial(NgramDrafter, num_speculative_tokens=rng.randint(1, 4))]
    engine = script_engine(drafter=rng.choice(choices), kv_manager=rng.choice([KVManager, RadixManager]),
                           block_size=rng.choice([1, 2, 4, 8]), num_blocks=rng.randint(8, 50), max_num_seqs=seqs,
                           max_num_batched_tokens=budget, max_prefill_chunk=rng.choice([None, rng.randint(1, budget)]),
                           watermark=rng.choice([0.0, 0.01, 0.2]))
    waiting = [Request(f"r{i}", prompt, SamplingParams(max_tokens=rng.randint(1, 12)))
               for i, prompt in enumerate(overlapping(rng, rng.randint(2, 10)))]
    accepted, aborted, steps = list[Request](), set[str](), 0
    while waiting or engine.has_unfinished():
        while waiting and rng.random() < 0.5:
            try:
                engine.add(waiting[0])
                accepted.append(waiting[0])
            except ValueError:
                pass
            waiting.pop(0)
        if accepted and rng.random() < 0.05:
            victim = rng.choice(accepted).request_id
            aborted |= {victim} if engine._find(victim) else set()
            engine.abort(victim)
        before = engine.counters.tokens_computed
        assert not any(event.error for event in engine.step())
        assert engine.counters.tokens_computed - before <= budget
        check(engine)
        steps += 1
        assert steps < 3000
    for each in accepted:
        whole = expected(each)
        assert each.output_token_ids == (whole[:len(each.output_token_ids)] if each.request_id in aborted else whole)
    ended(engine)
    return Counter(drafted=engine.counters.drafted_tokens, accepted=engine.counters.accepted_tokens,
                   preempted=engine.counters.preemptions, aborted=len(aborted))


def test_200_random_schedules_with_drafts() -> None:
    happened = Counter[str]()
    for seed in range(200):
        try:
            happened += random_run(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert happened["accepted"] > 300 and happened["drafted"] > 1000 and happened["preempted"] > 20, happened


# --- from the outside -------------------------------------------------------------------------------------------------


def test_the_completion_says_how_many_guesses_stood(tiny_llama: LoadedModel) -> None:
    prompt = [5, 6, 5, 6, 5, 6]
    for settings in ({"row": "radix", "draft": "early-exit:1"}, {"row": "continuous", "draft": "ngram"}):
        llm = LLM(tiny_llama, **settings, num_speculative_tokens=3)
        done, = llm.generate([prompt], SamplingParams(max_tokens=20))
        counters = llm.engine.counters
        assert done.num_drafted_tokens == counters.drafted_tokens > 0
        assert done.num_accepted_tokens == counters.accepted_tokens
        assert llm.engine.drafter.inner.k == 3
    assert LLM(tiny_llama, row="ngram", num_speculative_tokens=2).engine.drafter.inner.k == 2
    assert LLM(tiny_llama, row="ngram").engine.drafter.inner.k == 4
    assert LLM(tiny_llama, row="radix").generate(prompt)[0].num_drafted_tokens == 0


@pytest.mark.parametrize(("settings", "words"), [
    ({"row": "paged", "draft": "ngram"}, "'ngram' needs a row that runs continuously, .* liteinfer-paged does not"),
    ({"row": "radix", "num_speculative_tokens": 4}, "num_speculative_tokens 4 needs a draft, .* liteinfer-radix"),
    ({"row": "speculative"}, "no draft head comes with liteinfer for"),
    ({"row": "radix", "draft": "early-exit"}, 'as in "early-exit:6", got \'early-exit\''),
    ({"row": "radix", "draft": "early-exit:x"}, "got 'early-exit:x'"),
    ({"row": "radix", "draft": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens must .* 1, got 0"),
    ({"row": "radix", "draft": "early-exit:7"}, "2 layers, got 7"),
    ({"row": "radix", "draft": "no-such-model"}, "no-such-model")])
def test_a_draft_that_cannot_be_is_refused(settings: dict, words: str, tiny_llama: LoadedModel) -> None:
    with pytest.raises(ValueError, match=words):
        LLM(tiny_llama, **settings)


def test_a_draft_model_by_name_is_loaded_as_the_target_is(monkeypatch: pytest.MonkeyPatch,
                                                          tiny_llama: LoadedModel) -> None:
    asked = []

    def load(name: str, **settings: object) -> LoadedModel:
        asked.append((name, settings))
        return tiny_llama

    monkeypatch.setattr("liteinfer.speculative.choose.load_model", load)
    llm = LLM(tiny_llama, row="speculative", draft="some/model")
    assert asked == [("some/model", {"dtype": tiny_llama.dtype, "device": tiny_llama.device})]
    done, = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=12))
    assert done.num_accepted_tokens == done.num_drafted_tokens == 2 * 4 + 0


def test_the_trace_tells_checked_drafts_from_prefill() -> None:
    trace = StepTrace()
    engine = script_engine(drafter=partial(ScriptDrafter, k=3), trace=trace)
    engine.add(Request("a", [1] * 6, SamplingParams(max_tokens=9)))
    drain(engine)
    parts = [(p.what, p.num_tokens, len(p.draft), p.new_tokens) for step in trace.steps for p in step.parts]
    assert parts == [("prefill", 6, 0, 1), ("verify", 4, 3, 4), ("verify", 4, 3, 4)]
    assert {e["cat"] for e in trace.chrome()["traceEvents"] if e["ph"] == "X"} == {"prefill", "verify"}
