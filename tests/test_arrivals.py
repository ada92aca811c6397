"""Requests that arrive by themselves: the open loop, its TTFT and queueing time, and how a result shows them."""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchmarks import __main__ as cli
from benchmarks import command, machine, metrics
from benchmarks.compare import Book
from benchmarks.loop import Trace, drive
from benchmarks.report import load, markdown
from benchmarks.run import Bench
from benchmarks.workloads import SHAPES, Shape
from liteinfer.lineage import Row
from liteinfer.loading import LoadedModel, tiny_model
from liteinfer.request import Counters, TokenEvent
from liteinfer.trace import Part, StepRecord, StepTrace
from tests.results import FIXTURE, no_hash

MACHINE = {"name": "test", "bandwidth_gb_s": 1000.0, "peak_gflop_s": 1e6}
LIMITS = {"bandwidth_gb_s": 9.0, "bandwidth_path": "sum", "peak_gflop_s": 90.0}
SMALL = Shape("small", isl=6, output=(3, 3), latency_prompts=1, throughput_prompts={1: 8})


class Clock:
    """Stands still but for what sleeps and works; a sleep may wake early."""

    def __init__(self, now: float = 0.0, wakes_after: float = 1.0) -> None:
        self.now, self.wakes_after, self.slept = now, wakes_after, list[float]()

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds * (self.wakes_after if len(self.slept) < 4 else 1.0)


@dataclass
class Ask:
    request_id: str


class Worker:
    """One request a step, in order, all of it in `seconds`. Notes when it was given what."""

    def __init__(self, clock: Clock, seconds: float, tokens: int = 1, trace: StepTrace | None = None) -> None:
        self.clock, self.seconds, self.tokens, self.trace = clock, seconds, tokens, trace
        self.waiting, self.added, self.counters = deque[str](), dict[str, float](), Counters()

    def add(self, request: Any) -> None:
        if request.request_id == "refused":
            raise ValueError("no room")
        self.added[request.request_id] = self.clock.now
        self.waiting.append(request.request_id)

    def step(self) -> list[TokenEvent]:
        started, name = self.clock.now, self.waiting.popleft()
        self.clock.now += self.seconds
        if self.trace:
            self.trace.steps.append(StepRecord(started, self.clock.now, (Part(name, 0, 1, 1),), 0, 1, 0))
        return [] if name == "forgotten" else [TokenEvent(name, (1,) * self.tokens, finish_reason="length")]

    def has_unfinished(self) -> bool:
        return bool(self.waiting)


def opened(arrivals: list[float], seconds: float, clock: Clock | None = None,
           ids: str | list[str] = "abcdefgh") -> tuple[list[Trace], Worker, Clock]:
    clock = clock or Clock()
    worker = Worker(clock, seconds)
    traces = drive(worker, [Ask(i) for i in ids[:len(arrivals)]], None, clock, arrivals, clock.sleep)
    return traces, worker, clock


# The open loop

def test_an_idle_engine_is_given_each_request_when_it_is_due() -> None:
    traces, worker, clock = opened([1.0, 5.0], seconds=0.5)
    assert worker.added == {"a": 1.0, "b": 5.0} and clock.slept == [1.0, 3.5]
    assert [(trace.added_at, metrics.ttft(trace)) for trace in traces] == [(1.0, 0.5), (5.0, 0.5)]


def test_a_busy_engine_cannot_hide_its_queue() -> None:
    """All three come within the first step: TTFT counts from when they were due, not from when they were added."""
    traces, worker, clock = opened([0.0, 0.25, 0.5], seconds=1.0)
    assert worker.added == {"a": 0.0, "b": 1.0, "c": 1.0} and clock.slept == []
    assert [trace.added_at for trace in traces] == [0.0, 0.25, 0.5]
    assert [metrics.ttft(trace) for trace in traces] == [1.0, 1.75, 2.5]


def test_nothing_sleeps_while_the_engine_has_work() -> None:
    _, worker, clock = opened([0.0, 0.0, 3.5, 10.0], seconds=1.0)
    assert worker.added == {"a": 0.0, "b": 0.0, "c": 3.5, "d": 10.0}
    assert clock.slept == [1.5, 5.5]


