"""The continuous engine: equality in all tiers, faults that stay where they are, aborts at any moment, the trace."""

from __future__ import annotations

import gc
import json
import os
import random
import time
from pathlib import Path

import psutil
import pytest
import torch

from liteinfer.engines.continuous import ContinuousEngine, NoDrafter, Verdict
from liteinfer.loading import LoadedModel
from liteinfer.model.linear import Plain
from liteinfer.request import Request, SamplingParams
from liteinfer.trace import StepTrace
from tests.conftest import build, outputs
from tests.scripted import ScriptRunner, check, drain, expected, request, script_engine, scripted
from tests.test_ladder import N_PROMPTS, random_prompts

pytestmark = pytest.mark.ch06


@pytest.fixture(scope="module")
def rung_1(tiny: LoadedModel) -> list[list[int]]:
    return outputs(build("nocache", tiny), *random_prompts(tiny.config.vocab_size))


EXACT, TIGHT, AMPLE = ({"block_size": 1, "num_blocks": 53}, {"block_size": 4, "num_blocks": 40},
                       {"block_size": 16, "num_blocks": 200})


@pytest.mark.parametrize(("chunk", "pool"), [(1, TIGHT), (3, AMPLE), (16, TIGHT), (None, EXACT), (None, AMPLE)])
def test_tier_a_for_every_chunk_size_and_pool(chunk: int | None, pool: dict, tiny: LoadedModel,
                                              rung_1: list[list[int]]) -> None:
    """32 requests in flight; forced preemption where the pool is small."""
    prompts, params = random_prompts(tiny.config.vocab_size)
    engine = build("continuous", tiny, max_prefill_chunk=chunk, max_num_batched_tokens=64, **pool)
    requests = [Request(str(i), p, s) for i, (p, s) in enumerate(zip(prompts, params, strict=True))]
    for each in requests:
        engine.add(each)
    while engine.has_unfinished():
        assert not any(event.error for event in engine.step())
        engine.scheduler.kv.check()
    wrong = [i for i in range(N_PROMPTS) if requests[i].output_token_ids != rung_1[i]]
    assert not wrong, f"{len(wrong)} of {N_PROMPTS} prompts differ, first prompt {wrong[0]}"
    assert engine.cache.pool.num_used == 0
    assert (engine.counters.preemptions > 0) == (pool["num_blocks"] < 200)


def test_chunks_of_one_sequence_give_the_same_bits_as_the_static_engine(tiny_llama: LoadedModel) -> None:
    """A single sequence with the same chunk boundaries computes exactly what rung 4 computes."""
    seen: dict[str, list[torch.Tensor]] = {"paged": [], "continuous": []}
    for name in seen:
        engine = build(name, tiny_llama, num_blocks=16)
        logits_of = engine.llama.logits

        def noting(hidden: torch.Tensor, name=name, logits_of=logits_of) -> torch.Tensor:
            logits = logits_of(hidden)
            seen[name].append(logits.clone())
            return logits

        engine.llama.logits = noting
        try:
            outputs(engine, [[5, 9, 2, 11, 40, 3, 8]], SamplingParams(max_tokens=12))
        finally:
            del engine.llama.logits
    assert len(seen["paged"]) == len(seen["continuous"]) == 12
    assert all(torch.equal(a, b) for a, b in zip(*seen.values(), strict=True))


