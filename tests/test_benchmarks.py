"""The benchmark's arithmetic, against a scripted engine with known event times; its prompts, hashes and errors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks import __main__ as cli
from benchmarks import ceilings, codehash, command, machine, metrics, progress, workloads
from benchmarks.loop import Trace, drive
from benchmarks.progress import Remaining
from benchmarks.result_file import load, without_raw
from benchmarks.run import Bench, rotated, runnable, settings
from benchmarks.workloads import ROLES, SHAPES, Shape, find_shape, workload
from liteinfer import lineage
from liteinfer.lineage import LADDER, Row
from liteinfer.loading import LoadedModel, tiny_model
from liteinfer.request import Counters, Request, TokenEvent

MACHINE = {"name": "test", "bandwidth_gb_s": 1000.0, "peak_gflop_s": 1e6}
LIMITS = {"bandwidth_gb_s": 9.0, "bandwidth_path": "sum", "peak_gflop_s": 90.0}   # what machine.limits measures
SMALL = Shape("small", isl=6, output=(5, 5), latency_prompts=2, throughput_prompts={1: 3, 4: 5})


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Ask:
    request_id: str


class Scripted:
    """An engine that emits the given events of each request at the given seconds after its add.

    `script[request_id]` is a list of (seconds, tokens, finish_reason); an id that is missing is refused by add.
    """

    def __init__(self, clock: Clock, script: dict[str, list[tuple[float, int, str | None]]]) -> None:
        self.clock, self.script = clock, script
        self.due: list[tuple[float, TokenEvent]] = []
        self.counters = Counters()
        self.most_open = 0

    def add(self, request: Ask) -> None:
        if request.request_id not in self.script:
            raise ValueError(f"no room for {request.request_id}")
        for seconds, tokens, reason in self.script[request.request_id]:
            error = "HTTP 500" if reason == "error" else None
            event = TokenEvent(request.request_id, (7,) * tokens, finish_reason=reason, error=error)  # type: ignore[arg-type]
            self.due.append((self.clock.now + seconds, event))
        self.due.sort(key=lambda item: item[0])
        self.most_open = max(self.most_open, len({event.request_id for _, event in self.due}))

    def step(self) -> list[TokenEvent]:
        self.clock.now = max(self.clock.now, self.due[0][0])
        ready = [event for at, event in self.due if at <= self.clock.now]
        self.due = self.due[len(ready):]
        return ready

    def has_unfinished(self) -> bool:
        return bool(self.due)


def traced(script: dict[str, list[tuple[float, int, str | None]]], max_in_flight: int | None = None,
           ids: Iterable[str] | None = None) -> list[Trace]:
    clock = Clock()
    return drive(Scripted(clock, script), [Ask(i) for i in ids or script], max_in_flight, clock)


def steady(tokens: int) -> list[tuple[float, int, str | None]]:
    """One token every 0.1 s, the first after 0.1 s."""
    return [(0.1 * (i + 1), 1, "length" if i == tokens - 1 else None) for i in range(tokens)]


# ---- the loop -------------------------------------------------------------------------------------------------

def test_the_loop_stamps_every_event_and_keeps_its_tokens() -> None:
    trace, = traced({"a": [(0.5, 1, None), (0.8, 2, "length")]})
    assert trace == Trace("a", 0.0, [(0.5, 1), (0.8, 2)], [7, 7, 7], "length", None)


def test_all_requests_are_added_at_once_unless_told_otherwise() -> None:
    assert [trace.added_at for trace in traced({i: steady(3) for i in "abc"})] == [0.0, 0.0, 0.0]


def test_the_next_request_is_added_when_the_last_has_ended() -> None:
    added = [trace.added_at for trace in traced({i: steady(3) for i in "abc"}, max_in_flight=1)]
    assert added == pytest.approx([0.0, 0.3, 0.6])


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_no_more_than_max_in_flight(limit: int) -> None:
    clock = Clock()
    engine = Scripted(clock, {str(i): steady(1 + i % 3) for i in range(7)})
    traces = drive(engine, [Ask(str(i)) for i in range(7)], limit, clock)
    assert engine.most_open == limit
    assert [len(trace.token_ids) for trace in traces] == [1, 2, 3, 1, 2, 3, 1]


def test_a_refused_request_fails_alone() -> None:
    bad, good = traced({"good": steady(2)}, 1, ids=["bad", "good"])
    assert (bad.finish_reason, bad.error) == ("error", "ValueError: no room for bad")
    assert good.finish_reason == "length" and len(good.token_ids) == 2


def test_a_request_the_engine_forgets_does_not_hold_up_the_rest() -> None:
    lost, after = traced({"lost": [(0.1, 1, None)], "after": steady(1)}, 1)
    assert lost.finish_reason is None and after.finish_reason == "length"
    assert metrics.failure(lost, 2) == "gave 1 of 2 tokens, finish_reason None"


def test_the_loop_refuses_a_limit_of_zero_and_a_repeated_id() -> None:
    with pytest.raises(ValueError, match="max_in_flight must be None or at least 1, got 0"):
        traced({"a": steady(1)}, 0)
    with pytest.raises(ValueError, match="'a' occurs twice"):
        traced({"a": steady(1)}, ids=["a", "a"])


def test_the_loop_imports_only_the_standard_library() -> None:
    tree = (codehash.ROOT / "benchmarks/loop.py").read_text(encoding="utf-8")
    imported = [line.split()[1].split(".")[0] for line in tree.splitlines() if line.startswith(("import ", "from "))]
    assert set(imported) == {"__future__", "time", "collections", "dataclasses", "typing"}


# ---- the arithmetic -------------------------------------------------------------------------------------------

def test_k1_ttft_is_taken_at_the_first_token_not_at_an_empty_event() -> None:
    traces = traced({"a": [(0.05, 0, None), (0.10, 0, None), (0.50, 1, None), (0.60, 1, None), (0.90, 0, "length")]})
    got = metrics.latency(traces, {"a": 2})
    assert got["ttft_p50_ms"] == pytest.approx(500)
    assert got["e2e_p50_ms"] == pytest.approx(600)
    assert got["itl_p50_ms"] == pytest.approx(100)


def test_k3_several_tokens_in_an_event() -> None:
    traces = traced({"a": [(0.5, 1, None), (0.8, 3, None), (1.1, 3, "length")]})
    assert metrics.tpot(traces[0]) == pytest.approx(0.6 / 6)
    assert metrics.gaps(traces[0]) == pytest.approx([0.3, 0.3])   # one gap per event
    assert metrics.throughput(traces, {"a": 7})["tok_s"] == pytest.approx(7 / 1.1)


def test_k4_zero_one_and_two_tokens() -> None:
    script = {"zero": [(0.2, 0, "length")], "one": [(0.3, 1, "length")], "two": [(0.4, 1, None), (0.9, 1, "length")]}
    traces = traced(script)
    zero, one, two = traces
    assert (metrics.ttft(zero), metrics.tpot(zero), metrics.gaps(zero), metrics.e2e(zero)) == (None, None, [], None)
    assert (metrics.ttft(one), metrics.tpot(one), metrics.gaps(one)) == (pytest.approx(0.3), None, [])
    assert metrics.tpot(two) == pytest.approx(0.5)
    wanted = {"zero": 1, "one": 1, "two": 2}
    got = metrics.latency(traces, wanted)
    assert got["itl_p50_ms"] == got["tpot_p50_ms"] == pytest.approx(500)   # not pulled down by a 0
    assert got["ttft_p50_ms"] == pytest.approx(350)                        # of one and two
    assert metrics.failures(traces, wanted) == ["zero: gave 0 of 1 tokens, finish_reason length"]
    alone = metrics.latency(traces[:1], wanted)
    assert set(alone.values()) == {None}
    assert set(metrics.throughput(traces[:1], wanted).values()) == {None}


def test_k6_failed_requests_are_counted_with_reasons_and_left_out() -> None:
    script = {f"good{i}": steady(4) for i in range(7)}
    script |= {"refused": [(0.01, 0, "error")], "cut": [(5.0, 1, None), (9.0, 1, "stop")], "empty": [(0.1, 0, "stop")]}
    traces, wanted = traced(script), dict.fromkeys(script, 4)
    assert len(metrics.successful(traces, wanted)) == 7
    assert metrics.failures(traces, wanted) == [
        "refused: HTTP 500", "cut: gave 2 of 4 tokens, finish_reason stop",
        "empty: gave 0 of 4 tokens, finish_reason stop"]
    got = metrics.latency(traces, wanted)
    assert (got["ttft_p95_ms"], got["itl_p95_ms"]) == (pytest.approx(100), pytest.approx(100))
    assert metrics.throughput(traces, wanted)["tok_s"] == pytest.approx(7 * 4 / 9.0)   # its time counts, its tokens not
    assert metrics.throughput(traces, wanted)["req_s"] == pytest.approx(7 / 9.0)


def test_an_aborted_request_is_a_failed_one() -> None:
    assert metrics.failure(Trace("a", 0.0, [(1.0, 4)], [7] * 4, "abort"), 4) == "aborted after 4 tokens"


def test_itl_is_pooled_over_requests_and_percentiles_interpolate() -> None:
    traces = traced({"a": [(1.0, 1, None), (1.1, 1, "length")],
                     "b": [(1.0, 1, None), (1.2, 1, None), (1.5, 1, "length")]})
    got = metrics.latency(traces, {"a": 2, "b": 3})
    assert got["itl_p50_ms"] == pytest.approx(200)              # of 100, 200, 300
    assert got["itl_p95_ms"] == pytest.approx(290)
    assert got["tpot_p50_ms"] == pytest.approx((100 + 250) / 2)


def test_the_wall_runs_from_the_first_add_to_the_last_token() -> None:
    traces = [Trace("a", 2.0, [(3.0, 1), (9.0, 0)], [7], "length"), Trace("b", 2.5, [(4.0, 1)], [7], "length")]
    assert metrics.throughput(traces, {"a": 1, "b": 1}) == {"tok_s": 1.0, "req_s": 1.0, "wall_s": 2.0,
                                                            "itl_p50_ms": None, "tpot_p50_ms": None}


def test_over_rounds_median_least_greatest_and_what_no_round_defines() -> None:
    medians, ranges = metrics.over_rounds([{"x": 3.0, "y": None}, {"x": 1.0, "y": None}, {"x": 8.0, "y": None}])
    assert medians == {"x": 3.0, "y": None} and ranges == {"x": [1.0, 8.0], "y": None}


# ---- prompts --------------------------------------------------------------------------------------------------

class Letters:
    """A tokenizer of one token per character; spans exclude nothing."""

    def __call__(self, text: str, **_: object) -> dict[str, list[object]]:
        return {"input_ids": [ord(c) for c in text], "offset_mapping": [(i, i + 1) for i in range(len(text))]}


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return tiny_model()


@pytest.fixture
def lettered(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    monkeypatch.setattr(tiny, "tokenizer", Letters())
    return tiny


@pytest.mark.parametrize("isl", [3, 64, 4096])
def test_prompts_are_distinct_in_their_first_block_and_exactly_isl_long(lettered: LoadedModel, isl: int) -> None:
    prompts = workloads.take(lettered, isl, 100)
    assert {len(prompt) for prompt in prompts} == {isl}
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 100


def test_prompts_begin_at_words_and_go_on_at_the_text_s_beginning(lettered: LoadedModel) -> None:
    text = workloads.PROSE.read_text(encoding="utf-8")
    for prompt in workloads.take(lettered, 4096, 200):
        words = "".join(map(chr, prompt))
        at = (text + text).index(words)
        assert at == 0 or text[at - 1].isspace()
        assert words[0].isalnum()


@pytest.mark.parametrize("named", ["text", "random"])
def test_the_first_prompts_are_the_same_whatever_is_asked_for(tiny: LoadedModel, named: str,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    if named == "text":
        monkeypatch.setattr(tiny, "tokenizer", Letters())
    few, many = workload(tiny, SMALL.override(isl=32)), workload(tiny, SMALL.override(isl=32, prompts=40))
    assert many.throughput[:3] == few.throughput and many.latency[:2] == few.latency
    assert many.hashes[:3] == few.hashes and many.prompt_hash != few.prompt_hash
    longer = workload(tiny, SMALL.override(isl=80))
    assert [prompt[:32] for prompt in longer.throughput] == few.throughput
    wide = workload(tiny, SMALL.override(isl=32), width=4)
    assert len(wide.throughput) == 5 and wide.throughput[:3] == few.throughput and len(wide.warmup) == 4


def test_no_prompt_has_two_roles(lettered: LoadedModel) -> None:
    load = workload(lettered, SMALL.override(isl=32, prompts=50), width=4)
    blocks = [tuple(prompt[:8]) for role in ROLES for prompt in getattr(load, role)]
    assert len(set(blocks)) == len(blocks) == 104


def test_a_hash_tells_prompts_apart(tiny: LoadedModel) -> None:
    load = workload(tiny, SMALL)
    assert len(set(load.hashes)) == 3
    assert load.prompt_hash == workload(tiny, SMALL).prompt_hash
    load.latency[1][0] += 1
    assert load.prompt_hash != workload(tiny, SMALL).prompt_hash


def test_too_few_windows_names_both_numbers(lettered: LoadedModel, monkeypatch: pytest.MonkeyPatch,
                                            tmp_path: Path) -> None:
    monkeypatch.setattr(workloads, "PROSE", tmp_path / "prose.txt")
    workloads.PROSE.write_text("one two three one two three four.", encoding="utf-8")
    with pytest.raises(ValueError, match="9 distinct prompts asked for, but there are only 5"):   # "one two " twice,
        workloads.take(lettered, 20, 9)                                                           # "two thre" twice


def test_requests_are_greedy_and_of_forced_length(tiny: LoadedModel) -> None:
    params = [request.params for request in workload(tiny, SMALL).requests("throughput")]
    assert {(p.max_tokens, p.temperature, p.ignore_eos) for p in params} == {(5, 0.0, True)}


def test_ragged_outputs_spread_over_the_whole_range() -> None:
    ragged = SHAPES["ragged"]
    lengths = [ragged.output_length(i) for i in range(128)]
    assert min(lengths) >= 16 and max(lengths) <= 256 and min(lengths) < 20 and max(lengths) > 252
    assert ragged.osl == "16..256" and sum(lengths) / 128 == pytest.approx(136, abs=3)
    assert {SHAPES["quick"].output_length(i) for i in range(64)} == {24}


@pytest.mark.parametrize("setting", ["isl", "osl", "prompts"])
def test_override_refuses_zero(setting: str) -> None:
    with pytest.raises(ValueError, match=f"{setting} must be at least 1, got 0"):
        SHAPES["quick"].override(**{setting: 0})


def test_override_and_unknown_shapes() -> None:
    with pytest.raises(ValueError, match="isl must be at most 4096, got 5000"):
        SHAPES["quick"].override(isl=5000)
    with pytest.raises(ValueError, match="unknown shape 'fast'; the shapes are quick, course, paper, ragged"):
        find_shape("fast")
    changed = SHAPES["course"].override(isl=9, osl=7, prompts=2)
    assert (changed.isl, changed.osl, changed.latency_prompts) == (9, 7, 2)
    assert changed.prompts_at(1) == changed.prompts_at(32) == 2
    assert [SHAPES["course"].prompts_at(w) for w in (1, 2, 4, 32, 64)] == [2, 2, 16, 64, 64]


# ---- the runner -----------------------------------------------------------------------------------------------

@dataclass
class Noted:
    """A watch that remembers."""

    lines: list[tuple[object, ...]] = field(default_factory=list)

    def passed(self, name: str, width: int, round_: int, what: str, headline: float | None) -> None:
        self.lines.append((round_, name.removeprefix("liteinfer-"), what))

    def stopped(self, name: str, width: int, reason: str) -> None:
        self.lines.append(("stopped", name, reason))


class Spy:
    """An engine of the ladder that notes what it is given, and may be told to break."""

    def __init__(self, inner: object, added: list[str], breaks: Callable[[Request], BaseException | None]) -> None:
        self.inner, self.added, self.breaks = inner, added, breaks
        self.error: BaseException | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name == "counters":
            setattr(self.inner, name, value)
        else:
            object.__setattr__(self, name, value)

    def add(self, request: Request) -> None:
        self.added.append(request.request_id)
        self.error = self.error or self.breaks(request)
        self.inner.add(request)  # type: ignore[attr-defined]

    def step(self) -> object:
        if self.error is not None:
            raise self.error
        return self.inner.step()  # type: ignore[attr-defined]


def bench(model: LoadedModel, names: str = "", rounds: int = 1, out: Path | None = None, watch: Noted | None = None,
          breaks: Callable[[Row, Request], BaseException | None] = lambda row, request: None,
          added: list[str] | None = None, shape: Shape = SMALL) -> Bench:
    def build(row: Row, model: LoadedModel, **settings: object) -> Spy:
        inner = lineage.build(row, model, **settings)
        return Spy(inner, [] if added is None else added, lambda request: breaks(row, request))

    return Bench(model, cli.entries(names), shape, rounds, MACHINE, watch or Noted(), out, build)


NO_HEAD = ("ValueError: no draft head comes with liteinfer for 'tiny-llama': train one with "
           "python -m liteinfer.speculative.train, or name a draft model")


def test_tokens_computed_per_row_are_what_the_chapters_predict(tiny: LoadedModel) -> None:
    result = bench(tiny).run()
    isl, osl, n = 6, 5, 3
    expected = {row.name: n * (isl + osl - 1) for row in LADDER if row.chapter <= 3}
    expected["liteinfer-nocache"] = n * sum(isl + i for i in range(osl))
    computed = {row["name"]: row["counters"]["tokens_computed"] for row in result["rows"]}
    assert {name: computed[name] for name in expected} == expected
    assert {row["counters"]["forward_passes"] for row in result["rows"] if row["name"] in expected} == {n * osl}
    assert all(row["failed"] == [] for row in result["rows"])
    every = cli.entries("")
    lacking = [entry for entry in every if lineage.missing(entry.row) or entry.row.name == "liteinfer-speculative"]
    assert [(row["name"], row["width"]) for row in result["rows"]] == [
        (entry.row.name, entry.width) for entry in every if entry not in lacking]
    assert result["skipped"] == [{"name": entry.row.name, "width": entry.width,
                                  "reason": lineage.missing(entry.row) or NO_HEAD} for entry in lacking]


def test_every_row_gives_the_first_row_s_tokens(tiny: LoadedModel) -> None:
    for row in bench(tiny).run()["rows"]:
        assert row["differs_from_first"] == {"differ": 0, "prompts": 5}   # 2 latency, 3 throughput


def test_a_row_that_says_other_words_is_counted(tiny: LoadedModel) -> None:
    def lie(row: Row, request: Request) -> None:
        if row.name == "liteinfer-eager" and request.request_id == "throughput-1":
            request.prompt_token_ids[0] ^= 1

    result = bench(tiny, "nocache,eager", breaks=lie).run()
    assert [row["differs_from_first"]["differ"] for row in result["rows"]] == [0, 1]


def test_k8_warm_up_is_in_no_metric_and_no_counter(tiny: LoadedModel) -> None:
    added: list[str] = []
    result = bench(tiny, "eager", added=added).run()
    assert added == ["warmup-0", "latency-0", "latency-1", "throughput-0", "throughput-1", "throughput-2"]
    row = result["rows"][0]
    assert row["counters"]["forward_passes"] == 3 * 5
    raw = row["rounds"][0]["raw"]
    assert [trace["request_id"] for trace in raw["latency"]] == ["latency-0", "latency-1"]
    assert [trace["request_id"] for trace in raw["throughput"]] == [f"throughput-{i}" for i in range(3)]
    assert raw["throughput"][0]["added_at"] == 0.0   # the wall begins with the first measured request
    assert result["workload"]["warmup_prompts"] == 1


def test_k8_warm_up_keeps_to_the_limit(tiny: LoadedModel) -> None:
    clock = Clock()
    engine = Scripted(clock, {f"warmup-{i}": steady(2) for i in range(5)})
    drive(engine, [Ask(f"warmup-{i}") for i in range(5)], 2, clock)
    assert engine.most_open == 2


def test_k9_a_run_s_prompts_are_distinct_and_their_hashes_stored(tiny: LoadedModel) -> None:
    row = bench(tiny, "eager", shape=SMALL.override(prompts=100, osl=1)).run()["rows"][0]
    assert row["prompts"]["latency"] == row["prompts"]["throughput"] == len(set(row["prompts"]["hashes"])) == 100


def test_rows_take_turns_and_another_begins_each_round(tiny: LoadedModel) -> None:
    watch = Noted()
    bench(tiny, "nocache,eager,native-eager", rounds=3, watch=watch).run()
    turns = [(round_, name) for round_, name, what in watch.lines if what == "latency"]
    assert turns == [(0, "nocache"), (0, "eager"), (0, "native-eager"), (1, "eager"), (1, "native-eager"),
                     (1, "nocache"), (2, "native-eager"), (2, "nocache"), (2, "eager")]


def test_rotation_wraps() -> None:
    assert rotated([1, 2, 3], 4) == [2, 3, 1]  # type: ignore[list-item, comparison-overlap]


def test_ctrl_c_keeps_what_finished(tiny: LoadedModel, tmp_path: Path) -> None:
    seen: list[str] = []

    def stop(row: Row, request: Request) -> BaseException | None:
        seen.append(row.name)
        third = row.name == "liteinfer-native-eager" and request.request_id == "throughput-1"
        return KeyboardInterrupt() if third else None

    out = tmp_path / "sub" / "result.json"
    result = bench(tiny, rounds=2, out=out, breaks=stop).run()
    assert json.loads(out.read_text(encoding="utf-8")) == json.loads(json.dumps(result))
    assert [(row["name"], len(row["rounds"])) for row in result["rows"]] == [("liteinfer-nocache", 1),
                                                                            ("liteinfer-eager", 1)]
    assert result["interrupted"] is True and "liteinfer-native-packed" not in seen
    assert [file.name for file in out.parent.iterdir()] == ["result.json"]   # no partial file is left


def test_an_exception_costs_its_row_only(tiny: LoadedModel) -> None:
    def crash(row: Row, request: Request) -> BaseException | None:
        return RuntimeError("out of\nmemory") if row.name == "liteinfer-eager" else None

    watch = Noted()
    result = bench(tiny, "nocache,eager,native-eager", rounds=2, watch=watch, breaks=crash).run()
    assert [row["name"] for row in result["rows"]] == ["liteinfer-nocache", "liteinfer-native-eager"]
    assert [len(row["rounds"]) for row in result["rows"]] == [2, 2]
    assert result["skipped"] == [{"name": "liteinfer-eager", "width": 1, "reason": "RuntimeError: out of memory"}]
    assert watch.lines.count(("stopped", "liteinfer-eager", "RuntimeError: out of memory")) == 1
    assert "interrupted" not in result


def test_a_row_that_breaks_later_keeps_its_rounds_and_says_why(tiny: LoadedModel) -> None:
    times: list[str] = []

    def crash(row: Row, request: Request) -> BaseException | None:
        times.append(request.request_id)
        return RuntimeError("gone") if times.count("latency-0") == 2 else None

    row, = bench(tiny, "eager", rounds=3, breaks=crash).run()["rows"]
    assert len(row["rounds"]) == 1 and row["stopped"] == "RuntimeError: gone"


def test_an_engine_that_cannot_be_built_is_skipped(tiny: LoadedModel) -> None:
    def build(row: Row, model: LoadedModel, **settings: object) -> object:
        raise ValueError(f"{row.name} needs a CUDA device")

    result = Bench(tiny, cli.entries("eager"), SMALL, 1, MACHINE, Noted(), None, build).run()
    assert result["rows"] == []
    assert result["skipped"][0]["reason"] == "ValueError: liteinfer-eager needs a CUDA device"


def test_a_failed_request_is_in_the_result_with_its_reason(tiny: LoadedModel) -> None:
    def spoil(row: Row, request: Request) -> None:
        if request.request_id == "throughput-1":
            request.prompt_token_ids[0] = -1

    row = bench(tiny, "eager", breaks=spoil).run()["rows"][0]
    reason, = row["failed"]
    assert reason.startswith("throughput-1: ValueError: request throughput-1: token id -1")
    wall, done = row["throughput"]["wall_s"], row["throughput"]["req_s"]
    assert wall * done == pytest.approx(2)


def test_a_row_of_width_4_is_built_4_wide_and_warmed_with_4(tiny: LoadedModel) -> None:
    settings_seen: list[dict[str, object]] = []
    added: list[str] = []

    def build(row: Row, model: LoadedModel, **settings: object) -> Spy:
        settings_seen.append(settings)
        return Spy(lineage.build(row, model, **settings), added, lambda request: None)

    row, = Bench(tiny, cli.entries("native-eager-b4"), SMALL, 1, MACHINE, Noted(), None, build).run()["rows"]
    assert settings_seen == [{"max_num_seqs": 4}]
    assert sum(i.startswith("warmup") for i in added) == 4
    assert row["width"] == 4 and row["prompts"]["throughput"] == 5 and "pool" not in row


# Rows of several widths, and rows that need a draft

def test_a_row_of_two_widths_runs_at_each_with_that_width_s_prompts(tiny: LoadedModel) -> None:
    seen: list[dict[str, object]] = []

    def build(row: Row, model: LoadedModel, **settings: object) -> object:
        seen.append(settings)
        return lineage.build(row, model, **settings)

    rows = Bench(tiny, cli.entries("radix,ngram"), SMALL, 1, MACHINE, Noted(), None, build).run()["rows"]
    assert [(row["name"], row["width"], row["prompts"]["throughput"]) for row in rows] == [
        ("liteinfer-radix", 32, 5), ("liteinfer-ngram", 1, 3), ("liteinfer-ngram", 32, 5)]
    assert [(each["max_num_seqs"], each["num_blocks"]) for each in seen] == [(32, 32), (1, 1), (32, 32)]
    assert rows[1]["prompts"]["hashes"] == rows[2]["prompts"]["hashes"][:3] == rows[0]["prompts"]["hashes"][:3]
    assert {row["differs_from_first"]["differ"] for row in rows} == {0} and "draft" not in rows[1]


def test_a_row_that_needs_a_draft_runs_with_the_one_that_is_named(tiny: LoadedModel) -> None:
    shape = SMALL.override(isl=12, osl=20)
    without = bench(tiny, "radix,speculative", shape=shape).run()
    assert [row["name"] for row in without["rows"]] == ["liteinfer-radix"]
    assert without["skipped"] == [{"name": "liteinfer-speculative", "width": width, "reason": NO_HEAD}
                                  for width in (1, 32)]
    seen: list[dict[str, object]] = []

    def build(row: Row, model: LoadedModel, **settings: object) -> object:
        seen.append(settings)
        return lineage.build(row, model, **settings)

    run = Bench(tiny, cli.entries("radix,speculative"), shape, 1, MACHINE, Noted(), None, build, draft="early-exit:1")
    result = run.run()
    assert [(row["name"], row["width"], row.get("draft")) for row in result["rows"]] == [
        ("liteinfer-radix", 32, None), ("liteinfer-speculative", 1, "early-exit:1"),
        ("liteinfer-speculative", 32, "early-exit:1")]
    assert result["skipped"] == [] and all(row["counters"]["drafted_tokens"] > 0 for row in result["rows"][1:])
    assert [each.get("max_model_len") for each in seen] == [None, 32, 32]   # the draft's pool is as long
    assert {row["differs_from_first"]["differ"] for row in result["rows"]} == {0}


def test_the_command_hands_on_the_draft(tiny: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "load", lambda *_: tiny)
    monkeypatch.setattr(machine, "limits", lambda *_: LIMITS)
    assert exit_code("run", "--rows", "speculative", "--out", str(tmp_path / "r.json"), "--isl", "9", "--osl", "8",
                     "--prompts", "2", "--draft", "early-exit:1") == 0
    printed = capsys.readouterr()
    assert "draft early-exit:1" in printed.out and "was not run" not in printed.out
    assert len([line for line in printed.err.splitlines() if line.startswith("round ")]) == 4


# Rows with a pool: its size in blocks

@pytest.mark.parametrize(("name", "width", "shape", "expected"), [
    ("native-packed", 1, SMALL, {}),
    ("paged", 1, SMALL, {"block_size": 16, "num_blocks": 1}),                                # 6 + 5 = 11 tokens
    ("paged", 1, SMALL.override(isl=27), {"block_size": 16, "num_blocks": 2}),               # 32
    ("paged", 1, SMALL.override(isl=28), {"block_size": 16, "num_blocks": 3}),               # 33
    ("paged", 1, SMALL.override(isl=30, osl=1), {"block_size": 16, "num_blocks": 3}),        # a warm-up of 34
    ("eager-b4", 4, SMALL, {"max_num_seqs": 4}),
    ("paged-b32", 32, SHAPES["course"], {"max_num_seqs": 32, "block_size": 16, "num_blocks": 32 * 12}),
    ("paged-b32", 2, SHAPES["ragged"], {"max_num_seqs": 2, "block_size": 16, "num_blocks": 2 * 24}),
])
def test_a_pool_holds_the_longest_sequences_and_no_more(name: str, width: int, shape: Shape,
                                                        expected: dict[str, int]) -> None:
    assert settings(lineage.find(name), width, shape) == expected


def test_paged_rows_count_their_blocks_and_say_how_large_the_pool_was(tiny: LoadedModel) -> None:
    shape = Shape("long", isl=30, output=(5, 5), latency_prompts=1, throughput_prompts={1: 3, 4: 5})
    one, four = bench(tiny, "paged,paged-b4", shape=shape).run()["rows"]
    assert one["pool"].startswith("KV pool: 3 blocks of 16 tokens") and one["pool"].endswith("(as given)")
    assert four["pool"].startswith("KV pool: 12 blocks of 16 tokens")
    assert one["failed"] == four["failed"] == []
    assert (one["counters"]["blocks_peak"], four["counters"]["blocks_peak"]) == (3, 12)
    # 30 tokens stored, then 31 to 34: two blocks for three steps, three for two
    per_sequence = {"held_slots": (3 * 2 + 2 * 3) * 16, "tail_slots": 2 + 1 + 0 + 15 + 14}
    for row, prompts in ((one, 3), (four, 5)):
        assert {key: row["counters"][key] for key in per_sequence} == {
            key: prompts * slots for key, slots in per_sequence.items()}
    assert (one["counters"]["batch_slots"], one["counters"]["idle_slots"]) == (0, 0)
    assert (four["counters"]["batch_slots"], four["counters"]["idle_slots"]) == (40, 15)   # the last batch has one of 4


# Rows this machine cannot run

@pytest.fixture
def no_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that lacks what the packed rows and the kernel need."""
    monkeypatch.setattr(lineage, "missing", lambda row: "needs CUDA" if row.name in (
        "liteinfer-native-packed", "liteinfer-paged-triton") else None)