def test_arrivals_count_from_the_call() -> None:
    traces, worker, _ = opened([1.0, 1.5], seconds=0.125, clock=Clock(now=100.0))
    assert worker.added == {"a": 101.0, "b": 101.5} and [trace.added_at for trace in traces] == [101.0, 101.5]


def test_a_sleep_that_wakes_early_adds_nothing_early() -> None:
    traces, worker, clock = opened([8.0], seconds=1.0, clock=Clock(wakes_after=0.5))
    assert worker.added == {"a": 8.0} and clock.slept == [8.0, 4.0, 2.0, 1.0]
    assert metrics.ttft(traces[0]) == 1.0


def test_a_request_that_is_refused_or_forgotten_holds_nobody_up() -> None:
    traces, worker, _ = opened([1.0, 2.0, 4.0], seconds=0.5, ids=["refused", "forgotten", "c"])
    assert [trace.added_at for trace in traces] == [1.0, 2.0, 4.0]
    assert traces[0].error == "ValueError: no room" and traces[1].finish_reason is None
    assert traces[2].finish_reason == "length" and worker.added["c"] == 4.0


@pytest.mark.parametrize(("arrivals", "limit", "message"), [
    ([0.0], None, "2 requests, but 1 arrivals"),
    ([1.0, 0.5], None, "arrivals must not go back in time"),
    ([0.0, 1.0], 1, "requests that arrive by themselves have no limit, but max_in_flight is 1"),
])
def test_arrivals_that_make_no_sense_are_refused(arrivals: list[float], limit: int | None, message: str) -> None:
    with pytest.raises(ValueError) as error:
        drive(Worker(Clock(), 1.0), [Ask("a"), Ask("b")], limit, Clock(), arrivals)
    assert str(error.value) == message


# The arrival times

def at(rate: float) -> Shape:
    return SMALL.override(rate=rate)


def test_arrivals_are_the_same_for_every_row_and_round() -> None:
    few, many = at(4.0).arrivals(8), at(4.0).arrivals(2000)
    assert few is not None and many is not None
    assert few == many[:8] == sorted(few) and few[0] > 0
    assert many[-1] / 2000 == pytest.approx(1 / 4, rel=0.1)            # the mean gap
    gaps = [b - a for a, b in zip([0.0, *many], many, strict=False)]
    assert sum(gap > 1 / 4 for gap in gaps) / 2000 == pytest.approx(0.368, abs=0.04)   # 1 / e of exponential gaps
    assert at(8.0).arrivals(8) == pytest.approx([seconds / 2 for seconds in few])
    assert SMALL.arrivals(8) is None


@pytest.mark.parametrize(("rate", "shown"), [(0.0, "0"), (-2.5, "-2.5"), (float("inf"), "inf"), (float("nan"), "nan")])
def test_a_rate_must_be_a_positive_number(rate: float, shown: str, capsys: pytest.CaptureFixture[str],
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "load", lambda *_: pytest.fail("a model was loaded for a command that cannot run"))
    with pytest.raises(SystemExit) as stopped:
        cli.main(["run", "--rate", str(rate)])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"benchmarks: rate must be above 0 requests per second, got {shown}\n"


# The metrics

def test_ttft_and_queueing_time_count_from_the_arrival() -> None:
    traces = [Trace("a", 1.0, [(2.0, 1), (9.0, 1)], [7, 7], "length"), Trace("b", 1.5, [(4.5, 2)], [7, 7], "length"),
              Trace("bad", 0.0, [(9.0, 1)], [7], "length")]
    wanted = {"a": 2, "b": 2, "bad": 2}
    got = metrics.arrivals(traces, wanted, {"a": 1.25, "b": 3.5, "bad": 0.0})
    assert got == {"ttft_p50_ms": 2000.0, "ttft_p95_ms": pytest.approx(2900), "queue_p50_ms": pytest.approx(1125),
                   "queue_p95_ms": pytest.approx(250 + 0.95 * 1750)}
    untold = metrics.arrivals(traces, wanted, None)
    assert (untold["ttft_p50_ms"], untold["queue_p50_ms"], untold["queue_p95_ms"]) == (2000.0, None, None)