def test_logits_only_where_a_token_is_wanted(tiny_llama: LoadedModel) -> None:
    engine, rows = build("continuous", tiny_llama, max_num_seqs=4, max_num_batched_tokens=8), []
    logits_of = engine.llama.logits

    def noting(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return logits_of(hidden)

    engine.llama.logits = noting
    try:
        outputs(engine, [[1] * 20, [2] * 3], SamplingParams(max_tokens=2))
    finally:
        del engine.llama.logits
    assert rows == [0, 0, 2, 2] and engine.counters.tokens_computed == 20 + 3 + 2


# --- S9: abort at any moment -----------------------------------------------------------------------------------


def test_s9_abort_while_waiting_in_mid_chunk_after_the_end_twice_and_unknown() -> None:
    engine = script_engine(max_num_seqs=2, max_prefill_chunk=4)
    long, other, waiting = request("long", 20, 4), request("other", 3, 6), request("waiting", 3, 4)
    for each in (long, other, waiting):
        engine.add(each)
    engine.step()
    assert 0 < long.num_computed_tokens < 20
    for name in ("long", "waiting", "long", "waiting", "nobody"):
        engine.abort(name)
        check(engine)
    events = drain(engine)
    assert [e.request_id for e in events if e.finish_reason == "abort"] == ["long", "waiting"]
    assert not any(e.token_ids for e in events if e.request_id != "other")
    assert long.output_token_ids == waiting.output_token_ids == []
    assert other.output_token_ids == expected(other)
    engine.abort("other")
    engine.finish("other", 3)
    assert not engine.has_unfinished() and engine.step() == []


def test_s9_an_abort_between_schedule_and_update_publishes_nothing() -> None:
    """Of one in mid-prompt and one that decodes; the third goes on."""
    engine = script_engine(max_prefill_chunk=4)
    names = ["decoding", "prefilling", "other"]
    decoding, prefilling, other = (request(n, k, 6) for n, k in zip(names, (2, 12, 3), strict=True))
    for each in (decoding, prefilling, other):
        engine.add(each)
    engine.step()

    def abort_both(chunks) -> None:
        engine.abort("decoding")
        engine.abort("prefilling")
        engine.runner.before = None

    said = list(decoding.output_token_ids)
    engine.runner.before = abort_both
    events = engine.step()
    check(engine)
    assert {(e.request_id, e.finish_reason, e.token_ids) for e in events} >= {
        ("decoding", "abort", ()), ("prefilling", "abort", ())}
    assert decoding.output_token_ids == said and prefilling.output_token_ids == []
    events = drain(engine)
    assert {e.request_id for e in events} == {"other"}
    assert other.output_token_ids == expected(other)


def test_finish_from_above_gives_the_blocks_back_without_an_event() -> None:
    engine = script_engine()
    for each in (r := request("r", 5, 9), other := request("other", 5, 4)):
        engine.add(each)
    engine.step()
    engine.finish("r", 1)
    check(engine)
    assert {e.request_id for e in drain(engine)} == {"other"}
    assert len(r.output_token_ids) == 1 and other.output_token_ids == expected(other)


# --- faults -------------------------------------------------------------------------------------------------------


def test_h9_a_pass_that_raises_ends_those_in_it_and_nobody_else() -> None:
    engine = script_engine(max_num_seqs=2)
    requests = [request(name, 4, 5) for name in "abc"]
    for each in requests:
        engine.add(each)
    engine.step()

    def fail(chunks) -> None:
        engine.runner.before = None
        raise RuntimeError("the forward\nbroke")

    engine.runner.before = fail
    events = engine.step()
    check(engine)
    assert [(e.request_id, e.finish_reason, e.error) for e in events] == [
        (name, "error", "RuntimeError: the forward broke") for name in "ab"]
    drain(engine)
    assert requests[2].output_token_ids == expected(requests[2])
    engine.add(again := request("again", 4, 5))
    drain(engine)
    assert again.output_token_ids == expected(again)


class NanRunner(ScriptRunner):
    def row(self, request_id: str, position: int) -> torch.Tensor:
        return super().row(request_id, position) * (float("nan") if request_id == "bad" and position > 5 else 1)


def test_nan_logits_are_one_requests_fault() -> None:
    engine = script_engine(NanRunner)
    bad, good = request("bad", 4, 9), request("good", 4, 9)
    engine.add(bad)
    engine.add(good)
    error, = (e for e in drain(engine) if e.error)
    assert error.request_id == "bad" and "64 of 64 logits are NaN" in str(error.error)
    assert bad.output_token_ids == expected(bad)[:3]
    assert good.output_token_ids == expected(good)


def test_a_step_interrupted_in_mid_forward_can_be_made_again() -> None:
    engine = script_engine(max_prefill_chunk=4)
    requests = [request(name, 6, 5) for name in "ab"]
    for each in requests:
        engine.add(each)
    for _ in range(3):
        engine.step()

    def interrupt(chunks) -> None:
        engine.runner.before = None
        raise KeyboardInterrupt

    engine.runner.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    check(engine)
    assert [r.request_id for r in engine.scheduler.waiting] == ["a", "b"]
    drain(engine)
    assert all(r.output_token_ids == expected(r) for r in requests)


def test_b7_twelve_prompts_through_three_places_three_rounds(tiny_llama: LoadedModel) -> None:
    prompts = [[(7 * i + j) % 64 for j in range(1 + i % 5)] for i in range(12)]
    params = [SamplingParams(max_tokens=2 + (5 * i) % 7) for i in range(12)]
    want = outputs(build("nocache", tiny_llama), prompts, params)
    engine = build("continuous", tiny_llama, max_num_seqs=3)
    for _ in range(3):
        assert outputs(engine, prompts, params) == want


# --- a drafter plugs in ----------------------------------------------------------------------------------------------


class Oracle(NoDrafter):
    """Guesses from the script, right or wrong; takes the guesses that stand. For the engine's side of a draft."""

    def __init__(self, k: int, wrong_every: int) -> None:
        self.k, self.wrong_every, self.freed = k, wrong_every, []

    def propose(self, requests):
        return {r.request_id: [self.guess(r, i) for i in range(self.k)] for r in requests if r.output_token_ids}

    def guess(self, r: Request, i: int) -> int:
        wrong = i % self.wrong_every == self.wrong_every - 1
        return (scripted(r.request_id, r.num_tokens - 1 + i) + wrong) % 64

    def verify(self, chunks, output) -> list[Verdict]:
        verdicts, row = [], 0
        for chunk in chunks:
            best = output.logits[row:row + chunk.num_logits].argmax(dim=-1).tolist()
            row += chunk.num_logits
            n = next((i for i, (a, b) in enumerate(zip(chunk.draft, best, strict=False)) if a != b), len(chunk.draft))
            verdicts.append(best[:n + 1])
        return verdicts

    def free(self, request_id: str) -> None:
        self.freed.append(request_id)


@pytest.mark.parametrize("wrong_every", [1, 2, 3, 99])
@pytest.mark.parametrize("pool", [{"num_blocks": 64}, {"num_blocks": 13, "block_size": 2, "watermark": 0.0}],
                         ids=["ample", "tight"])
def test_drafted_tokens_are_fed_checked_and_taken_back(wrong_every: int, pool: dict) -> None:
    """The engine's part of chapter 8: k + 1 tokens in a step, the budget counts them, refused ones are forgotten."""
    drafter = Oracle(3, wrong_every)
    engine = script_engine(drafter=lambda engine: drafter, max_num_batched_tokens=12, max_num_seqs=4, **pool)
    requests = [request("a", 5, 9), request("b", 8, 12), request("c", 3, 1),
                request("d", 2, 11, stop_token_ids=(scripted("d", 4),))]
    for each in requests:
        engine.add(each)
    events = []
    while engine.has_unfinished():
        before = engine.counters.tokens_computed
        events += engine.step()
        check(engine)
        assert engine.counters.tokens_computed - before <= 12
    for each in requests:
        assert each.output_token_ids == expected(each)
        assert [t for e in events if e.request_id == each.request_id for t in e.token_ids] == expected(each)
    assert sorted(drafter.freed) == ["a", "b", "c", "d"]
    most = max(len(e.token_ids) for e in events)
    assert most == min(wrong_every, 4), "one more than the guesses that stood"


# --- the trace ------------------------------------------------------------------------------------------------------


def test_the_trace_says_what_every_step_ran(tmp_path: Path) -> None:
    ticks = iter(range(1000))
    trace = StepTrace(clock=lambda: float(next(ticks)))
    engine = script_engine(max_num_batched_tokens=8, max_num_seqs=3, block_size=4, num_blocks=5, trace=trace,
                           watermark=0.0)
    for each in (request("a", 5, 8), request("b", 9, 6)):
        engine.add(each)
    drain(engine)
    steps = trace.steps
    assert len(steps) == engine.counters.forward_passes
    assert sum(step.num_tokens for step in steps) == engine.counters.tokens_computed
    assert sum(len(step.preempted) for step in steps) == engine.counters.preemptions >= 1
    assert max(step.blocks_used for step in steps) <= 5
    first = [(p.request_id, p.start, p.num_tokens, p.new_tokens) for p in steps[0].parts]
    assert first == [("a", 0, 5, 1), ("b", 0, 3, 0)]
    given = {name: sum(p.new_tokens for step in steps for p in step.parts if p.request_id == name) for name in "ab"}
    assert given == {"a": 8, "b": 6}
    assert trace.first_scheduled() == {"a": 0.0, "b": 0.0}
    trace.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == sum(len(step.parts) for step in steps)
    assert {e["cat"] for e in slices} == {"prefill", "decode"}
    assert all(e["ts"] >= 0 and e["dur"] == 1e6 for e in slices)
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {"request a", "request b"}
    assert {e["name"] for e in events if e["ph"] == "C"} == {"tokens", "KV blocks", "running", "waiting"}
    assert sum(e["name"] == "preempted" for e in events) == engine.counters.preemptions


def test_a_trace_keeps_the_latest_steps() -> None:
    trace = StepTrace(max_steps=3)
    engine = script_engine(trace=trace)
    engine.add(request("a", 5, 8))
    drain(engine)
    assert len(trace.steps) == 3 and trace.steps[-1].parts[0].start == 5 + 8 - 2
    assert StepTrace().chrome() == {"traceEvents": [], "displayTimeUnit": "ms"}


# --- soak -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_soak_mixed_traffic_with_aborts_leaves_nothing_behind(tiny_llama: LoadedModel) -> None:
    """Ten minutes (SOAK_SECONDS) of arrivals and aborts in a tight pool: every block comes back, memory stays flat."""
    seconds = float(os.environ.get("SOAK_SECONDS", "600"))
    engine = ContinuousEngine(tiny_llama, max_num_seqs=16, block_size=4, num_blocks=120, max_prefill_chunk=24,
                              linear=Plain(), trace=StepTrace(max_steps=1000))
    rng, process = random.Random(6), psutil.Process()
    live: dict[str, Request] = {}
    number, begin, warm = 0, time.monotonic(), 0
    while (passed := time.monotonic() - begin) < seconds:
        if not warm and passed > seconds / 5:
            gc.collect()
            warm = process.memory_info().rss
        if len(live) < 40 and rng.random() < 0.5:
            number += 1
            prompt = [rng.randrange(64) for _ in range(rng.randint(1, 80))]
            params = SamplingParams(max_tokens=rng.randint(1, 60), temperature=rng.choice([0, 1]))
            each = Request(f"r{number}", prompt, params)
            engine.add(each)
            live[each.request_id] = each
        if live and rng.random() < 0.05:
            engine.abort(rng.choice(list(live)))
        for event in engine.step():
            assert event.error is None
            if event.finish_reason:
                del live[event.request_id]
        engine.scheduler.kv.check()
    for name in list(live):
        engine.abort(name)
    while engine.has_unfinished():
        engine.step()
    gc.collect()
    assert engine.cache.pool.num_used == 0 and not engine.cache.tables and not engine.cache.lengths
    assert engine.counters.preemptions > 0 and number > 100
    grown = process.memory_info().rss - warm
    assert grown < 20e6, f"{grown / 1e6:.1f} MB more than after the first fifth"
