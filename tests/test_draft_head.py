"""The draft head: what it is fed is what it was trained on, what it knows after hits and preemptions, its files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from liteinfer.kv_manager import KVManager
from liteinfer.llm import LLM
from liteinfer.loading import LoadedModel, tiny_model
from liteinfer.model.linear import Plain
from liteinfer.radix_manager import RadixManager
from liteinfer.request import Request, SamplingParams
from liteinfer.sampling import processed_probs
from liteinfer.speculative.draft_head import DraftHeadDrafter
from liteinfer.speculative.draft_model import DraftModelDrafter, draft_ahead
from liteinfer.speculative.drafter import Draft
from liteinfer.speculative.fallback import FallbackDrafter
from liteinfer.speculative.head_files import CARD, WEIGHTS, load_head, save_head, target_hash
from liteinfer.speculative.ngram import NgramDrafter
from liteinfer.speculative.train.ahead import Ahead, Batch, acceptance
from liteinfer.speculative.train.corpus import Example, answers
from liteinfer.speculative.train.fit import Learner, Settings
from liteinfer.speculative.verify import verify
from tests.conftest import build, outputs
from tests.heads import features, random_head, trained

pytestmark = pytest.mark.ch08


# --- the same numbers in training and in the engine -------------------------------------------------------------------


class Watched(DraftHeadDrafter):
    """Remembers its drafts: request id, tokens the request had, guesses."""

    def guess(self, rooms: Mapping[Request, int]) -> dict[str, Draft]:
        drafts = super().guess(rooms)
        self.seen: list[tuple[str, int, list[int]]] = getattr(self, "seen", [])
        self.seen += [(r.request_id, r.num_tokens, list(drafts[r.request_id].token_ids))
                      for r in rooms if r.request_id in drafts]
        return drafts


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(("kv_manager", "settings"), [
    (KVManager, {}), (RadixManager, {"max_num_batched_tokens": 8}),
    (KVManager, {"num_blocks": 11, "block_size": 4, "watermark": 0.0})], ids=["plain", "chunked", "preempted"])
def test_every_guess_is_what_the_training_pass_would_say(layers: int, kv_manager: type[KVManager], settings: dict,
                                                         tiny: LoadedModel) -> None:
    """Rewound, caught up in pieces, begun anew: each draft is that of a whole pass over the request's tokens."""
    weights = random_head(tiny, layers=layers)
    drafter = partial(Watched, weights=weights, linear=Plain())
    engine, requests = served(tiny, drafter, kv_manager=kv_manager, **settings)
    assert (engine.counters.preemptions > 0) == ("num_blocks" in settings)
    assert same_as_in_training(tiny, weights, engine.drafter, requests) > 100


class Wrong(NgramDrafter):
    """Guesses that mostly do not stand, in two steps of three."""

    def guess(self, rooms: Mapping[Request, int]) -> dict[str, Draft]:
        return {r.request_id: Draft([r.num_tokens % 64, 2, 1][:room]) for r, room in rooms.items() if r.num_tokens % 3}


@pytest.mark.parametrize("settings", [{}, {"num_blocks": 11, "block_size": 4, "watermark": 0.0}],
                         ids=["plain", "preempted"])
def test_what_it_heard_of_another_drafters_refused_guesses_is_dropped(settings: dict, tiny: LoadedModel) -> None:
    """Steps that another drafts for pile up, refused guesses among them; the head's next draft knows none of these."""
    weights = random_head(tiny)
    both = partial(FallbackDrafter, first=Wrong, then=partial(Watched, weights=weights, linear=Plain()))
    engine, requests = served(tiny, both, **settings)
    assert (engine.counters.preemptions > 0) == bool(settings)
    assert engine.counters.drafted_tokens - engine.counters.accepted_tokens > 40
    assert same_as_in_training(tiny, weights, engine.drafter.then, requests) > 30