# The runner

class Quiet:
    def passed(self, *_: object) -> None: ...

    def stopped(self, *_: object) -> None: ...


class Drifting(Worker):
    """Counts something else in each engine's passes of one role."""

    role, built = "", 0

    def step(self) -> list[TokenEvent]:
        if self.role and self.waiting[0].startswith(self.role):
            self.counters.idle_slots = self.built
        return super().step()


def worked(model: LoadedModel, names: str, rate: float | None = 2.0, rounds: int = 1, drifts: str = "",
           seen: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """A run over engines that take a second for each request."""
    clock, seen = Clock(), [] if seen is None else seen

    def build(row: Row, model: LoadedModel, trace: StepTrace | None = None, **settings: int) -> Worker:
        seen.append({"trace": trace, **settings})
        engine = Drifting(clock, 1.0, tokens=4, trace=trace)   # the warm-up asks for 4, the others for 3
        engine.role, engine.built = drifts, len(seen)
        return engine

    return Bench(model, cli.entries(names), SMALL.override(rate=rate), rounds, MACHINE, Quiet(), None, build, clock,
                 clock.sleep).run()


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return tiny_model()


def test_queueing_time_is_that_of_a_single_server(tiny: LoadedModel) -> None:
    row, = worked(tiny, "continuous")["rows"]
    arrivals = at(2.0).arrivals(8)
    assert arrivals is not None
    free, queued = 0.0, []
    for due in arrivals:
        free = max(free, due)
        queued.append((free - due) * 1000)
        free += 1.0
    assert max(queued) > 1000                                          # 2 come in a second, 1 is done
    assert row["throughput"]["queue_p50_ms"] == pytest.approx(median(queued))
    assert row["throughput"]["ttft_p50_ms"] == pytest.approx(median(queued) + 1000)
    assert row["throughput"]["wall_s"] == pytest.approx(free - arrivals[0])
    told = [trace["added_at"] for trace in row["rounds"][0]["raw"]["throughput"]]
    assert told == pytest.approx([due - arrivals[0] for due in arrivals], abs=1e-6)


def test_only_an_engine_that_takes_a_trace_gets_one_and_only_at_a_rate(tiny: LoadedModel) -> None:
    seen: list[dict[str, Any]] = []
    static, continuous = worked(tiny, "paged-b32,continuous", seen=seen)["rows"]
    assert seen[0]["trace"] is None and isinstance(seen[1]["trace"], StepTrace)
    assert static["throughput"]["queue_p50_ms"] is None
    assert static["throughput"]["ttft_p50_ms"] == pytest.approx(continuous["throughput"]["ttft_p50_ms"])
    seen.clear()
    result = worked(tiny, "continuous", rate=None, seen=seen)
    assert seen[0]["trace"] is None and "rate" not in result["workload"]
    assert set(result["rows"][0]["throughput"]) == {"tok_s", "req_s", "wall_s", "itl_p50_ms", "tpot_p50_ms"}


def test_the_latency_pass_knows_no_rate(tiny: LoadedModel) -> None:
    with_rate, without = (worked(tiny, "continuous", rate=rate) for rate in (0.01, None))
    assert with_rate["rows"][0]["latency"] == without["rows"][0]["latency"]
    assert with_rate["workload"]["rate"] == 0.01


def test_counters_may_differ_between_rounds_where_the_clock_has_a_say(tiny: LoadedModel) -> None:
    row, = worked(tiny, "continuous", rounds=3, drifts="throughput")["rows"]
    assert len(row["rounds"]) == 3 and "stopped" not in row and row["counters"]["idle_slots"] == 1   # the first's
    for drifts, rate in (("latency", 2.0), ("throughput", None)):
        row, = worked(tiny, "continuous", rate=rate, rounds=3, drifts=drifts)["rows"]
        assert len(row["rounds"]) == 1 and row["stopped"].startswith(f"RuntimeError: the {drifts} pass counted")


def test_a_run_at_a_rate_end_to_end(tiny: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                    capsys: pytest.CaptureFixture[str]) -> None:
    """Over the real engine, by the real clock."""
    monkeypatch.setattr(command, "load", lambda *_: tiny)
    monkeypatch.setattr(machine, "limits", lambda *_: LIMITS)
    monkeypatch.setattr(command, "LOCAL", tmp_path)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["run", "--rows", "paged-b4,continuous", "--isl", "9", "--osl", "3", "--prompts", "4", "--rate",
                  "200"])
    assert stopped.value.code == 0
    result = load(tmp_path / "quick-rate200.json")
    assert result["workload"]["rate"] == 200
    static, continuous = (row["throughput"] for row in result["rows"])
    assert static["queue_p50_ms"] is None and 0 <= continuous["queue_p50_ms"] <= continuous["ttft_p50_ms"]
    assert 0 < static["ttft_p50_ms"] <= static["ttft_p95_ms"]
    told = result["rows"][1]["rounds"][0]["raw"]["throughput"]
    due = SHAPES["quick"].override(rate=200).arrivals(4)
    assert due is not None
    assert [trace["added_at"] for trace in told] == pytest.approx([seconds - due[0] for seconds in due], abs=2e-6)
    printed = capsys.readouterr().out
    assert "arrivals Poisson, 200 requests/s" in " ".join(printed.split()) and "queue" in printed


