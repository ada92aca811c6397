"""Chapter 6: its worked example, the numbers in its text, and its deliberate breaks."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest

from benchmarks.workloads import SHAPES
from liteinfer.engines import continuous
from liteinfer.engines.base import run
from liteinfer.loading import LoadedModel
from liteinfer.plots import ch05, ch06
from liteinfer.request import Request, SamplingParams, TokenEvent
from liteinfer.scheduler import Chunk, Scheduler, SchedulerConfig
from liteinfer.trace import StepRecord
from tests.conftest import build, outputs

pytestmark = pytest.mark.ch06
README = (Path(__file__).parents[1] / "chapters" / "06_continuous_batching" / "README.md").read_text(encoding="utf-8")


def says(*texts: str) -> None:
    """The chapter's text has these words, wherever its lines break."""
    readme = " ".join(README.split())
    assert [text for text in texts if " ".join(text.split()) not in readme] == []


def alone(model: LoadedModel, lengths: ch06.Lengths) -> list[list[int]]:
    """Rung 1's tokens for the pictures' requests."""
    requests = ch06.requests_of(lengths)
    return outputs(build("nocache", model), [r.prompt_token_ids for r in requests], [r.params for r in requests])


# --- worked by hand --------------------------------------------------------------------------------------------------


def test_three_requests_and_a_budget_of_8() -> None:
    """The table of the text, with the real scheduler and a real pool, and no model."""
    steps = ch06.dry_run(SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=8), ch06.HAND_RUN, 16, 4)
    computed = [{part.request_id: (part.start, part.num_tokens) for part in step.parts} for step in steps]
    assert computed == [{"A": (0, 5), "B": (0, 3)}, {"A": (5, 1), "B": (3, 7)},
                        {"A": (6, 1), "B": (10, 1), "C": (0, 3)}, {"B": (11, 1), "C": (3, 1)}]
    given = [[part.request_id for part in step.parts if part.new_tokens] for step in steps]
    assert given == [["A"], ["A"], ["A", "B", "C"], ["B", "C"]]
    assert [(step.running, step.waiting) for step in steps] == [(2, 1), (2, 1), (2, 0), (0, 0)]   # when it is over
    says("| 1 | 5: the prompt | 3 | - | 8 |", "| 2 | 1 | 7 | - | 8 |", "| 3 | 1, the last | 1: the end of the prompt | "
         "3: the prompt | 5 |", "| 4 | | 1, the last | 1, the last | 2 |")


@pytest.mark.parametrize("chunk", [None, 1, 2])
def test_the_live_engine_runs_these_steps_and_says_rung_1s_words(tiny_llama: LoadedModel, chunk: int | None) -> None:
    config = SchedulerConfig(3, 8, chunk)
    found = ch06.continuous(tiny_llama, ch06.HAND_RUN, 3, 16, block_size=4, max_num_batched_tokens=8,
                            max_prefill_chunk=chunk)
    planned = ch06.dry_run(config, ch06.HAND_RUN, 16, 4)
    assert [step.parts for step in found.steps] == [step.parts for step in planned]
    assert [step.blocks_used for step in found.steps] == [step.blocks_used for step in planned]
    assert found.outputs == alone(tiny_llama, ch06.HAND_RUN)


# --- the numbers in the text -----------------------------------------------------------------------------------------


def test_the_gantt_of_static_and_continuous(tiny_llama: LoadedModel) -> None:
    lengths = [(8, n) for n in ch05.RAGGED]
    static, ours = ch05.gantt(tiny_llama, ch05.RAGGED), ch06.slots_of(ch06.continuous(tiny_llama, lengths, width=4))
    passes, idle, slots = ([getattr(found.counters, name) for found in (static, ours)]
                           for name in ("forward_passes", "idle_slots", "batch_slots"))
    assert (passes, idle, slots) == ([650, 503], [1020, 432], [2600, 2012])
    assert sum(ch05.RAGGED) == 1580 and 1580 / 4 == 395
    fifth = ("E", True)
    assert [i + 1 for i, slots in enumerate(ours.passes) if fifth in slots] == [17]
    assert [i + 1 for i, slots in enumerate(static.passes) if ("4", True) in slots] == [222]
    says("650 passes, 1,020 of 2,600 slot-steps idle, 39.2 %", "503 passes, 432 of 2,012 idle, 21.5 %",
         "in pass 17 instead of 222", "1,580 tokens at four a pass are 395 passes")


