"""Chapter 8: its worked examples, the numbers in its text, and its deliberate breaks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.ceilings import Sizes
from liteinfer.engines.base import run, take
from liteinfer.engines.continuous import ContinuousEngine, NoDrafter
from liteinfer.loading import LoadedModel, tiny_model
from liteinfer.model.linear import Plain
from liteinfer.plots import ch08
from liteinfer.request import Request, SamplingParams, TokenEvent
from liteinfer.sampling import pick, processed_probs, sample
from liteinfer.scheduler import Chunk
from liteinfer.speculative import choose
from liteinfer.speculative import drafter as drafting
from liteinfer.speculative import verify as rule
from liteinfer.speculative.draft_head import DraftHeadDrafter
from liteinfer.speculative.draft_model import DraftModelDrafter
from liteinfer.speculative.drafter import Draft, Pause
from liteinfer.speculative.head_files import load_head, read_card, shipped_head
from liteinfer.speculative.ngram import NgramIndex
from liteinfer.speculative.train.plan import Plan
from tests.conftest import build, outputs
from tests.heads import random_head, trained

pytestmark = pytest.mark.ch08
README = (Path(__file__).parents[1] / "chapters" / "08_speculative" / "README.md").read_text(encoding="utf-8")
PROMPT = [9, 44, 1, 62, 15, 33, 8, 2, 60]
FORCED = SamplingParams(max_tokens=24, ignore_eos=True)


def says(*texts: str) -> None:
    """The chapter's text has these words, wherever its lines break."""
    readme = " ".join(README.split())
    assert [text for text in texts if " ".join(text.split()) not in readme] == []


# --- worked by hand --------------------------------------------------------------------------------------------------


def test_ten_tokens_by_hand(tiny_llama: LoadedModel) -> None:
    prompt, output = ch08.HAND
    assert len(prompt) + len(output) == 10
    first, second, third = ch08.by_hand(tiny_llama)
    assert (first.own, first.draft, first.taken, first.stored) == ((1, 2, 3, 1), (), (2,), 4)
    assert (second.own, second.draft, second.taken, second.stored) == ((2,), (3, 1), (3, 1, 2), 7)
    assert (third.own, third.draft, third.taken, third.stored) == ((2,), (3, 1), (3, 4), 9)
    assert (second.kept, third.kept) == (2, 1)
    assert [*first.taken, *second.taken, *third.taken] == output
    says("| 1 | 1 2 3 1 | - | 2 | 2 | 4 |", "| 2 | 2 | 3 1 | 3 1 2 | 3 1 2 | 7 |", "| 3 | 2 | 3 1 | 3 4 . | 3 4 | 9 |",
         "six tokens in three passes", "Of 4 guesses 3 stood")


def outcomes(p: Sequence[float], q: Sequence[float], grid: tuple[int, int], verify_one: Any = rule.verify_one,
             params: SamplingParams = SamplingParams(temperature=1.0)) -> list[Fraction]:   # noqa: B008 - frozen
    """How often each token comes out: every guess as often as q has it, and a grid of the two numbers drawn."""
    found = [Fraction(0)] * len(p)
    logits, probs = torch.tensor(p, dtype=torch.float64).log(), torch.tensor(q, dtype=torch.float64)
    for guess, weight in enumerate(q):
        for first in range(grid[0]):
            for second in range(grid[1]):
                given = iter(((first + 0.5) / grid[0], (second + 0.5) / grid[1]))
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(rule, "uniform", lambda _, given=given: next(given))
                    token = verify_one(logits, guess, Request("r", [0], params), probs)
                found[token] += Fraction(str(weight)) / (grid[0] * grid[1])
    return found