def served(model: LoadedModel, drafter: Any, **settings: Any) -> tuple[Any, list[Request]]:
    """Four requests of different lengths, done; and their engine."""
    engine = build("radix", model, max_num_seqs=4, drafter=drafter, **{"kv_manager": KVManager} | settings)
    head = getattr(engine.drafter, "then", engine.drafter)
    requests = [Request(f"r{i}", [(11 * i + 5 * j) % 64 for j in range(6 + 5 * i)], SamplingParams(max_tokens=14))
                for i in range(4)]
    for each in requests:
        engine.add(each)
    while engine.has_unfinished():
        assert not any(event.error for event in engine.step())
        head.cache.check()
    return engine, requests


def same_as_in_training(model: LoadedModel, weights: dict[str, Tensor], drafter: Watched,
                        requests: list[Request]) -> int:
    """Compare all its guesses with those of a whole pass over the tokens the requests had then; how many there were."""
    head, looked = Learner(model, Settings(), weights).head, 0
    for name, known, guesses in drafter.seen:
        ids = next(each for each in requests if each.request_id == name).token_ids[:known]
        told = torch.cat((features(model, ids[:-1]), torch.zeros(len(guesses) + 1, model.config.hidden_size).double()))
        batch = Batch([Example(torch.tensor([*ids, *guesses, 0]), told, 1, "")], torch.float64, model.device)
        with torch.inference_mode():
            for j, (after, _) in enumerate(batch.steps(head, len(guesses))):
                row = after[0, known - 2 + j]
                assert int(head.tokens[head.logits(row).argmax()]) == guesses[j], (name, known, j)
                looked += 1
    return looked