def test_passes_on_ragged() -> None:
    """What the counters of the stored rows will say, from lengths alone."""
    lengths = ch06.ragged_lengths()
    assert len(lengths) == 128 and sum(output for _, output in lengths) == 17_258
    steps = ch06.dry_run(SchedulerConfig(), lengths, 32 * 24)
    places = 32 * len(steps)
    idle = places - sum(len(step.parts) for step in steps)
    assert len(ch06.static_passes(lengths, 32)) == 1008 and len(steps) == 675 and round(1008 / 675, 2) == 1.49
    assert round(1 - 17_258 / (32 * 1008), 3) == 0.465 and round(idle / places, 3) == 0.201
    last = max(i for i, step in enumerate(steps, 1) if any(part.start == 0 for part in step.parts))
    assert last == 461 and len(steps) - last == 214
    assert round(17_258 / 32, 1) == 539.3 and -(-17_258 // 32) == 540 and 540 + 128 == 668
    assert sum(ch06.static_passes(lengths, 32)) == sum(step.num_tokens for step in steps) == 33_514
    assert 1008 - 675 == 333 and 128 * 128 == 16_384 and round(16_384 / 33_514, 3) == 0.489
    says("17,258 / 32 = 539.3, so 540", "540 + 128 = 668", "Counted: 675", "1,008, 1.49 times", "from 46.5 % to 20.1 %",
         "pass 461", "the 214 after it", "each of 333 passes",
         "33,514 tokens that `ragged` computes, 16,384 are prompts: 48.9 %")


def test_passes_on_equal_lengths() -> None:
    shape = SHAPES["course"]
    lengths = [(shape.isl, shape.output_length(i)) for i in range(shape.prompts_at(32))]
    assert (len(lengths), lengths[0]) == (64, (128, 64))
    static, ours = ch06.static_passes(lengths, 32), ch06.continuous_passes(lengths, 32)
    assert (len(static), len(ours)) == (128, 136)
    assert [sum(n > 32 for n in passes) for passes in (static, ours)] == [2, 18]     # with prompts in them
    says("136 passes instead of 128", "the 18 passes that read prompts, so 118 are left that only decode, against 126")


def test_a_long_prompt_in_chunks(tiny_llama: LoadedModel) -> None:
    whole, chunked = (ch06.long_prompt(tiny_llama, size) for size in (200, 16))
    assert whole.outputs == chunked.outputs == alone(tiny_llama, ((4, 20), (200, 4)))
    for found, largest, first in ((whole, 201, 4), (chunked, 17, 16)):
        assert max(step.num_tokens for step in found.steps) == largest
        assert all(any(part.request_id == "A" and part.new_tokens for part in step.parts) for step in found.steps)
        given = [any(part.request_id == "B" and part.new_tokens for part in step.parts) for step in found.steps]
        assert given.index(True) + 1 == first
    says("201 tokens", "17 tokens", "in step 16 instead of step 4", "13 chunks")


def test_a_preemption_survived(tiny_llama: LoadedModel) -> None:
    found, ample = ch06.tight(tiny_llama), ch06.tight(tiny_llama, num_blocks=15)
    assert found.outputs == ample.outputs == alone(tiny_llama, ch06.TIGHT)
    assert {i: step.preempted for i, step in enumerate(found.steps, 1) if step.preempted} == {2: ("C",), 10: ("B",)}
    again = {p.request_id: p.num_tokens for p in found.steps[10].parts}
    assert again == {"B": 17, "C": 9}
    told = {name: sum(part.new_tokens for step in found.steps for part in step.parts if part.request_id == name)
            for name in "ABC"}
    assert told == {"A": 10, "B": 10, "C": 10}                            # nothing lost, nothing doubled
    assert (found.counters.forward_passes, found.counters.tokens_computed, found.counters.preemptions) == (19, 75, 2)
    assert (ample.counters.forward_passes, ample.counters.tokens_computed, ample.counters.preemptions) == (10, 51, 0)
    says("in step 2, B in step 10", "compute 17 tokens", "75 tokens in 19 passes", "51 in 10", "two preemptions")


def test_the_watermark(tiny_llama: LoadedModel) -> None:
    """A takes its third of 10 blocks, B 7 for its prompt; then B needs an eighth, and is the youngest."""
    lengths = ((8, 12), (28, 2))
    without, with_it = (ch06.continuous(tiny_llama, lengths, 2, 10, arrivals=(0, 1), block_size=4, watermark=w)
                        for w in (0.0, 0.2))
    assert without.outputs == with_it.outputs == alone(tiny_llama, lengths)
    assert (without.counters.preemptions, with_it.counters.preemptions) == (1, 0)
    assert (without.counters.tokens_computed, with_it.counters.tokens_computed) == (76, 48)
    assert (without.counters.forward_passes, with_it.counters.forward_passes) == (13, 14)
    assert int(0.01 * 768) == 7 and int(0.01 * 99) == 0
    says("76 tokens in 13 passes", "48 tokens in 14", "7 blocks of 768", "none of a pool below 100")


def test_what_can_never_fit_is_refused_with_both_sizes(tiny_llama: LoadedModel) -> None:
    engine = build("continuous", tiny_llama, num_blocks=8, block_size=4)
    with pytest.raises(ValueError) as refused:
        engine.add(Request("R", [1] * 20, SamplingParams(max_tokens=40)))
    assert "20 prompt tokens + max_tokens 40 need 15 KV blocks of 4 tokens, the pool has 8" in str(refused.value)
    assert not engine.has_unfinished()
    says("20 prompt tokens + max_tokens 40 need 15 KV blocks of 4 tokens, the pool has 8")


def test_a_failing_request_fails_alone(tiny_llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    right = continuous.sample

    def fails_for_b(logits, request):
        if request.request_id == "B" and len(request.output_token_ids) == 2:
            raise ValueError("logits are NaN")
        return right(logits, request)

    monkeypatch.setattr(continuous, "sample", fails_for_b)
    engine = build("continuous", tiny_llama, num_blocks=16, block_size=4)
    requests = ch06.requests_of(ch06.TIGHT)
    events: list[TokenEvent] = list(run(engine, requests))
    assert [(e.request_id, e.error) for e in events if e.error] == [("B", "ValueError: logits are NaN")]
    expected = alone(tiny_llama, ch06.TIGHT)
    assert [r.output_token_ids for r in requests] == [expected[0], expected[1][:2], expected[2]]
    assert engine.cache.pool.num_used == 0


def test_without_drafts_nobody_who_runs_would_starve(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token kept back for each younger request is never needed in this chapter, as the text says."""
    schedules = [random.Random(seed) for seed in range(150)]

    def plan(draw: random.Random) -> list[StepRecord]:
        budget = draw.randint(2, 12)
        config = SchedulerConfig(draw.randint(1, min(6, budget)), budget, draw.choice([None, *range(1, budget + 1)]))
        lengths = [(draw.randint(1, 25), draw.randint(1, 12)) for _ in range(draw.randint(2, 8))]
        return ch06.dry_run(config, lengths, draw.randint(10, 40), 4)

    kept = [plan(random.Random(seed)) for seed in range(150)]
    monkeypatch.setattr(Scheduler, "_chunk", nothing_kept_back)
    assert kept == [plan(draw) for draw in schedules]
    assert sum(bool(step.preempted) for steps in kept for step in steps) > 20


def nothing_kept_back(self: Scheduler, request: Request, budget: int, draft: tuple[int, ...] = ()) -> Chunk:
    """The oldest may take all that is left, whoever comes after it."""
    if request in self.running:
        budget += len(self.running) - self.running.index(request) - 1
    return CHUNK(self, request, budget, draft)


# --- the deliberate breaks -------------------------------------------------------------------------------------------


def sampled_everywhere(self: Scheduler, *args: object) -> Chunk:
    """Every chunk is sampled, the middle of a prompt too."""
    return dataclasses.replace(CHUNK(self, *args), num_logits=1)


def starts_over(self: Scheduler, request: Request) -> None:
    """A preempted request forgets what it has said, and says it again."""
    PREEMPT(self, request)
    request.output_token_ids.clear()


def to_the_tail(self: Scheduler, request: Request) -> None:
    """A preempted request waits behind those that came after it."""
    PREEMPT(self, request)
    self.waiting.rotate(-1)


CHUNK, PREEMPT = Scheduler._chunk, Scheduler.preempt


def test_sampling_in_the_middle_of_a_prompt_is_caught(tiny_llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = alone(tiny_llama, ch06.HAND_RUN)
    monkeypatch.setattr(Scheduler, "_chunk", sampled_everywhere)
    found = ch06.continuous(tiny_llama, ch06.HAND_RUN, 3, 16, block_size=4, max_num_batched_tokens=8)
    assert [a == b for a, b in zip(found.outputs, expected, strict=True)] == [True, False, True]


def test_starting_over_shows_in_the_stream_alone(tiny_llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "preempt", starts_over)
    engine, requests = build("continuous", tiny_llama, num_blocks=8, block_size=4), ch06.requests_of(ch06.TIGHT)
    streamed: dict[str, list[int]] = {}
    for event in run(engine, requests):
        streamed.setdefault(event.request_id, []).extend(event.token_ids)
    expected = alone(tiny_llama, ch06.TIGHT)
    assert [r.output_token_ids for r in requests] == expected             # all right in the end
    assert streamed["A"] == expected[0]
    assert streamed["B"] == expected[1][:9] + expected[1]
    assert len(streamed["C"]) > 10 and streamed["C"][-10:] == expected[2]
    says("B's first 9 tokens come twice")


def test_the_tail_of_the_queue_costs_no_token_and_much_time(tiny_llama: LoadedModel,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that came later overtake the preempted one."""
    lengths = ((8, 10), (8, 10), (8, 4), (8, 4), (8, 4))

    def ends(found: ch06.Run) -> str:
        last = {part.request_id: i for i, step in enumerate(found.steps) for part in step.parts}
        return "".join(sorted(last, key=lambda name: (last[name], name)))

    right = ch06.continuous(tiny_llama, lengths, 2, 6, block_size=4)
    monkeypatch.setattr(Scheduler, "preempt", to_the_tail)
    wrong = ch06.continuous(tiny_llama, lengths, 2, 6, block_size=4)
    assert right.outputs == wrong.outputs == alone(tiny_llama, lengths)
    assert (ends(right), ends(wrong)) == ("ABCDE", "AECDB")
    says("A, E, C, D, B")


# --- the pictures ----------------------------------------------------------------------------------------------------


def test_a_predicted_time_is_read_off_the_curve() -> None:
    curve = [{"width": 1, "itl_p50_ms": 10.0}, {"width": 4, "itl_p50_ms": 16.0}, {"width": 8, "itl_p50_ms": 32.0}]
    assert [ch06.predicted_ms([n], curve) for n in (1, 2, 4, 6, 8, 10)] == [10.0, 12.0, 16.0, 24.0, 32.0, 40.0]
    assert ch06.predicted_ms([1, 8, 1], curve) == 52.0
    assert ch06.static_passes([(3, 4), (5, 1), (2, 2)], 2) == [8, 1, 1, 1, 2, 1]


@pytest.mark.parametrize(("slope", "gain"), [(0.0, 1008 / 675), (1000.0, 1.0)], ids=["width is free", "width is all"])
def test_the_gain_picture_compares_passes_and_times(slope: float, gain: float) -> None:
    widths = {"rows": [{"name": "liteinfer-paged-b32",
                        "widths": [{"width": w, "itl_p50_ms": 10 + slope * w} for w in (1, 2, 4, 8, 16, 32)]}]}
    ragged = {"rows": [{"name": f"liteinfer-{name}", "counters": {"forward_passes": n}, "throughput": {"wall_s": s}}
                       for name, n, s in (("paged-b32", 1008, 300.0), ("continuous", 675, 250.0))]}
    found = ch06.gains(widths, ragged)
    assert list(found.values()) == pytest.approx([1008 / 675, gain, 1.2], abs=1e-3)
    axes = ch06.gain_picture(found).axes[0]
    assert [bar.get_x() + bar.get_width() for bar in axes.patches] == pytest.approx(list(found.values()))