def test_three_tokens_by_hand() -> None:
    """Of 70 numbers 30 keep guess 1, of 4 numbers 3 give token 0 in its place; what comes out is p exactly."""
    assert outcomes(ch08.P, ch08.Q, (70, 4)) == [Fraction(5, 10), Fraction(3, 10), Fraction(2, 10)]
    kept = [min(p, q) for p, q in zip(ch08.P, ch08.Q, strict=True)]
    residual = [p - k for p, k in zip(ch08.P, kept, strict=True)]
    assert (sum(kept), sum(residual)) == pytest.approx((0.6, 0.4))
    assert [r / sum(residual) for r in residual] == pytest.approx([0.75, 0, 0.25])
    says("| p, the target's | 0.5 | 0.3 | 0.2 |", "| q, the draft's | 0.2 | 0.7 | 0.1 |",
         "| kept: min(p, q) | 0.2 | 0.3 | 0.1 |", "| refused | 0 | 0.4 | 0 |",
         "| left over: max(0, p - q) | 0.3 | 0 | 0.1 |", "| drawn again: refused in all, 0.4, times 0.75, 0, 0.25 | "
         "0.3 | 0 | 0.1 |", "0.3 / 0.7 = 0.43", "60 % of the guesses are kept")


def test_a_guess_that_was_not_drawn() -> None:
    """One-hot q by the general rule, and by drawing from p and comparing: p comes out, whatever the guess."""
    exactly = [Fraction(5, 10), Fraction(3, 10), Fraction(2, 10)]
    for guess, numbers in enumerate((10, 7, 8)):                             # 3 : 2, 5 : 2 and 5 : 3 are left over
        q = [float(token == guess) for token in range(3)]
        assert outcomes(ch08.P, q, (10, numbers)) == exactly
        drawn = partial(drawn_and_compared, kept=(kept := list[bool]()))
        assert outcomes(ch08.P, q, (10, 1), drawn) == exactly and sum(kept) == 10 * ch08.P[guess]
    says("kept with 0.5, 0.3 or 0.2", "min(1, p(x) / 1) = p(x)")


def drawn_and_compared(logits: Tensor, guess: int, request: Request, q: Tensor, kept: list[bool]) -> int:
    """The rule as it is for guesses that were not drawn; notes which stood."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("liteinfer.sampling.uniform", rule.uniform)            # the same number as the rule's own
        token = rule.verify_one(logits, guess, request, None)
    kept += [token == guess] if q[guess] else []
    return token


def test_seeded_requests_say_the_same_with_guesses_that_are_not_drawn(tiny_llama: LoadedModel) -> None:
    seeded = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.9, seed=7)
    plain = outputs(build("radix", tiny_llama), [PROMPT], seeded)
    copy = partial(DraftModelDrafter, model=tiny_llama, linear=Plain())
    ngram, model = build("ngram", tiny_llama), build("radix", tiny_llama, drafter=copy)
    assert outputs(ngram, [PROMPT], seeded) == outputs(model, [PROMPT], seeded) == plain
    assert 0 < model.counters.accepted_tokens < model.counters.drafted_tokens


def test_ngram_examples() -> None:
    def follows(ids: list[int], count: int) -> list[int]:
        index = NgramIndex(range(1, 5))
        index.extend(ids)
        return index.follows(ids, count)

    assert follows([5, 6, 7, 8, 9, 5, 6], 4) == [7, 8, 9] and follows([4, 4], 4) == [4, 4]
    assert follows([1, 2, 3, 1, 2], 2) == [3, 1] and follows([1, 2, 3, 1], 2) == [2, 3] and follows([1, 2], 2) == []
    says("`5 6 7 8 9 5 6` gives `7 8 9`", "`4 4` gives `4 4`")


# --- the numbers in the text -----------------------------------------------------------------------------------------


def test_the_strip(smol: LoadedModel) -> None:
    """The real model's output is far from any tie, and what the text says of the picture holds."""
    prompt = smol.encode_chat([{"role": "user", "content": ch08.SENTENCE}])
    with_guesses = ch08.speculate(smol, prompt, SamplingParams(max_tokens=32))
    without = ch08.speculate(smol, prompt, SamplingParams(max_tokens=32), row="radix")
    taken = [token for each in with_guesses for token in each.taken]
    assert taken == [token for each in without for token in each.taken]
    ids = torch.tensor([prompt + taken[:-1]])
    with torch.inference_mode():
        top = smol.transformers_model()(ids, use_cache=False).logits[0, len(prompt) - 1:].topk(2).values
    assert float((top[:, 0] - top[:, 1]).min()) > 0.1
    assert (len(taken), len(without), len(with_guesses)) == (13, 13, 7)
    assert [(each.kept, len(each.draft)) for each in with_guesses] == [
        (0, 0), (0, 0), (2, 2), (0, 0), (0, 2), (3, 3), (2, 2)]
    assert [ch08.word(smol, token) for token in with_guesses[4].draft] == ["sea", "."]
    says("13 tokens in 7 passes", "guesses `sea` and `.`, and the target says `moon`", "7 of 9 guesses stand")