def test_a_row_that_cannot_run_is_listed_with_the_reason_and_costs_no_turn(tiny: LoadedModel, no_packed: None) -> None:
    watch = Noted()
    run = bench(tiny, "native-packed,nocache,paged-triton", rounds=2, watch=watch)
    result = run.run()
    assert [row["name"] for row in result["rows"]] == ["liteinfer-nocache"]
    assert result["skipped"] == [{"name": "liteinfer-native-packed", "width": 1, "reason": "needs CUDA"},
                                 {"name": "liteinfer-paged-triton", "width": 1, "reason": "needs CUDA"}]
    assert {name for _, name, _ in watch.lines} == {"nocache"}
    assert [entry.row.name for entry in runnable(run.entries)] == ["liteinfer-nocache"]


def test_the_command_says_so_and_counts_no_pass_of_it(tiny: LoadedModel, no_packed: None, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[list[tuple[str, int, str]]] = []
    show = progress.Show

    def spy(console: Console, stages: list[tuple[tuple[str, int, str], int]], rounds: int) -> progress.Show:
        seen.append([stage for stage, _ in stages])
        return show(console, stages, rounds)

    monkeypatch.setattr(progress, "Show", spy)
    monkeypatch.setattr(command, "load", lambda *_: tiny)
    monkeypatch.setattr(machine, "limits", lambda *_: LIMITS)
    assert exit_code("run", "--rows", "nocache,native-packed", "--out", str(tmp_path / "r.json"), "--isl", "9",
                     "--osl", "3", "--prompts", "2") == 0
    assert seen == [[("liteinfer-nocache", 1, "latency"), ("liteinfer-nocache", 1, "throughput")]]
    assert "liteinfer-native-packed was not run: needs CUDA." in capsys.readouterr().out


def test_fewer_prompts_by_width_are_run_and_said(tiny: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "load", lambda *_: tiny)
    monkeypatch.setattr(machine, "limits", lambda *_: LIMITS)
    out = tmp_path / "r.json"
    assert exit_code("run", "--shape", "paper", "--rows", "eager,eager-b4,continuous", "--out", str(out), "--isl", "9",
                     "--osl", "3", "--prompts", "1=2,4=5,32=5") == 0
    prompts = {row["name"]: row["prompts"] for row in load(out)["rows"]}
    assert {name: (each["latency"], each["throughput"]) for name, each in prompts.items()} == {
        "liteinfer-eager": (2, 2), "liteinfer-eager-b4": (2, 5), "liteinfer-continuous": (2, 5)}
    words = " ".join(capsys.readouterr().out.split())
    assert ("2 latency, throughput 2 at width 1, 5 at width 4, 5 at width 32 (fewer than the 50 and 200 of the shape "
            "paper, for want of time)") in words


def test_asking_only_for_rows_that_cannot_run_is_an_error(no_packed: None, tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch,
                                                          capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "load", lambda *_: pytest.fail("a model was loaded for a command that cannot run"))
    assert exit_code("run", "--rows", "paged-triton", "--out", str(tmp_path / "r.json")) == 2
    assert capsys.readouterr().err == ("benchmarks: this machine can run none of the chosen rows: "
                                       "liteinfer-paged-triton needs CUDA\n")
    assert list(tmp_path.iterdir()) == []


def test_a_run_in_which_every_row_breaks_leaves_an_older_file_alone(tiny: LoadedModel, tmp_path: Path,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "r.json"
    out.write_text("older", encoding="utf-8")
    monkeypatch.setattr(command, "load", lambda *_: tiny)
    monkeypatch.setattr(machine, "limits", lambda *_: LIMITS)
    monkeypatch.setattr(Bench, "_turn", lambda self, record, round_: 1 / 0)
    assert exit_code("run", "--rows", "eager", "--out", str(out), "--isl", "9", "--osl", "3", "--prompts", "2") == 1
    assert out.read_text(encoding="utf-8") == "older"


def test_a_run_that_cannot_fit_the_model_is_refused(tiny: LoadedModel) -> None:
    limit = tiny.config.max_position_embeddings
    with pytest.raises(ValueError, match=rf"isl 6 \+ osl {limit} = {limit + 6} tokens is over the model's {limit}"):
        bench(tiny, shape=SMALL.override(osl=limit))
    with pytest.raises(ValueError, match="rounds must be at least 1, got 0"):
        bench(tiny, rounds=0)


def test_counters_that_change_between_rounds_stop_the_row(tiny: LoadedModel) -> None:
    drives: list[int] = []

    def drift(row: Row, request: Request) -> None:
        if request.request_id == "throughput-0":
            drives.append(1)
            if len(drives) == 2:
                request.prompt_token_ids.append(1)

    row, = bench(tiny, "eager", rounds=2, breaks=drift).run()["rows"]
    assert len(row["rounds"]) == 1 and row["stopped"].startswith("RuntimeError: the throughput pass counted")


def test_the_stored_copy_has_everything_but_the_timestamps(tiny: LoadedModel) -> None:
    result = bench(tiny, "eager").run()
    copy = without_raw(result)
    assert "raw" in result["rows"][0]["rounds"][0]
    assert set(copy["rows"][0]["rounds"][0]) == {"latency", "throughput", "linear_ms"}
    assert copy["rows"][0]["latency"] == result["rows"][0]["latency"] and set(copy) == set(result)


# ---- ceilings -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_counted_from_the_config(architecture: str, tied: bool) -> None:
    model = tiny_model(architecture, tie_word_embeddings=tied)
    sizes = ceilings.Sizes.of(model.config, model.dtype)
    kept = {name: w for name, w in model.weights().items() if not (tied and name == "lm_head.weight")}
    assert sizes.parameters == sum(w.numel() for w in kept.values())
    assert sizes.layer_linear == sum(w.numel() for name, w in kept.items() if name.endswith("_proj.weight"))


def test_the_mean_step_is_read_off_the_counters() -> None:
    isl, osl, n = 64, 24, 4
    without = {"forward_passes": n * osl, "tokens_computed": n * sum(isl + i for i in range(osl)), "kv_bytes_peak": 0}
    cached = {"forward_passes": n * osl, "tokens_computed": n * (isl + osl - 1), "kv_bytes_peak": 1}
    assert ceilings.mean_step(without, n, isl, osl) == ceilings.Step(76, 76, cached=False)
    assert ceilings.mean_step(cached, n, isl, osl) == ceilings.Step(1, 76, cached=True)
    assert ceilings.mean_step({"forward_passes": n, "tokens_computed": n * isl}, n, isl, 1) is None


SIZES = ceilings.Sizes(parameters=1200, layer_linear=1000, head=100, kv_per_token=8, pair_flops=16, itemsize=4)


def test_bytes_and_operations_of_a_step() -> None:
    one, whole = ceilings.Step(1, 10, cached=True), ceilings.Step(10, 10, cached=False)
    assert one.bytes(SIZES) == (1000 + 100 + 80) * 4
    assert one.flops(SIZES) == 2 * 1100 + 16 * 10
    assert whole.bytes(SIZES) == 1100 * 4
    assert whole.flops(SIZES) == 2 * (1000 * 10 + 100) + 16 * 55   # the causal triangle of 10


def test_a_batch_reads_the_weights_once_and_does_everything_else_for_each_sequence() -> None:
    one, eight = ceilings.Step(1, 10, cached=True), ceilings.Step(1, 10, cached=True, sequences=8)
    assert eight.bytes(SIZES) == (1000 + 100 + 8 * 80) * 4
    assert eight.flops(SIZES) == 8 * one.flops(SIZES) == 8 * (2 * 1100 + 16 * 10)


def test_at_the_turning_point_reading_takes_as_long_as_computing() -> None:
    box = {"bandwidth_gb_s": 2e-6, "peak_gflop_s": 10e-6}   # 2,000 bytes/s, 10,000 operations/s
    step = ceilings.Step(1, 10, cached=True)
    # reading takes 2.2 + 0.16 B seconds, computing 0.236 B
    assert ceilings.turning_point(step, SIZES, box) == pytest.approx(2.2 / (0.236 - 0.16))
    for width, bound in ((28, "bandwidth"), (29, "compute")):
        assert ceilings.allowed(ceilings.Step(1, 10, True, width), SIZES, box)[1] == bound
    assert ceilings.turning_point(step, SIZES, box | {"peak_gflop_s": 1.0}) is None


@pytest.mark.parametrize("name", ["native-packed", "eager"])
def test_the_linear_layers_of_a_batch_are_those_of_its_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the input of each product, counted instead of timed: the head has one per sequence."""
    model = tiny_model(vocab_size=97)   # as many outputs as no other layer has
    engine, linear = lineage.build(lineage.find(name), model), torch.nn.functional.linear
    seen: list[tuple[int, int]] = []

    def count(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        seen.append((x.shape[0], w.shape[0]))
        return linear(x, w, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", count)
    monkeypatch.setattr(ceilings, "timed", lambda run: run() or 0.0)
    ceilings.linear_ms(engine, model, 6, sequences=3, calls=1)
    assert {rows for rows, outputs in seen if outputs == 97} == {3}
    assert {rows for rows, outputs in seen if outputs != 97} == {6}


def test_the_larger_limit_binds() -> None:
    step = ceilings.Step(1, 10, cached=True)
    slow_memory = {"bandwidth_gb_s": 1e-6, "peak_gflop_s": 1.0}
    slow_arithmetic = {"bandwidth_gb_s": 1.0, "peak_gflop_s": 1e-6}
    assert ceilings.allowed(step, SIZES, slow_memory) == (pytest.approx(4.72), "bandwidth")
    assert ceilings.allowed(step, SIZES, slow_arithmetic) == (pytest.approx(2.36), "compute")


@pytest.mark.parametrize(("measured", "warned"), [(8000.0, False), (4720 / 1.04, False), (4720 / 1.06, True)])
def test_a_row_faster_than_its_ceiling_is_a_wrong_ceiling(measured: float, warned: bool) -> None:
    step, box = ceilings.Step(1, 10, cached=True), {"bandwidth_gb_s": 1e-6, "peak_gflop_s": 1.0}
    got = ceilings.report(step, SIZES, box, measured, 1000.0)
    assert got is not None
    assert got["ratio"] == pytest.approx(4720 / measured)   # never clamped
    assert got["rest_ms"] == measured - 1000.0
    assert got["note"].startswith("Warning:") == warned
    assert ceilings.report(None, SIZES, box, measured, 1.0) is None
    assert ceilings.report(step, SIZES, box, None, 1.0) is None


def test_a_row_s_own_linear_layers_are_timed(tiny: LoadedModel) -> None:
    result = bench(tiny, "eager,native-packed").run()
    for row in result["rows"]:
        assert row["ceiling"]["linear_ms"] > 0
        assert row["ceiling"]["tokens_per_step"] == 1
    assert "linear_path" not in result["rows"][0] and result["rows"][1]["linear_path"]


def test_the_forecast_gives_both_kinds_of_step() -> None:
    lines = ceilings.forecast(SIZES, {"bandwidth_gb_s": 1e-6, "peak_gflop_s": 1e-6}, isl=8, mean_osl=4)
    assert "one token" in lines[0] and "at least 4,720.0 ms (bandwidth)" in lines[0]
    assert "all 10 tokens" in lines[1] and "(compute)" in lines[1]


def test_the_best_path_wins_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "fastest", lambda call, budget: call())
    paths = [("slow", 10, lambda: 5.0), ("fast", 10, lambda: 2.0), ("large", 12, lambda: 4.0)]
    assert machine.best(paths) == (5, "fast")


def test_the_cpu_s_name_is_read_from_cpuinfo(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor : 0\nmodel\t\t: 1\nmodel name\t: AMD  EPYC 1\n", encoding="utf-8")
    assert machine.cpu_name(file) == "AMD EPYC 1"
    assert machine.cpu_name(tmp_path / "absent") != ""


# ---- time left ------------------------------------------------------------------------------------------------

def test_time_left_from_the_row_s_own_passes_or_else_from_all() -> None:
    stages = [(("a", 1, "latency"), 10), (("a", 1, "throughput"), 20), (("b", 1, "latency"), 10)]
    left = Remaining([*stages, *stages])
    assert left.seconds() is None
    left.done(("a", 1, "latency"), 5.0)                  # 0.5 s a token
    assert left.seconds() == pytest.approx(0.5 * (20 + 10 + 10 + 20 + 10))
    left.done(("a", 1, "throughput"), 40.0)              # 2 s a token: b is guessed at their mean
    assert left.seconds() == pytest.approx(1.25 * 10 + 5 + 40 + 1.25 * 10)
    left.drop("b", 1)
    assert left.seconds() == pytest.approx(45)


# ---- code hashes ----------------------------------------------------------------------------------------------

@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for folder in ("liteinfer", "benchmarks"):
        for file in (codehash.ROOT / folder).rglob("*.py"):
            target = tmp_path / file.relative_to(codehash.ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    for data in (codehash.TEXT, *codehash.DATA.values()):
        (tmp_path / data).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(codehash.ROOT / data, tmp_path / data)
    return tmp_path


def changed_by(root: Path, file: str, old: str, new: str) -> set[str]:
    """The rows of chapters 1 to 3 whose hash an edit changes."""
    rows = [row for row in LADDER if row.chapter <= 3]
    before = {row.name: codehash.row_hash(row, root) for row in rows}
    source = (root / file).read_text(encoding="utf-8")
    assert old in source
    (root / file).write_text(source.replace(old, new, 1), encoding="utf-8")
    return {row.name.removeprefix("liteinfer-") for row in rows if codehash.row_hash(row, root) != before[row.name]}


EVERY = {"nocache", "eager", "native-eager", "native-packed"}
NATIVE = {"native-eager", "native-packed"}


@pytest.mark.parametrize(("file", "old", "new", "rows"), [
    ("liteinfer/sampling.py", "return int(logits.argmax())", "return int(logits.argmin())", EVERY),
    ("liteinfer/loading.py", "import torch\n", "import torch\nimport math\n", EVERY),
    ("liteinfer/engines/no_cache.py", "tokens_computed += ", "tokens_computed -= ", {"nocache"}),
    ("liteinfer/engines/dynamic_cache.py", "self.cache = None", "self.cache = 0", {"eager"}),
    ("liteinfer/model/rope.py", "dim=-1", "dim=-2", NATIVE),
    ("benchmarks/loop.py", "now = clock()", "now = clock() + 1", EVERY),
    ("benchmarks/data/prose.txt", "The", "A", EVERY),
    ("benchmarks/progress.py", "minutes, rest = divmod(round(seconds), 60)", "minutes, rest = 0, 1", set()),
    ("liteinfer/lineage.py", "class Row:", "class Row:\n    extra = 1", set()),
])
def test_an_edit_changes_the_hash_of_the_rows_that_run_it(repository: Path, file: str, old: str, new: str,
                                                          rows: set[str]) -> None:
    assert changed_by(repository, file, old, new) == rows


def test_comments_layout_and_docstrings_change_no_hash(repository: Path) -> None:
    assert changed_by(repository, "liteinfer/sampling.py", '"""From a row', '"""Out of a row') == set()
    assert changed_by(repository, "liteinfer/sampling.py", "import torch\n", "import torch   # torch\n\n\n") == set()


@pytest.mark.parametrize(("file", "old", "new", "rows"), [
    ("liteinfer/speculative/draft_model.py", "self.counters = Counters()", "self.counters = None", {"speculative"}),
    ("liteinfer/speculative/drafter.py", "drafted >= self.after", "drafted > self.after", {"ngram", "speculative"}),
])
def test_what_drafts_is_part_of_the_hash_of_a_row_that_is_given_one(repository: Path, file: str, old: str, new: str,
                                                                    rows: set[str]) -> None:
    names = ("radix", "ngram", "speculative")
    before = {name: codehash.row_hash(lineage.find(name), repository) for name in names}
    source = (repository / file).read_text(encoding="utf-8")
    assert old in source
    (repository / file).write_text(source.replace(old, new, 1), encoding="utf-8")
    assert {name for name in names if codehash.row_hash(lineage.find(name), repository) != before[name]} == rows


def test_the_row_s_own_entry_is_part_of_its_hash() -> None:
    row = LADDER[2]
    other = Row(row.name, row.chapter, row.engine, "other words", row.improves_on, widths=row.widths, parts=row.parts)
    packed = Row(row.name, row.chapter, row.engine, row.what, widths=row.widths, parts=LADDER[3].parts)
    assert codehash.row_hash(other) == codehash.row_hash(row) != codehash.row_hash(packed)


def test_imports_inside_functions_count_and_closures_stay_in_the_package(repository: Path) -> None:
    (repository / "liteinfer/late.py").write_text("LATE = 1\n", encoding="utf-8")
    (repository / "liteinfer/early.py").write_text(
        "import torch\nfrom benchmarks import report, loop\ndef f():\n    from liteinfer import late, lineage\n",
        encoding="utf-8")
    files = [file.relative_to(repository).as_posix() for file in codehash.closure(["liteinfer.early"], repository)]
    assert files == ["benchmarks/loop.py", "liteinfer/early.py", "liteinfer/late.py"]


@pytest.mark.parametrize(("file", "old", "new", "kinds"), [
    ("liteinfer/cache/paged.py", "class PagedCache:\n", "class PagedCache:   # pages\n", set()),
    ("liteinfer/cache/block_pool.py", "self.free_list.pop()", "self.free_list.pop(0)",
     {"kv_memory", "overhead", "speculative", "heads", "profile"}),
    ("liteinfer/cache/contiguous.py", "torch.empty(shape", "torch.zeros(shape",
     {"kv_memory", "overhead", "speculative", "heads", "profile"}),
    ("benchmarks/memory.py", "MAX_MODEL_LEN = 2048", "MAX_MODEL_LEN = 4096", {"kv_memory"}),
    ("benchmarks/workloads.py", "GOLDEN = (5**0.5 - 1) / 2", "GOLDEN = 0.5",
     {"kv_memory", "widths", "radix", "sharing", "overhead", "speculative", "heads", "pieces", "profile", "shapes"}),
    ("benchmarks/run.py", "gc.freeze()", "gc.collect()",
     {"widths", "radix", "sharing", "overhead", "speculative", "heads", "pieces", "profile", "shapes"}),
    ("benchmarks/pieces.py", '"runner": "liteinfer.runner:Runner"', '"runner": "liteinfer.runner:R"', {"pieces"}),
    ("benchmarks/profile.py", "WARMUP = 4", "WARMUP = 5", {"profile"}),
    ("benchmarks/shapes.py", "WARMUP_ISL = 64", "WARMUP_ISL = 32", {"shapes"}),
    ("benchmarks/profile_tables.py", "Profile: ", "Split: ", set()),
    ("benchmarks/shape_tables.py", "Across shapes: ", "Shapes: ", set()),
    ("benchmarks/widths.py", 'PASS = "throughput"', 'PASS = "latency"', {"widths", "pieces"}),
    ("benchmarks/radix.py", "max_tokens=1", "max_tokens=2", {"radix", "sharing", "overhead", "speculative"}),
    ("benchmarks/sharing.py", "WARMUP = (4, 32, 4)", "WARMUP = (4, 32, 5)", {"sharing"}),
    ("benchmarks/scenarios.py", "header: int = 256", "header: int = 128", {"sharing"}),
    ("benchmarks/stopwatch.py", "self.seconds += ", "self.seconds -= ", {"sharing", "overhead", "heads"}),
    ("benchmarks/overhead.py", "MICRO = 1e6", "MICRO = 1e3", {"overhead"}),
    ("benchmarks/ceilings.py", "NEVER_ABOVE = 1.05", "NEVER_ABOVE = 1.5", {"widths", "profile"}),
    ("benchmarks/heads.py", "ISL, OSL, WARMUP = 64", "ISL, OSL, WARMUP = 65", {"heads"}),
    ("liteinfer/speculative/early_exit.py", "early.layers = ", "early.layers += ", {"speculative"}),
    ("liteinfer/speculative/verify.py", "return guess", "return guess + 1", {"speculative", "heads"}),
    ("benchmarks/speculative.py", "WARMUP = (16, 8)", "WARMUP = (16, 9)", {"speculative"}),
    ("benchmarks/speculative_cases.py", "traces: list[Trace]", "traces: tuple[Trace]", {"speculative"}),
    ("benchmarks/repetition.py", "LEAST_REPEATS = 3", "LEAST_REPEATS = 4", {"speculative"}),
    ("benchmarks/chats.py", "chats[:limit]", "chats[limit:]", {"speculative"}),
    ("benchmarks/drafts.py", "int(number)", "int(number) + 1", {"speculative"}),
    ("benchmarks/data/speculative.json", "merge_intervals", "join_intervals", {"speculative"}),
    ("benchmarks/draft_tables.py", "Loops: ", "Rings: ", set()),
    ("benchmarks/kinds.py", "Waste: ", "Lost: ", set()),
    ("benchmarks/prefix_tables.py", "Radix: ", "Tree: ", set()),
])
def test_an_edit_changes_the_hash_of_the_kinds_that_run_it(repository: Path, file: str, old: str, new: str,
                                                           kinds: set[str]) -> None:
    before = {kind: codehash.kind_hash(kind, repository) for kind in codehash.KINDS}
    source = (repository / file).read_text(encoding="utf-8")
    assert old in source
    (repository / file).write_text(source.replace(old, new, 1), encoding="utf-8")
    assert {kind for kind in before if codehash.kind_hash(kind, repository) != before[kind]} == kinds


def test_the_total_does_not_depend_on_order() -> None:
    assert codehash.total_hash(["a", "b"]) == codehash.total_hash(["b", "a"]) != codehash.total_hash(["a"])


# ---- the command ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("arguments", "named"), [
    (["run", "--rows", "nocache,fastest"], "unknown row 'fastest'"),
    (["run", "--shape", "huge"], "unknown shape 'huge'"),
    (["run", "--isl", "0"], "isl must be at least 1, got 0"),
    (["run", "--osl", "-3"], "osl must be at least 1, got -3"),
    (["run", "--prompts", "0"], "prompts must be at least 1, got 0"),
    (["run", "--prompts", "many"], "prompts must be a number, or numbers by width as in 1=2,32=64, got 'many'"),
    (["run", "--prompts", "1=2,4"], "prompts must be a number, or numbers by width as in 1=2,32=64, got '1=2,4'"),
    (["run", "--prompts", "1=2,1=3"], "prompts must name each width once, and widths and numbers of at least 1"),
    (["run", "--prompts", "1=0"], "widths and numbers of at least 1, got '1=0'"),
    (["run", "--rounds", "0"], "rounds must be at least 1, got 0"),
    (["run", "--rows", "eager", "--width", "7"], "width 7: none of the chosen rows has it"),
    (["run", "--rows", "eager", "--out", "."], "cannot be written"),
    (["run", "--rows", "eager", "--draft", "ngram"], "draft 'ngram' is given, but none of the chosen rows needs a "
                                                     "draft model"),
    (["run", "--draft", "early-exit:x"], "early-exit needs a number of layers"),
    pytest.param(["run", "--rows", "paged-triton"], "none of the chosen rows: liteinfer-paged-triton needs CUDA",
                 marks=pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here, and the row runs")),
    (["memory", "--isl", "1", "--out", "."], "cannot be written"),
    (["widths", "--rows", "fastest"], "unknown row 'fastest'"),
    (["widths", "--rows", "paged"], "liteinfer-paged runs one request at a time; a width curve is there for"),
    (["widths", "--widths", "1,x"], "widths must be whole numbers separated by commas, got '1,x'"),
    (["widths", "--widths", "0,1"], "widths must be at least 1, got 0, 1"),
    (["widths", "--osl", "1"], "osl must be at least 2 to have a step after the first, got 1"),
    (["widths", "--isl", "0"], "isl must be at least 1, got 0"),
    (["widths", "--rounds", "0"], "rounds must be at least 1, got 0"),
    (["report", "absent.json"], "absent.json"),
    (["store", "absent.json", "copy.json"], "absent.json"),
])
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], named: str, tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "load", lambda *_: pytest.fail("a model was loaded for a command that cannot run"))
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    captured = capsys.readouterr()
    assert stopped.value.code == 2
    assert captured.err.count("\n") == 1 and named in captured.err and captured.out == ""
    assert list(tmp_path.iterdir()) == []


def exit_code(*arguments: str) -> object:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    return stopped.value.code


def test_list_shows_rows_and_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("list") == 0
    out = capsys.readouterr().out
    assert all(row.name in out for row in LADDER) and all(shape in out for shape in SHAPES)


def test_run_report_and_store_end_to_end(tiny: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "load", lambda *_: tiny)
    monkeypatch.setattr(machine, "limits", lambda *_: LIMITS)
    out, copy = tmp_path / "r.json", tmp_path / "copy.json"
    assert exit_code("run", "--rows", "native-packed,nocache", "--out", str(out), "--isl", "9", "--osl", "3",
                     "--prompts", "2") == 0
    printed = capsys.readouterr()
    before, after = printed.out.index("ceiling of a step"), printed.out.index("liteinfer-nocache")
    assert before < after and "reads 9.0 GB/s (sum), computes 90 GFLOP/s" in printed.out
    assert len([line for line in printed.err.splitlines() if "latency:" in line or "throughput:" in line]) == 4
    stored = json.loads(out.read_text(encoding="utf-8"))
    assert [row["name"] for row in stored["rows"]] == ["liteinfer-nocache", "liteinfer-native-packed"]
    assert (stored["workload"]["isl"], stored["workload"]["osl"]) == (9, 3)
    assert exit_code("store", str(out), str(copy)) == 0
    assert "raw" not in copy.read_text(encoding="utf-8")
    assert exit_code("report", str(copy), "--markdown") == 0
    assert "liteinfer-native-packed" in capsys.readouterr().out