def test_attention_ahead_by_hand() -> None:
    """Against a loop over rows: step j sees step 0's keys up to i - j, then one key of each later step."""
    generator, length, steps = torch.Generator().manual_seed(0), 5, 3
    each = [[torch.randn(2 * length, heads, 4, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)]
            for _ in range(steps)]
    cache = Ahead(2, length, 1)
    for j, (q, k, v) in enumerate(each):
        out = cache.attend(0, q, k, v).view(2, length, 4, 4)
        for b in range(2):
            for i in range(j, length):
                rows = [(0, at) for at in range(i - j + 1)] + [(s, i - j + s) for s in range(1, j + 1)]
                for h in range(4):
                    keys = torch.stack([each[s][1].view(2, length, 2, 4)[b, at, h // 2] for s, at in rows])
                    values = torch.stack([each[s][2].view(2, length, 2, 4)[b, at, h // 2] for s, at in rows])
                    weights = (keys @ q.view(2, length, 4, 4)[b, i, h] / 2).softmax(0)
                    torch.testing.assert_close(out[b, i, h], weights @ values)


def test_acceptance_is_the_share_of_leading_right_guesses(tiny_llama: LoadedModel) -> None:
    """Counted again by drafting from every place of an answer with an engine's drafter."""
    weights = trained(tiny_llama)[0]
    example, = answers(tiny_llama, [("x", trained(tiny_llama)[1][0])], 0, 20, greedy=True)
    head = Learner(tiny_llama, Settings(), weights).head
    with torch.inference_mode():
        shares = acceptance(head, Batch([example], torch.float64, tiny_llama.device), 3).tolist()
    ids, found = example.ids.tolist(), []
    for known in range(example.prompt_len + 1, len(ids) - 2):     # from each place, three more tokens follow
        engine = build("radix", tiny_llama, drafter=partial(Watched, weights=weights, num_speculative_tokens=3))
        engine.add(Request("r", ids[:known - 1], SamplingParams(max_tokens=12)))
        engine.step()
        engine.step()
        (_, _, guesses), = engine.drafter.seen
        right = [guess == token for guess, token in zip(guesses, ids[known:known + 3], strict=True)]
        found.append([*right, False].index(False) / 3)
    assert found == pytest.approx(shares[1:]) and 0 < sum(found) < len(found)   # a target's first token has no draft


# --- what it knows ----------------------------------------------------------------------------------------------------


def test_after_a_prefix_hit_it_knows_the_text_from_there_on(tiny_llama: LoadedModel) -> None:
    prompt = [(5 * i) % 64 for i in range(40)]
    engine = build("radix", tiny_llama, drafter=partial(DraftHeadDrafter, weights=random_head(tiny_llama)))
    outputs(engine, [prompt], SamplingParams(max_tokens=4))
    engine.add(each := Request("again", prompt, SamplingParams(max_tokens=6)))
    engine.step()
    engine.step()
    assert each.num_cached_tokens == 32 and engine.drafter.heard["again"].start == 32
    assert engine.drafter.cache.lengths["again"] == 40 - 32


def test_a_head_that_learned_is_right_more_often_than_one_that_did_not(tiny_llama: LoadedModel) -> None:
    share = {}
    for name, weights in (("random", random_head(tiny_llama)), ("trained", trained(tiny_llama)[0])):
        engine = build("radix", tiny_llama, drafter=partial(DraftHeadDrafter, weights=weights))
        prompts = trained(tiny_llama)[1]
        want = outputs(build("nocache", tiny_llama), prompts, SamplingParams(max_tokens=20))
        assert outputs(engine, prompts, SamplingParams(max_tokens=20)) == want
        share[name] = engine.counters.accepted_tokens / engine.counters.drafted_tokens
    assert share["trained"] > share["random"] + 0.2


def test_a_request_the_heads_pool_is_short_for_goes_without(tiny_llama: LoadedModel) -> None:
    engine = build("radix", tiny_llama, drafter=partial(DraftHeadDrafter, weights=random_head(tiny_llama)),
                   max_num_seqs=2, block_size=4)
    taken = engine.drafter.cache.pool.allocate(engine.drafter.cache.pool.num_free - 3)
    requests = [Request(name, [1, 2, 3], SamplingParams(max_tokens=10)) for name in "ab"]
    for each in requests:
        engine.add(each)
    while engine.has_unfinished():
        engine.step()
    want, = outputs(build("nocache", tiny_llama), [[1, 2, 3]], SamplingParams(max_tokens=10))
    assert [each.output_token_ids for each in requests] == [want, want]
    assert requests[0].num_drafted_tokens > 0 == requests[1].num_drafted_tokens, "two blocks for one, one for the other"
    engine.drafter.cache.pool.free(taken)


def test_a_preempted_request_keeps_nothing_in_the_heads_pool(tiny_llama: LoadedModel) -> None:
    engine = build("continuous", tiny_llama, drafter=partial(DraftHeadDrafter, weights=random_head(tiny_llama)),
                   num_blocks=10, block_size=4, watermark=0.0, max_num_seqs=4)
    for i in range(4):
        engine.add(Request(str(i), [i] * 9, SamplingParams(max_tokens=16)))
    while engine.has_unfinished():
        engine.step()
        held = engine.drafter.cache.tables.keys()
        assert held <= {r.request_id for r in (*engine.scheduler.running, *engine.scheduler.waiting)}
    assert engine.counters.preemptions > 0
    assert engine.drafter.cache.pool.num_used == 0 and not engine.drafter.heard and not engine.drafter.next


def test_a_step_that_cannot_be_heard_costs_no_request_its_tokens(tiny_llama: LoadedModel,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """One step of each request in four goes unheard: a warning, no draft for it until the next, the same tokens."""
    engine = build("radix", tiny_llama, drafter=partial(DraftHeadDrafter, weights=random_head(tiny_llama)))
    heard, normed = [0], engine.drafter.head.features

    def failing(hidden: Tensor) -> Tensor:
        heard[0] += 1
        if heard[0] % 4 == 0:
            raise MemoryError("no more")
        return normed(hidden)

    monkeypatch.setattr(engine.drafter.head, "features", failing)
    prompts = [[7, 8, 9, 7, 8], [1, 2, 3, 4, 5, 6]]
    want = outputs(build("nocache", tiny_llama), prompts, SamplingParams(max_tokens=24))
    with pytest.warns(UserWarning, match="request .* is not heard: MemoryError: no more"):
        assert outputs(engine, prompts, SamplingParams(max_tokens=24)) == want
    assert engine.counters.drafted_tokens > 20 and engine.drafter.cache.pool.num_used == 0


def test_in_a_combination_too_a_preempted_request_gives_its_blocks_back(tiny_llama: LoadedModel) -> None:
    model = partial(DraftModelDrafter, model=tiny_llama, num_blocks=64)
    both = partial(FallbackDrafter, first=model, then=NgramDrafter)
    engine = build("continuous", tiny_llama, drafter=both, num_blocks=10, block_size=4, watermark=0.0, max_num_seqs=4)
    for i in range(4):
        engine.add(Request(str(i), [i] * 9, SamplingParams(max_tokens=16)))
    while engine.has_unfinished():
        running = {request.request_id for request in engine.scheduler.running}
        engine.step()
        assert engine.drafter.first.fed.keys() <= running, "who did not run keeps nothing"
    assert engine.counters.preemptions > 0


# --- drafts that end early --------------------------------------------------------------------------------------------


def test_a_draft_ends_where_its_confidence_does(tiny_llama: LoadedModel) -> None:
    """Greedy: a draft is as long as the product of the largest probabilities stays above the bar."""
    weights, lengths, share = trained(tiny_llama)[0], {}, {}
    for bar in (0.0, 0.05, 1.1):
        engine = build("radix", tiny_llama, drafter=partial(Watched, weights=weights, min_confidence=bar))
        outputs(engine, trained(tiny_llama)[1], SamplingParams(max_tokens=20))
        lengths[bar] = [len(guesses) for _, _, guesses in getattr(engine.drafter, "seen", [])]
        share[bar] = engine.counters.accepted_tokens / max(1, engine.counters.drafted_tokens)
    assert not lengths[1.1] and set(lengths[0.05]) >= {1, 2} and max(lengths[0.0]) == 4
    assert sum(lengths[0.05]) < sum(lengths[0.0]) and share[0.05] > share[0.0]


@pytest.mark.parametrize("bar", [0.0, 0.3, 0.5, 0.8])
def test_whether_a_guess_is_checked_does_not_depend_on_what_it_is(bar: float) -> None:
    """A draft far from the target, 3,000 times: the tokens that come of it are the target's, all equally likely.

    To drop a guess for its own small chance, after it was drawn, would make token 0 come 0.33 of the time.
    """
    q, found, length = torch.tensor([0.7, 0.1, 0.1, 0.1]).log(), Counter[int](), Counter[int]()
    for i in range(3000):
        request = Request(str(i), [0], SamplingParams(max_tokens=4, temperature=1.0))
        request.generator.manual_seed(i)
        draft = draft_ahead({request: 2}, {request: [0]}, lambda fed: q.expand(len(fed), -1), bar).get(str(i), Draft())
        found[verify(torch.zeros(3, 4)[:len(draft.token_ids) + 1], draft.token_ids, request, draft.probs)[0]] += 1
        length[len(draft.token_ids)] += 1
    assert length == {{0.0: 2, 0.3: 2, 0.5: 1, 0.8: 0}[bar]: 3000}
    assert chisquare([found[token] for token in range(4)]).pvalue > 1e-3


def test_a_draft_that_goes_wrong_later_keeps_what_was_guessed_before() -> None:
    """To drop it would make the guesses that lead there rarer than the target has them."""
    request = Request("r", [0], SamplingParams(max_tokens=4))
    rows = iter([torch.tensor([[0.0, 1.0]]), torch.tensor([[float("nan"), 1.0]])])
    drafts = draft_ahead({request: 3}, {request: [0]}, lambda _: next(rows))
    assert drafts["r"].token_ids == [1] and next(rows, None) is None
    rows = iter([torch.tensor([[float("nan"), 1.0]])])
    assert draft_ahead({request: 3}, {request: [0]}, lambda _: next(rows)) == {}


@pytest.mark.parametrize("bar", [0.0, 0.2])
def test_drawn_drafts_keep_the_targets_distribution(bar: float, tiny_llama: LoadedModel) -> None:
    """Second and third tokens at temperature 1, top_k 4: chi-square against the target's own, over 2,500 requests.

    The bar is asked before a guess is drawn. Asked after, it would drop the guesses it finds unlikely.
    """
    params: dict[str, Any] = {"temperature": 1.0, "top_k": 4}
    weights, prompt = random_head(tiny_llama, scale=1.0), [3, 1, 4]
    engine = build("radix", tiny_llama, max_num_seqs=32, block_size=4,
                   drafter=partial(DraftHeadDrafter, weights=weights, min_confidence=bar, num_speculative_tokens=3))
    requests = [Request(str(i), prompt, SamplingParams(max_tokens=4, ignore_eos=True, **params)) for i in range(2500)]
    for i, each in enumerate(requests):
        each.generator.manual_seed(i)
        engine.add(each)
    while engine.has_unfinished():
        engine.step()
    drafted, accepted = engine.counters.drafted_tokens, engine.counters.accepted_tokens
    assert 0 < accepted < drafted and drafted > 1500
    pairs, want = Counter(tuple(each.output_token_ids[:3]) for each in requests), dict[tuple[int, ...], float]()
    reference = build("nocache", tiny_llama)
    for first, p1 in chances(reference, prompt, params):
        for second, p2 in chances(reference, [*prompt, first], params):
            for third, p3 in chances(reference, [*prompt, first, second], params):
                want[first, second, third] = p1 * p2 * p3
    assert pairs.keys() <= want.keys(), "nothing outside the four likeliest"
    often = [key for key, chance in want.items() if chance * len(requests) >= 5]
    rest = 1 - sum(want[key] for key in often)
    observed = [pairs[key] for key in often]
    expected = [want[key] * len(requests) for key in often]
    if rest * len(requests) >= 5:
        observed.append(len(requests) - sum(observed))
        expected.append(rest * len(requests))
    scale = sum(observed) / sum(expected)
    assert chisquare(observed, [x * scale for x in expected]).pvalue > 1e-3


def chances(engine: Any, ids: list[int], params: dict) -> list[tuple[int, float]]:
    """The tokens that may follow, and how likely each is."""
    request = Request("x", ids, SamplingParams(**params))
    with torch.inference_mode():
        probs = processed_probs(engine.next_logits(request), request.params)
    engine.release([request])
    return [(token, float(probs[token])) for token in probs.nonzero().flatten().tolist()]


# --- n-grams first ----------------------------------------------------------------------------------------------------


def test_the_head_guesses_where_n_grams_have_nothing(tiny_llama: LoadedModel) -> None:
    ngram, head = (partial(kind, num_speculative_tokens=3) for kind in (NgramDrafter, Watched))
    both = partial(FallbackDrafter, first=ngram, then=partial(head, weights=random_head(tiny_llama)),
                   num_speculative_tokens=3)
    engine = build("radix", tiny_llama, drafter=both)
    prompts = [[7, 8, 9, 7, 8], [1, 2, 3, 4, 5, 6]]
    want = outputs(build("nocache", tiny_llama), prompts, SamplingParams(max_tokens=24))
    d, asked = engine.drafter, []
    first = d.first.guess

    def noting(rooms: Mapping[Request, int]) -> dict[str, Draft]:
        drafts = first(rooms)
        asked.extend((r.request_id, r.num_tokens) for r in rooms if r.request_id in drafts)
        return drafts

    d.first.guess = noting
    assert outputs(engine, prompts, SamplingParams(max_tokens=24)) == want
    of_the_head = {(name, known) for name, known, _ in d.then.seen}
    assert asked and of_the_head and not of_the_head & set(asked)


# --- on disk ----------------------------------------------------------------------------------------------------------


def test_a_head_comes_back_from_disk(tmp_path: Path, tiny_llama: LoadedModel) -> None:
    weights = random_head(tiny_llama, dtype=torch.bfloat16)
    save_head(tmp_path / "head", weights, {"target": "tiny", "target_hash": target_hash(tiny_llama)})
    again = load_head(tmp_path / "head", tiny_llama)
    assert again.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(again[name].double(), tensor.double()), name
    assert again["fc.weight"].dtype == tiny_llama.dtype
    llm = LLM(tiny_llama, row="radix", draft=str(tmp_path / "head"), num_speculative_tokens=2)
    assert isinstance(llm.engine.drafter.inner, DraftHeadDrafter) and llm.engine.drafter.inner.k == 2
    llm = LLM(tiny_llama, row="radix", draft=f"ngram+{tmp_path / 'head'}")
    both = llm.engine.drafter.inner
    assert isinstance(both, FallbackDrafter) and isinstance(both.then, DraftHeadDrafter)
    assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=12))[0].num_drafted_tokens > 0


def test_another_target_is_refused(tmp_path: Path, tiny_llama: LoadedModel) -> None:
    save_head(tmp_path / "head", random_head(tiny_llama), {"target": "tiny", "target_hash": target_hash(tiny_llama)})
    with pytest.raises(ValueError, match=r"draft head head belongs to target 'tiny' .* train one with python -m"):
        LLM(tiny_model("llama", seed=1), row="radix", draft=str(tmp_path / "head"))
    with pytest.raises(ValueError, match="no draft head comes with liteinfer for"):
        LLM(tiny_llama, row="radix", draft="draft-head")


def test_a_target_is_known_in_any_precision_and_from_any_other() -> None:
    hashes = {str(dtype): target_hash(tiny_model("llama", dtype=dtype))
              for dtype in (torch.float32, torch.float16, torch.bfloat16)}
    assert len(set(hashes.values())) == 1
    assert target_hash(tiny_model("llama", seed=1)) not in hashes.values()


def spoil(folder: Path, how: str, model: LoadedModel) -> None:
    weights, card = random_head(model), {"target": "tiny", "target_hash": target_hash(model)}
    if how == "a tensor short":
        del weights["fc.weight"]
    elif how == "a wrong shape":
        weights["norm.weight"] = weights["norm.weight"][:-1]
    elif how == "a token too high":
        weights["tokens"][-1] = model.config.vocab_size
    elif how == "not finite":
        weights["fc.weight"][0, 0] = float("nan")
    elif how == "no token":
        weights["tokens"] = weights["tokens"][:0]
    elif how == "a number for tokens":
        weights["tokens"] = weights["tokens"][0]
    elif how == "no layer":
        weights = {name: tensor for name, tensor in weights.items() if not name.startswith("layers.")}
    save_head(folder, weights, card)
    if how == "no weights":
        (folder / WEIGHTS).unlink()
    elif how == "cut short":
        (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:100])
    elif how == "no hash":
        (folder / CARD).write_text(json.dumps({"target": "tiny"}))
    elif how == "no JSON":
        (folder / CARD).write_text("{")


@pytest.mark.parametrize(("how", "words"), [
    ("a tensor short", "tensor fc.weight is None, "), ("a wrong shape", r"norm.weight is \(31,\), \(32,\) is needed"),
    ("a token too high", "tokens reach 64, the target has 64"), ("not finite", "fc.weight has numbers that are not"),
    ("no layer", "is not one"), ("no token", "there is no token that it may guess"),
    ("a number for tokens", "is not one"), ("no weights", "cannot be read"), ("cut short", "cannot be read"),
    ("no hash", "card.json names no target_hash"), ("no JSON", "card.json cannot be read")])
def test_a_spoiled_head_is_refused(how: str, words: str, tmp_path: Path, tiny_llama: LoadedModel) -> None:
    spoil(tmp_path / "head", how, tiny_llama)
    with pytest.raises(ValueError, match=f"draft head head: .*{words}"):
        load_head(tmp_path / "head", tiny_llama)