def test_expected_tokens(tiny_llama: LoadedModel) -> None:
    """(1 - a^(k+1)) / (1 - a), by adding up and by a live run."""
    for a, k in ((0.8, 4), (0.5, 2), (0.0, 3)):
        by_hand = sum((n + 1) * a ** n * (1 - a) for n in range(k)) + (k + 1) * a ** k
        assert ch08.expected_tokens(a, k) == pytest.approx(by_hand)
    assert ch08.expected_tokens(1.0, 4) == 5
    assert [round(ch08.expected_tokens(0.8, k), 2) for k in (1, 2, 4, 8)] == [1.8, 2.44, 3.36, 4.33]
    assert [round(ch08.counted_acceptance(0.8, k), 2) for k in (1, 2, 4, 8)] == [0.8, 0.72, 0.59, 0.42]
    right, = ch08.live(tiny_llama, [1.0], [4], tokens=41)
    assert right.tokens_per_pass == 5 and right.acceptance == 1
    some, = ch08.live(tiny_llama, [0.8], [4])
    assert some.tokens_per_pass == pytest.approx(ch08.expected_tokens(0.8, 4), abs=0.35)
    says("With a = 0.8", "| tokens of a pass | 1.80 | 2.44 | 3.36 | 4.33 |",
         "| accepted / drafted | 0.80 | 0.72 | 0.59 | 0.42 |")


def test_breaking_even() -> None:
    """At acceptance = cost nothing is gained whatever k is; above it something, below it less than nothing."""
    for k in (1, 2, 4, 8):
        assert ch08.speedup(0.25, 0.25, k) == 1 and ch08.speedup(0.3, 0.25, k) > 1 > ch08.speedup(0.2, 0.25, k)
    pause = Pause(cost=0.1, after=16)
    assert [pause(accepted, drafted) for accepted, drafted in ((0, 15), (1, 16), (2, 16), (2, 20), (1, 20))] == [
        False, True, False, False, True]
    assert round(ch08.speedup(0.5, 0.1, 4), 2) == 2.14 and round(ch08.speedup(0.05, 0.1, 4), 2) == 0.86
    says("2.14 times", "0.86")


def test_what_an_early_exit_reads(smol: LoadedModel) -> None:
    sizes = Sizes.of(smol.config, smol.dtype)
    layers, head = sizes.layer_linear * 4, sizes.head * 4
    assert (layers + head, head) == (537_919_488, 113_246_208)
    assert round((layers / 2 + head) / (layers + head), 2) == 0.61
    assert round(4 * (layers / 2 + head) / (layers + head), 1) == 2.4
    says("15 of 30 layers and the whole head are 61 % of a step's bytes", "2.4 steps")