# The tables

@pytest.fixture
def at_a_rate() -> dict[str, Any]:
    result = load(FIXTURE)
    result["workload"]["rate"] = 1.5
    for i, row in enumerate(result["rows"]):
        row["throughput"] |= {"ttft_p50_ms": 1200.0 + i, "ttft_p95_ms": 2000.0, "queue_p50_ms": 7.25 if i else None,
                              "queue_p95_ms": 90.0 if i else None}
    return result


def test_a_rate_adds_four_columns_to_the_throughput_table(at_a_rate: dict[str, Any]) -> None:
    text = markdown([at_a_rate], ("facts", "throughput"), no_hash)
    assert " · arrivals Poisson, 1.5 requests/s · greedy, forced length · " in text
    assert "**Throughput: requests as they arrive, TTFT and queueing time in ms**" in text
    assert "| wall s | ITL p50 ms | TTFT p50 | TTFT p95 | queue p50 | queue p95 | vs base |" in text
    eager, packed = (next(line for line in text.splitlines() if line.startswith(f"| liteinfer-{name} |"))
                     for name in ("eager", "native-packed"))
    assert "| 1,200 | 2,000 | - | - |" in eager and "| 2,000 | 7.2 | 90.0 |" in packed
    assert "TTFT counts from when a request was due" in text and "only for" not in text


def test_without_a_rate_there_is_no_such_column() -> None:
    text = markdown([load(FIXTURE)], ("facts", "throughput", "counters"), no_hash)
    assert "TTFT" not in text and "queue" not in text and "Poisson" not in text
    assert "**Counters: one throughput pass, the same on every machine**" in text


def test_counters_at_a_rate_say_that_the_clock_had_a_say(at_a_rate: dict[str, Any]) -> None:
    assert "**Counters: one throughput pass, the first round's, and the clock had a say**" in markdown(
        [at_a_rate], ("counters",), no_hash)


def test_a_run_at_a_rate_is_not_measured_like_one_without(at_a_rate: dict[str, Any]) -> None:
    book = Book([at_a_rate, load(FIXTURE)], no_hash)
    here, there = book.named("eager")
    assert book.doubts(here, there) == ("separate runs", "different arrivals")
    assert book.doubts(here, book.named("nocache")[0]) == ()
    other = copy.deepcopy(at_a_rate)
    other["workload"]["rate"] = 3.0
    here, there = Book([at_a_rate, other], no_hash).named("eager")
    assert book.doubts(here, there) == ("separate runs", "different arrivals")
    text = markdown([at_a_rate, load(FIXTURE)], ("throughput",), no_hash)
    assert "Requests arrived by themselves only for liteinfer-nocache" in text