def test_the_budget_and_the_cut(tiny_llama: LoadedModel) -> None:
    """32 sequences with 4 guesses each are 160 tokens; a draft never reaches past max_tokens."""
    answer = outputs(build("radix", tiny_llama), [PROMPT], FORCED)[0]
    for max_tokens in (1, 2, 5, 6):
        engine = build("radix", tiny_llama, drafter=partial(ch08.Scripted, answer=answer, chance=1.0))
        request = Request("r", PROMPT, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        engine.add(request)
        while engine.has_unfinished():
            engine.step()
        assert request.output_token_ids == answer[:max_tokens]
        passes = 1 + -(-(max_tokens - 1) // 5)
        assert engine.counters.forward_passes == passes and request.num_drafted_tokens == max_tokens - passes
    says("32 sequences with 4 guesses each are 160 tokens")


# --- the deliberate breaks -------------------------------------------------------------------------------------------


def draw_from_p(logits: Tensor, guess: int, request: Request, q: Tensor | None) -> int:
    """A refused guess is replaced by a draw from p, not from what q gave too little."""
    p = processed_probs(logits, request.params)
    if q is None:
        return sample(logits, request)
    return guess if rule.uniform(request) * float(q[guess]) < float(p[guess]) else pick(p, rule.uniform(request))


def as_if_greedy(logits: Tensor, guess: int, request: Request, q: Tensor | None) -> int:
    """A guess stands if it is the likeliest, as for a greedy request."""
    return sample(logits, request) if q is None else int(logits.argmax())


def test_a_rule_that_is_nearly_right(tiny_llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcomes(ch08.P, ch08.Q, (70, 10), draw_from_p) == [Fraction(40, 100), Fraction(42, 100), Fraction(18, 100)]
    assert outcomes(ch08.P, ch08.Q, (1, 1), as_if_greedy) == [1, 0, 0]
    right = outputs(build("radix", tiny_llama), [PROMPT], FORCED)
    other = partial(DraftModelDrafter, model=tiny_model("llama", seed=5), linear=Plain())
    for wrong in (draw_from_p, as_if_greedy):
        monkeypatch.setattr(rule, "verify_one", wrong)
        greedy = build("radix", tiny_llama, drafter=other)
        assert outputs(greedy, [PROMPT], FORCED) == right and greedy.counters.drafted_tokens > 0
    says("0.40, 0.42, 0.18")


def test_a_row_too_late_says_other_tokens(tiny_llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    right = outputs(build("radix", tiny_llama), [PROMPT], FORCED)
    verify = rule.verify
    monkeypatch.setattr(drafting, "verify", lambda logits, draft, request, probs: verify(
        torch.cat((logits[1:], logits[-1:])), draft, request, probs))
    scripted = partial(ch08.Scripted, answer=right[0], chance=0.5)
    assert outputs(build("radix", tiny_llama, drafter=scripted), [PROMPT], FORCED) != right


def publish_first(self: ContinuousEngine, chunk: Chunk, verdict: Any, logits: Tensor) -> TokenEvent:
    """As the engine's own, but the tree is told before refused guesses are taken back."""
    request = chunk.request
    event = take(request, verdict, logits, self.model.config.eos_token_ids)
    refused = len(chunk.draft) - (len(event.token_ids) - 1)
    request.num_computed_tokens = min(chunk.start + chunk.num_tokens, request.num_tokens)
    self.scheduler.kv.publish(request)
    request.num_computed_tokens = chunk.start + chunk.num_tokens - refused
    if refused:
        self.scheduler.kv.truncate(request, request.num_computed_tokens)
    if event.finish_reason:
        self._end(request)
    return event


def test_refused_guesses_in_the_tree(tiny_llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 4 tokens and its answer of 4, the last a stop; then both again, and one more."""
    prompt = PROMPT[:4]
    answer, = outputs(build("nocache", tiny_llama), [prompt], SamplingParams(max_tokens=4, ignore_eos=True))
    stop = SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=(answer[-1],))
    right, = outputs(build("nocache", tiny_llama), [[*prompt, *answer, 9]], FORCED)

    def again() -> tuple[list[int], int | None]:
        always_wrong = partial(ch08.Scripted, answer=[*answer, 1, 1, 1, 1], chance=0.0)
        engine = build("radix", tiny_llama, block_size=4, num_blocks=32, drafter=always_wrong)
        assert outputs(engine, [prompt], stop) == [answer] and engine.counters.accepted_tokens == 0
        engine.drafter = NoDrafter(engine)
        request = Request("again", [*prompt, *answer, 9], FORCED)
        list(run(engine, [request]))
        return request.output_token_ids, request.num_cached_tokens

    assert again() == (right, 4)
    monkeypatch.setattr(ContinuousEngine, "_update", publish_first)
    wrong, cached = again()
    assert cached == 8 and wrong != right


class Stumbles(DraftModelDrafter):
    """A copy of the target that says another token in every fifth pass, and drafts in every third step only."""

    steps = passes = 0

    def propose(self, requests: Sequence[Request]) -> Mapping[str, Sequence[int]]:
        self.steps += 1
        return super().propose(requests) if self.steps % 3 == 0 else {}

    def _feed(self, sequences: Mapping[str, list[int]]) -> Tensor:
        self.passes += 1
        logits = super()._feed(sequences)                                    # [B, V]
        return logits.roll(1, dims=-1) if self.passes % 5 == 0 else logits


def by_count(self: DraftModelDrafter, request: Request) -> int:
    """Rewinds to the length of the request, and does not look what lies there."""
    fed = self.fed.setdefault(request.request_id, [])
    same = min(len(fed), request.num_tokens - 1)
    if request.request_id in self.cache.lengths:
        self.cache.truncate(request.request_id, same)
    del fed[same:]
    return same


def test_a_draft_cache_rewound_by_count_only_loses_acceptance(tiny_llama: LoadedModel,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    right = outputs(build("radix", tiny_llama), [PROMPT], params)

    def acceptance() -> float:
        engine = build("radix", tiny_llama, drafter=partial(Stumbles, model=tiny_llama, linear=Plain()))
        assert outputs(engine, [PROMPT], params) == right
        return engine.counters.accepted_tokens / engine.counters.drafted_tokens

    clean = acceptance()
    monkeypatch.setattr(DraftModelDrafter, "_rewind", by_count)
    assert (round(clean, 2), round(acceptance(), 2)) == (0.51, 0.10)
    says("acceptance falls from 51 % to 10 %")


# --- the pictures ----------------------------------------------------------------------------------------------------


def test_the_strip_draws_every_token(tiny_llama: LoadedModel) -> None:
    found = ch08.by_hand(tiny_llama)
    texts = [text.get_text() for text in ch08.strip_picture(found).axes[0].texts]
    assert {f"pass {number}" for number in range(1, len(found) + 1)} <= set(texts)
    assert texts.count("3") == 2 and texts.count("1") == 2 and texts.count("4") == 1
    assert [text for text in texts if "new" in text] == ["1 new", "2 of 2 kept, 3 new", "1 of 2 kept, 2 new"]


def test_the_rule_picture_adds_up() -> None:
    left, right = ch08.rule_picture(ch08.P, ch08.Q).axes
    for axes, whole in ((left, ch08.Q), (right, ch08.P)):
        heights = [bar.get_height() for bar in axes.patches]
        assert [a + b for a, b in zip(heights[:3], heights[3:], strict=True)] == pytest.approx(whole)


def line(kind: str, draft: str, width: int = 1, k: int = 4, pause: Any = None, **figures: float) -> dict[str, Any]:
    return {"prompts_kind": kind, "draft": draft, "k": k, "pause": pause, "width": width, "acceptance": 0.5,
            "speedup": 1.4} | figures


def test_the_break_even_picture_shows_the_measured_points() -> None:
    result = {"rows": [line("json", "ngram"), line("code", "ngram", acceptance=0.2, speedup=1.1),
                       line("json", "ngram", width=32), line("json", "ngram", k=2),
                       line("json", "ngram", pause={"cost": 0.1, "after": 16}),
                       line("json", "early-exit:15", acceptance=0.0, speedup=0.4)],
              "costs": [{"draft": "ngram", "k": 4, "cost": 0.08}, {"draft": "ngram", "k": 2, "cost": 0.09},
                        {"draft": "early-exit:15", "k": 4, "cost": 0.7}]}
    found = ch08.points(result, ("ngram", "early-exit:15"))
    assert [(p.kind, p.draft, p.cost, p.acceptance) for p in found] == [
        ("json", "ngram", 0.08, 0.5), ("code", "ngram", 0.08, 0.2), ("json", "early-exit:15", 0.7, 0.0)]
    widths = {"rows": [{"linear_path": "plain F.linear", "widths": []}, {"linear_path": "oneDNN packed", "widths": [
        {"width": w, "itl_p50_ms": 50 + 5 * w, "linear_ms": 40 + w, "ceiling_ms": max(30, 2 * w)}
        for w in (1, 2, 4, 8, 16)]}]}
    costs = ch08.width_costs(widths)
    assert costs["a whole step"][0] == (1, pytest.approx((70 / 55 - 1) / 3))
    assert [width for width, _ in costs["a whole step"]] == [1, 2, 4]
    texts = [text.get_text() for text in ch08.breakeven_picture(result, widths).axes[0].texts]
    assert {"json 1.40x", "code 1.10x", "json 0.40x"} <= set(texts)
    texts = [text.get_text() for text in ch08.head_breakeven_picture(result).axes[0].texts]
    assert {"json 1.40x", "code 1.10x"} <= set(texts) and "json 0.40x" not in texts


# --- the second half: a draft head -----------------------------------------------------------------------------------


PAGE = " ".join((Path(__file__).parents[1] / "chapters" / "08_speculative" / "draft_head.md")
                .read_text(encoding="utf-8").split())


def test_the_heads_passes_by_hand(tiny_llama: LoadedModel) -> None:
    """Four tokens and one taken; three guesses, of which two stand; then three pairs at once."""
    first, second, third = ch08.steps_of_the_head(tiny_llama)
    assert (first.places, first.own) == ((1, 2, 3, 4), False)
    assert (second.places, second.own) == ((5,), True) and (third.places, third.own) == ((6,), True)
    prompt = [9, 44, 1, 62]
    answer, _ = ch08.generate(tiny_llama, prompt, 8)

    class TwoStand(ch08.Told):
        def guess(self, rooms: Mapping[Request, int]) -> dict[str, Draft]:
            drafts = super().guess(rooms)
            at = len(next(iter(rooms)).output_token_ids)
            drafts["0"].token_ids[:] = [*answer[at:at + 2], (answer[at + 2] + 1) % 64]
            return drafts

    engine = build("radix", tiny_llama, max_num_seqs=1, drafter=partial(
        TwoStand, weights=random_head(tiny_llama), num_speculative_tokens=3))
    engine.add(request := Request("0", prompt, SamplingParams(max_tokens=8, ignore_eos=True)))
    known = []
    while len(request.output_token_ids) < 4:
        engine.step()
        known += [engine.drafter.heard["0"].fed]
    assert request.output_token_ids == answer[:4] and known == [0, 4]
    engine.step()
    again, *_ = engine.drafter.passes[1]
    assert (again.places, again.tokens, again.own) == ((5, 6, 7), tuple(answer[1:4]), False)
    for line in ("| 1 | (f0, x1) (f1, x2) (f2, x3) (f3, x4) | g4, so x5? | 4 |",
                 "| 2 | (g4, x5?) | g5, so x6? | 4 |", "| 3 | (g5, x6?) | g6, so x7? | 4 |",
                 "| 1 | (f4, x5) (f5, x6) (f6, x7) | g7, so x8? | 7 |"):
        assert line in PAGE


def test_the_numbers_of_the_committed_head(smol: LoadedModel) -> None:
    folder = shipped_head(smol)
    weights = load_head(folder, smol)
    e, inner = smol.config.hidden_size, weights["layers.0.mlp.gate_proj.weight"].shape[0]
    attention = sum(t.numel() for name, t in weights.items() if "self_attn" in name)
    total = sum(t.numel() for name, t in weights.items() if name != "tokens")
    assert weights["fc.weight"].shape == (e, 1152) and e == 576 and inner == smol.config.intermediate_size
    assert (round(total / 1e6, 1), round(attention / 1e6, 1), round(3 * e * inner / 1e6, 1)) == (4.2, 0.9, 2.7)
    assert (folder / "draft_head.safetensors").stat().st_size < 9_000_000 and round(2 * total / 1e6, 1) == 8.4
    assert (len(weights["tokens"]), smol.config.vocab_size) == (8192, 49152)
    assert 6.5 < 49152 * e / total < 7
    assert (choose.MIN_CONFIDENCE, choose.BEFORE_A_HEAD) == (0.3, 3)
    for text in ("4.2 million parameters", "1,152 x 576", "attention takes 0.9 million",
                 "feed-forward block 2.7 million", "In bfloat16 that is 8.4 MB",
                 "Of 49,152 rows only 8,192 are used", "28 million numbers, nearly seven",
                 "would fall below 0.3", "at least three tokens match", "one layer instead of 30"):
        assert text in PAGE, text
    assert smol.config.num_layers == 30 and round(49152 * e / 1e6) == 28
    assert (round(8192 * e / 1e6, 1), round((total + 8192 * e) / 1e6, 1)) == (4.7, 8.9)
    assert "guess reads 8.9 million numbers: 4.2 million of the head's own, and 4.7 million of 8,192 rows" in PAGE
    card = read_card(folder)
    plan = Plan()   # a run of the command without options makes this head again
    assert (card["settings"], card["steps"], card["seed"]) == (asdict(plan.settings), plan.steps, plan.seed)
    assert 0 <= card["tokens"] - plan.tokens < 96 * 160
    assert f"{card['tokens']:,} tokens of answers" in PAGE and "little more than half of that" in PAGE
    assert card["curve"][-1]["tokens"] // card["tokens"] == 9
    assert f"the {card['tokens']:,} tokens were seen nine times" in PAGE
    assert f"has read {card['tokens']:,} tokens of answers" in PAGE
    shares = card["acceptance"]
    assert all(0.5 < shares[kind] / shares["json"] < 0.6 for kind in ("code", "conversation"))


def test_what_the_page_says_of_heads_of_other_sizes() -> None:
    """The words beside the stored table: each comparison is one of its rows with base's."""
    result = json.loads((ch08.RESULTS / "heads.json").read_text(encoding="utf-8"))
    row = {each["name"]: each for each in result["rows"]}
    base = row["base"]

    def cost(name: str) -> float:
        return row[name]["cost"] / base["cost"]

    def gained(name: str) -> list[float]:
        return [row[name]["acceptance"][kind] - share for kind, share in base["acceptance"].items()]

    assert 1.3 < cost("deep") < 1.6 and max(gained("deep")) < 0.02, "half as much again, and brings little"
    assert row["small"]["parameters"] < 0.55 * base["parameters"] and 0.75 < cost("small") < 0.95
    assert min(gained("small")) > -0.03, "loses little"
    assert 0.66 < cost("few") < 0.76 and all(abs(each) < 0.01 for each in gained("few")), "about as often right"
    assert min(gained("shipped")) > max(0.0, min(gained("deep"))), "most is gained by training longer"
    assert {name: (each["layers"], each["intermediate_size"], each["vocab_size"]) for name, each in row.items()} == {
        "base": (1, 1536, 8192), "small": (1, 384, 8192), "deep": (2, 1536, 8192), "few": (1, 1536, 2048),
        "shipped": (1, 1536, 8192)}


def test_what_the_page_says_of_the_drafts_together() -> None:
    """At width 1 both come further than either; the head alone gains little."""
    result = json.loads((ch08.RESULTS / "speculative.json").read_text(encoding="utf-8"))
    gain = {(row["prompts_kind"], row["draft"]): row["speedup"] for row in result["rows"]
            if (row["width"], row["k"], row["pause"]) == (1, 4, None)}
    for kind in ("code", "json", "conversation"):
        alone = [gain[kind, draft] for draft in ("ngram", "draft-head")]
        assert gain[kind, "ngram+draft-head"] > max(alone) and 1 < alone[1] < 1.3
    assert min(("code", "json", "conversation"), key=lambda kind: gain[kind, "ngram+draft-head"]) == "conversation"


def test_out_of_step_nothing_shows_but_the_acceptance(tiny_llama: LoadedModel) -> None:
    class OutOfStep(DraftHeadDrafter):
        def _feed(self, sequences: Mapping[str, list[int]]) -> Tensor:
            return super()._feed({name: [ids[0], *ids[:-1]] for name, ids in sequences.items()})

    weights, prompts = trained(tiny_llama)
    found = {}
    for kind in (DraftHeadDrafter, OutOfStep):
        engine = build("radix", tiny_llama, drafter=partial(kind, weights=weights))
        said = outputs(engine, prompts, FORCED)
        found[kind] = said, engine.counters.accepted_tokens / engine.counters.drafted_tokens
    (right, share), (same, fallen) = found.values()
    assert same == right and fallen < share / 2
