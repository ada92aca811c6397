"""The KV memory table and the width curve: counted on live caches, and timed by a clock that a script moves."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import __main__ as cli
from benchmarks import ceilings, command, machine, workloads
from benchmarks.memory import BLOCK_SIZES, MAX_MODEL_LEN, OUTPUTS, WIDTH, Memory
from benchmarks.progress import Show
from benchmarks.render import render
from benchmarks.report import markdown, print_tables
from benchmarks.result_file import load, without_raw
from benchmarks.widths import Curve, batched, shape_of
from benchmarks.workloads import SHAPES, Shape
from liteinfer import lineage
from liteinfer.cache.block_pool import BlockPool, OutOfBlocks
from liteinfer.cache.paged import PagedCache
from liteinfer.engines.base import run
from liteinfer.lineage import Row
from liteinfer.loading import LoadedModel, tiny_model
from liteinfer.request import Counters, Request, SamplingParams, TokenEvent
from tests.conftest import build
from tests.results import no_hash

ROOT = Path(__file__).parent.parent
TOKEN = 2 * 2 * 2 * 8 * 8   # bytes per token of the tiny model: keys and values, layers, heads, head size, float64
LIMITS = {"bandwidth_gb_s": 20e-3, "bandwidth_path": "sum", "peak_gflop_s": 20e-3}
SMALL = Shape("ragged", isl=6, output=(2, 9), latency_prompts=1, throughput_prompts={1: 40})


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return tiny_model()


def memory(model: LoadedModel, isl: int = 1, block_size: int = 16, blocks: int = 2048) -> Memory:
    """With a budget of so many blocks."""
    return Memory(model.config, model.dtype, model.device, isl, block_size, blocks * block_size * TOKEN)


# ---- KV memory ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("output", "isl", "block_size", "stored", "blocks"), [
    (48, 1, 16, 48, 3), (49, 1, 16, 49, 4), (1, 1, 16, 1, 1), (48, 10, 16, 57, 4), (5, 1, 1, 5, 5), (9, 8, 4, 16, 4)])
def test_a_stream_holds_the_blocks_it_has_grown_into(tiny: LoadedModel, output: int, isl: int, block_size: int,
                                                     stored: int, blocks: int) -> None:
    line = memory(tiny, isl, block_size).length(output)
    assert (line["output"], line["stored"], line["blocks"]) == (output, stored, blocks)
    assert line["paged_bytes"] == blocks * block_size * TOKEN
    assert line["contiguous_bytes"] == MAX_MODEL_LEN * TOKEN
    assert line["saved"] == pytest.approx(1 - blocks * block_size / MAX_MODEL_LEN)


@pytest.mark.parametrize(("output", "blocks", "streams"), [(48, 3, 1), (48, 8, 2), (48, 9, 3), (1, 9, 9), (160, 9, 0)])
def test_streams_are_admitted_until_the_pool_refuses(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch, output: int,
                                                     blocks: int, streams: int) -> None:
    refused: list[int] = []
    allocate = BlockPool.allocate

    def spy(pool: BlockPool, n: int) -> list[int]:
        try:
            return allocate(pool, n)
        except OutOfBlocks:
            refused.append(pool.num_used)
            raise

    monkeypatch.setattr(BlockPool, "allocate", spy)
    assert memory(tiny, blocks=blocks).length(output)["streams_paged"] == streams
    assert refused == [streams * -(-output // 16)]


@pytest.mark.parametrize(("budget", "slots"), [(MAX_MODEL_LEN * TOKEN, 1), (2 * MAX_MODEL_LEN * TOKEN - 1, 1),
                                               (2 * MAX_MODEL_LEN * TOKEN, 2), (MAX_MODEL_LEN * TOKEN - 1, 0)])
def test_a_budget_holds_whole_contiguous_slots(tiny: LoadedModel, budget: int, slots: int) -> None:
    caches = Memory(tiny.config, tiny.dtype, tiny.device, budget_bytes=budget)
    assert caches.length(48)["streams_contiguous"] == slots
    assert budget < caches.contiguous(slots + 1).nbytes and (not slots or caches.contiguous(slots).nbytes <= budget)


def test_a_cache_that_takes_a_block_too_many_is_found_out(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPool, "blocks_for", lambda pool, tokens: tokens // pool.block_size + 1)
    with pytest.raises((AssertionError, OutOfBlocks)):
        memory(tiny).grown(32)


def slots(shape: Shape, prompts: int, block_size: int) -> tuple[int, int]:
    """Held and empty slots by the formula: at step t of a sequence isl + t - 1 tokens are stored."""
    stored = [shape.isl + t for i in range(prompts) for t in range(shape.output_length(i))]
    held = sum(-(-tokens // block_size) * block_size for tokens in stored)
    return held, held - sum(stored)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_the_waste_is_what_the_engine_counts(tiny: LoadedModel, block_size: int) -> None:
    line = memory(tiny).waste(SMALL, 40, block_size)
    assert (line["held_slots"], line["tail_slots"]) == slots(SMALL, 40, block_size)
    assert line["waste"] == line["tail_slots"] / line["held_slots"]
    engine = build("paged-b32", tiny, num_blocks=32 * 16, block_size=block_size)
    requests = [Request(str(i), [1 + i % 7] * SMALL.isl, SamplingParams(max_tokens=SMALL.output_length(i)))
                for i in range(40)]
    assert not [event.error for event in run(engine, requests) if event.error]
    assert (engine.counters.held_slots, engine.counters.tail_slots) == (line["held_slots"], line["tail_slots"])


def test_the_waste_at_the_end_is_of_the_last_pass_of_each_sequence(tiny: LoadedModel) -> None:
    ends = [SMALL.isl + SMALL.output_length(i) - 1 for i in range(40)]
    held = sum(-(-tokens // 8) * 8 for tokens in ends)
    assert memory(tiny).waste(SMALL, 40, 8)["waste_at_end"] == pytest.approx((held - sum(ends)) / held)


def test_the_shipped_workload_wastes_less_than_the_target(tiny: LoadedModel) -> None:
    ragged = SHAPES["ragged"]
    assert ragged.prompts_at(WIDTH) == 128
    line = memory(tiny).waste(ragged, 128, 16)
    assert (line["held_slots"], line["tail_slots"]) == slots(ragged, 128, 16)
    assert line["waste_at_end"] < line["waste"] < 0.038


@pytest.mark.parametrize(("settings", "length", "message"), [
    ({"isl": 0}, 48, "isl must be at least 1, got 0"),
    ({"block_size": 12}, 48, "block_size must be a power of two from 1, got 12"),
    ({"blocks": 0}, 48, "a budget of 0 bytes holds no block: 16 tokens take 8,192"),
    ({}, 0, "osl must be at least 1, got 0"),
    ({"isl": 2000}, 50, "isl 2000 + osl 50 stores 2049 tokens, a contiguous slot has 2048"),
])
def test_what_no_cache_can_be_is_one_line(tiny: LoadedModel, settings: dict[str, int], length: int,
                                          message: str) -> None:
    with pytest.raises(ValueError) as error:
        memory(tiny, **settings).length(length)
    assert str(error.value) == message


def test_pages_that_the_machine_cannot_have_are_one_line(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory\nmore lines")

    caches = memory(tiny)
    monkeypatch.setattr(PagedCache, "__init__", refuse)
    with pytest.raises(ValueError, match=r"^7 blocks of 16 tokens cannot be allocated on this machine: D.*memory$"):
        caches.paged(7, 16)


def exit_code(*arguments: str) -> object:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    return stopped.value.code


@pytest.fixture
def prepared(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command over the tiny model, a short workload and limits that are not measured."""
    monkeypatch.setattr(command, "load", lambda *_: tiny)
    monkeypatch.setattr(machine, "limits", lambda *_: LIMITS)
    monkeypatch.setattr(workloads, "SHAPES", {"ragged": SMALL})


def test_memory_report_and_store_end_to_end(prepared: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, copied = tmp_path / "memory.json", tmp_path / "copy.json"
    assert exit_code("memory", "--osl", "100", "--budget-gib", "0.01", "--block-size", "8", "--out", str(out)) == 0
    assert "KV memory" in (printed := capsys.readouterr().out) and "block size" in " ".join(printed.split())
    result = load(out)
    assert result["kind"] == "kv_memory" and result["model"]["kv_bytes_per_token"] == TOKEN
    assert (result["isl"], result["block_size"], result["max_model_len"]) == (1, 8, 2048)
    assert result["budget_bytes"] == int(0.01 * 2**30)
    assert [line["output"] for line in result["lengths"]] == sorted({*OUTPUTS, 100})
    assert [line["block_size"] for line in result["waste"]["by_block_size"]] == list(BLOCK_SIZES)
    assert {key: result["waste"][key] for key in ("shape", "prompts", "isl", "osl")} == {
        "shape": "ragged", "prompts": 40, "isl": 6, "osl": "2..9"}
    assert exit_code("store", str(out), str(copied)) == 0
    assert copied.read_text() == out.read_text()
    assert exit_code("report", str(copied), "--markdown") == 0
    assert "| 100 | 100 | 13 |" in capsys.readouterr().out


def test_a_long_prompt_leaves_out_the_usual_lengths_that_do_not_fit(prepared: None, tmp_path: Path,
                                                                    capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "memory.json"
    assert exit_code("memory", "--isl", "1500", "--osl", "100", "--budget-gib", "0.01", "--out", str(out)) == 0
    assert [line["output"] for line in load(out)["lengths"]] == [48, 100, 256]
    capsys.readouterr()
    for arguments, message in ((("--isl", "2048"), "isl 2048 + osl 48 stores 2095 tokens"),
                               (("--osl", "3000", "--budget-gib", "0.01"), "isl 1 + osl 3000 stores 3000 tokens"),
                               (("--budget-gib", "0"), "a budget of 0 bytes holds no block"),
                               (("--block-size", "12"), "block_size must be a power of two from 1, got 12")):
        assert exit_code("memory", *arguments, "--out", str(tmp_path / "not.json")) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"benchmarks: {message}") and error.count("\n") == 1
        assert not (tmp_path / "not.json").exists()


def test_the_stored_result_is_what_its_formulas_say() -> None:
    """The committed file, recomputed without caches from the model's bytes per token and the workload's lengths."""
    result, ragged = load(ROOT / "benchmarks/results/memory.json"), SHAPES["ragged"]
    token, size = result["model"]["kv_bytes_per_token"], result["block_size"]
    for line in result["lengths"]:
        blocks = -(-line["stored"] // size)
        assert line["stored"] == result["isl"] + line["output"] - 1
        assert (line["blocks"], line["paged_bytes"]) == (blocks, blocks * size * token)
        assert line["contiguous_bytes"] == result["max_model_len"] * token
        assert line["streams_paged"] == result["budget_bytes"] // (size * token) // blocks
        assert line["streams_contiguous"] == result["budget_bytes"] // line["contiguous_bytes"]
    for line in result["waste"]["by_block_size"]:
        assert (line["held_slots"], line["tail_slots"]) == slots(ragged, 128, line["block_size"])
    assert [line["block_size"] for line in result["waste"]["by_block_size"]] == list(BLOCK_SIZES)


# ---- the width curve ------------------------------------------------------------------------------------------

class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Metronome:
    """An engine whose first step takes a second and whose others take `beat` seconds: one token for each request."""

    linear_path = "scripted"

    def __init__(self, clock: Clock, beat: float) -> None:
        self.clock, self.beat, self.running = clock, beat, list[Request]()
        self.counters = Counters()

    def add(self, request: Request) -> None:
        self.running.append(request)

    def step(self) -> list[TokenEvent]:
        first = not self.running[0].output_token_ids
        slow = 7.0 if self.running[0].request_id.startswith("warmup") else 1.0
        self.clock.now += slow if first or slow > 1 else self.beat
        events = [TokenEvent(r.request_id, (1,), finish_reason=r.append(1, ())) for r in self.running]
        self.running = [r for r, event in zip(self.running, events, strict=True) if event.finish_reason is None]
        return events

    def has_unfinished(self) -> bool:
        return bool(self.running)


class Quiet:
    """A watch that remembers."""

    def __init__(self) -> None:
        self.lines: list[tuple[Any, ...]] = []

    def passed(self, name: str, width: int, round_: int, what: str, headline: float | None) -> None:
        self.lines.append((name.removeprefix("liteinfer-"), width, round_, headline))

    def stopped(self, name: str, width: int, reason: str) -> None:
        self.lines.append((name.removeprefix("liteinfer-"), width, reason))


Beat = Callable[[str, int, int], float]   # row, width, how many engines of this point were built before -> seconds


def curve(model: LoadedModel, beat: Beat, rounds: int = 1, widths: tuple[int, ...] = (1, 2, 4),
          rows: str = "paged-b32,native-eager-b4", out: Path | None = None,
          built: list[tuple[str, int]] | None = None, settings_seen: list[dict[str, int]] | None = None) -> Curve:
    clock, seen = Clock(), [] if built is None else built

    def make(row: Row, model: LoadedModel, **settings: int) -> Metronome:
        name, width = row.name.removeprefix("liteinfer-"), settings["max_num_seqs"]
        if settings_seen is not None:
            settings_seen.append(settings)
        engine = Metronome(clock, beat(name, width, seen.count((name, width))))
        seen.append((name, width))
        return engine

    return Curve(model, batched(rows), widths, shape_of(8, 4, widths), rounds, LIMITS, Quiet(), out, make, clock,
                 lambda engine, model, tokens, sequences: 1000.0 * tokens + sequences)


def test_a_point_is_the_gap_between_steps_and_the_tokens_it_yields(tiny: LoadedModel) -> None:
    result = curve(tiny, lambda name, width, _: 0.010 + 0.001 * width).run()
    assert [row["name"] for row in result["rows"]] == ["liteinfer-native-eager-b4", "liteinfer-paged-b32"]
    for row in result["rows"]:
        assert row["linear_path"] == "scripted"
        assert [point["width"] for point in row["widths"]] == [1, 2, 4]
        for point in row["widths"]:   # neither the first step nor the warm-up is in it
            assert point["itl_p50_ms"] == pytest.approx(10 + point["width"])
            assert point["tok_s"] == pytest.approx(1000 * point["width"] / (10 + point["width"]))
            assert point["linear_ms"] == 1001 * point["width"]
            assert len(point["rounds"][0]["raw"]) == point["width"]


def test_the_ceiling_of_a_point_is_that_of_its_batch(tiny: LoadedModel) -> None:
    result = curve(tiny, lambda *_: 0.01).run()
    sizes = ceilings.Sizes.of(tiny.config, tiny.dtype)
    for point in result["rows"][0]["widths"]:
        seconds, bound = ceilings.allowed(ceilings.Step(1, 8 + 4 / 2, True, point["width"]), sizes, LIMITS)
        assert (point["ceiling_ms"], point["bound"]) == (seconds * 1000, bound)
    point = result["turning_point"]
    step = ceilings.Step(1, 10, cached=True)
    weights, each = (step.bytes(sizes) - 10 * TOKEN) / 20e6, step.flops(sizes) / 20e6 - 10 * TOKEN / 20e6
    assert point == pytest.approx(weights / each) and 1 < point < 100


def test_over_rounds_the_median_with_the_least_and_the_most(tiny: LoadedModel) -> None:
    result = curve(tiny, lambda name, width, before: (0.030, 0.010, 0.020)[before], rounds=3).run()
    for row in result["rows"]:
        for point in row["widths"]:
            assert point["itl_p50_ms"] == pytest.approx(20)
            assert point["itl_range"] == pytest.approx([10, 30])
            assert point["tok_s"] == pytest.approx(50 * point["width"])


def test_points_take_turns_and_another_begins_each_round(tiny: LoadedModel) -> None:
    built: list[tuple[str, int]] = []
    curve(tiny, lambda *_: 0.01, rounds=2, widths=(1, 2), built=built).run()
    order = [("native-eager-b4", 1), ("native-eager-b4", 2), ("paged-b32", 1), ("paged-b32", 2)]
    assert built == [*order, *order[1:], order[0]]


def test_engines_are_built_as_wide_and_as_small_as_the_point_needs(tiny: LoadedModel) -> None:
    seen: list[dict[str, int]] = []
    curve(tiny, lambda *_: 0.01, widths=(2,), settings_seen=seen).run()
    assert seen == [{"max_num_seqs": 2, "max_model_len": 12},
                    {"max_num_seqs": 2, "max_model_len": 12, "block_size": 16, "num_blocks": 2}]


def test_an_exception_costs_its_point_only(tiny: LoadedModel) -> None:
    def crash(name: str, width: int, before: int) -> float:
        if name == "paged-b32" and width == 2:
            raise MemoryError("no\nroom")
        return 0.01

    run_ = curve(tiny, crash, rounds=2)
    result = run_.run()
    assert [[point["width"] for point in row["widths"]] for row in result["rows"]] == [[1, 2, 4], [1, 4]]
    assert result["skipped"] == [{"name": "liteinfer-paged-b32", "width": 2, "reason": "MemoryError: no room"}]
    assert run_.watch.lines.count(("paged-b32", 2, "MemoryError: no room")) == 1
    assert "liteinfer-paged-b32 was not run: MemoryError: no room." in markdown([result], ("widths",), no_hash)


def test_a_request_that_fails_is_no_measurement(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(engine: Metronome, request: Request) -> None:
        raise ValueError("no room")

    monkeypatch.setattr(Metronome, "add", refuse)
    result = curve(tiny, lambda *_: 0.01, widths=(1,), rows="paged-b4").run()
    assert result["rows"] == []
    assert result["skipped"][0]["reason"] == "RuntimeError: throughput-0: ValueError: no room"


def test_ctrl_c_keeps_what_finished(tiny: LoadedModel, tmp_path: Path) -> None:
    def stop(name: str, width: int, before: int) -> float:
        if (name, width) == ("native-eager-b4", 4):
            raise KeyboardInterrupt
        return 0.01

    out = tmp_path / "widths.json"
    result = curve(tiny, stop, rounds=2, out=out).run()
    assert [[point["width"] for point in row["widths"]] for row in result["rows"]] == [[1, 2]]
    assert result["interrupted"] is True and {**load(out), "source": None} == {**result, "source": None}
    assert "The run was interrupted" in markdown([result], ("widths",), no_hash)


def test_nothing_measured_writes_nothing(tiny: LoadedModel, tmp_path: Path) -> None:
    out = tmp_path / "widths.json"
    curve(tiny, lambda *_: 1 / 0, out=out).run()
    assert not out.exists()


def test_sequences_that_the_model_cannot_hold_are_refused(tiny: LoadedModel) -> None:
    with pytest.raises(ValueError, match=r"isl 510 \+ osl 4 = 514 tokens is over the model's 512"):
        Curve(tiny, batched("paged-b4"), (1,), shape_of(510, 4, (1,)), 1, LIMITS, Quiet())


def test_a_row_that_this_machine_cannot_run_has_no_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineage, "missing", lambda row: "needs CUDA")
    with pytest.raises(ValueError, match="this machine cannot run liteinfer-paged-b4: it needs CUDA"):
        batched("paged-b4")


def test_widths_report_and_store_end_to_end(prepared: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Over the real engines."""
    out, copied = tmp_path / "widths.json", tmp_path / "copy.json"
    assert exit_code("widths", "--widths", "3,1,1", "--rounds", "2", "--isl", "9", "--osl", "3", "--out", str(out)) == 0
    printed = capsys.readouterr()
    assert printed.out.index("bound by reading up to") < printed.out.index("Widths")
    assert len([line for line in printed.err.splitlines() if line.startswith("round ")]) == 8
    result = load(out)
    assert (result["kind"], result["isl"], result["osl"], result["rounds"]) == ("widths", 9, 3, 2)
    assert [row["name"] for row in result["rows"]] == ["liteinfer-native-eager-b4", "liteinfer-paged-b32"]
    for row in result["rows"]:
        assert [point["width"] for point in row["widths"]] == [1, 3]
        assert all(point["itl_range"][0] > 0 and point["linear_ms"] > 0 for point in row["widths"])
        assert [len(trace["token_ids"]) for trace in row["widths"][1]["rounds"][0]["raw"]] == [3, 3, 3]
    assert result["skipped"] == []
    assert exit_code("store", str(out), str(copied)) == 0
    assert load(copied) == {**without_raw(result), "source": "copy"} and '"raw"' not in copied.read_text()
    assert exit_code("report", str(copied), "--markdown") == 0
    assert capsys.readouterr().out.count("| liteinfer-paged-b32 |") == 2


def test_the_progress_bar_takes_the_curve_s_passes(tiny: LoadedModel) -> None:
    console = Console(file=io.StringIO(), width=200)
    run_ = curve(tiny, lambda *_: 0.01, widths=(2,), rows="paged-b4")
    with Show(console, [(("liteinfer-paged-b4", 2, "throughput"), 8)], 1) as watch:
        run_.watch = watch
        run_.run()
        assert watch.remaining.ahead == []
    assert "liteinfer-paged-b4 (width 2) throughput: 200.0 tok/s" in console.file.getvalue()


# ---- the tables -----------------------------------------------------------------------------------------------

HEAD: dict[str, Any] = {
    "schema": 1, "date": "2026-12-01", "versions": {"torch": "2.13.0"}, "code_hash": "aaaa",
    "machine": {"name": "Toy CPU", "threads": 2, "bandwidth_gb_s": 18.04, "peak_gflop_s": 120.0},
    "model": {"name": "toy", "parameters": 134515008, "dtype": "float32", "kv_bytes_per_token": 46080}}
KV_MEMORY = HEAD | {
    "kind": "kv_memory", "isl": 1, "block_size": 16, "max_model_len": 2048, "budget_bytes": 2**30,
    "lengths": [{"output": 1024, "stored": 1024, "blocks": 64, "contiguous_bytes": 94371840, "paged_bytes": 47185920,
                 "saved": 0.5, "streams_contiguous": 11, "streams_paged": 22}],
    "waste": {"shape": "ragged", "prompts": 128, "isl": 128, "osl": "16..256", "by_block_size": [
        {"block_size": 16, "held_slots": 3805760, "tail_slots": 131132, "waste": 0.03446, "waste_at_end": 0.0271}]}}
WIDTHS = HEAD | {
    "kind": "widths", "isl": 128, "osl": 16, "rounds": 3, "turning_point": 21.84, "skipped": [],
    "rows": [{"name": "liteinfer-paged-b32", "linear_path": "oneDNN packed", "code_hash": "bbbb", "widths": [
        {"width": 1, "itl_p50_ms": 80.0, "itl_range": [75.0, 90.0], "tok_s": 12.5, "ceiling_ms": 30.0,
         "bound": "bandwidth", "linear_ms": 60.0},
        {"width": 32, "itl_p50_ms": 200.0, "itl_range": [190.0, 210.0], "tok_s": 160.0, "ceiling_ms": 50.0,
         "bound": "compute", "linear_ms": 150.0}]}]}


def test_the_memory_tables() -> None:
    assert markdown([KV_MEMORY], current=no_hash) == """\
toy (134.5 M parameters, float32) · ISL 1 · Toy CPU, 2 threads · 2026-12-01 · torch 2.13.0

**KV memory: bytes of one stream, and streams in a budget**

| output tokens | tokens stored | blocks | contiguous | paged | saved | streams contiguous | streams paged |
|--:|--:|--:|--:|--:|--:|--:|--:|
| 1,024 | 1,024 | 64 | 94.4 MB | 47.2 MB | 50.0% | 11 | 22 |

A stream has a prompt of 1 and stores all but its last token: contiguous in a slot of 2,048, paged in blocks of 16. \
Streams: how many 1 GiB holds at once.

**Waste: token slots held and empty, by block size**

| block size | slots held | slots empty | waste | waste at end |
|--:|--:|--:|--:|--:|
| 16 | 3,805,760 | 131,132 | 3.4% | 2.7% |

The 128 prompts of the shape ragged (ISL 128, OSL 16..256). Slots are summed over all passes; waste at end: at the \
last pass of each sequence.
"""


def test_the_width_table() -> None:
    assert markdown([WIDTHS], current=no_hash) == """\
toy (134.5 M parameters, float32) · ISL 128 · OSL 16 · Toy CPU, 2 threads · 2026-12-01, 3 rounds · torch 2.13.0

**Widths: sequences decoded together**

| row | width | ITL p50 ms | tok/s | vs least width | ceiling ms | bound | ceiling/measured | linear layers ms |
|:--|--:|--:|--:|--:|--:|:--|--:|--:|
| liteinfer-paged-b32 | 1 | 80.0 (75.0..90.0) | 12.5 | 1.00x | 30.0 | bandwidth | 0.38 | 60.0 |
| liteinfer-paged-b32 | 32 | 200.0 (190.0..210.0) | 160.0 | 12.80x | 50.0 | compute | 0.25 | 150.0 |

Predicted at 18.0 GB/s and 120 GFLOP/s: from 21.8 sequences on a step is bound by computing.

liteinfer-paged-b32: linear layers by oneDNN packed.
"""
    one_round = copy.deepcopy(WIDTHS) | {"rounds": 1, "turning_point": None}
    one_round["rows"][0]["widths"][1] |= {"itl_p50_ms": 45.0}
    text = markdown([one_round], ("widths",), no_hash)
    assert ".." not in text and "computing a step never takes as long as reading for it." in text
    assert text.count("Warning:") == 1 and "liteinfer-paged-b32, width 32, is faster than its ceiling" in text


@pytest.mark.parametrize("result", [KV_MEMORY, WIDTHS])
def test_eighty_columns_cut_no_figure(result: dict[str, Any]) -> None:
    console = Console(file=io.StringIO(), width=80)
    print_tables([result], console, no_hash)
    text = console.file.getvalue()
    assert "…" not in text and max(map(len, text.splitlines())) <= 80


def test_several_kinds_may_be_shown_together() -> None:
    text = markdown([WIDTHS, KV_MEMORY], current=no_hash)
    assert [line for line in text.splitlines() if line.startswith("**")] == [
        "**Widths: sequences decoded together**", "**KV memory: bytes of one stream, and streams in a budget**",
        "**Waste: token slots held and empty, by block size**"]
    assert text.count("toy (134.5 M") == 2


@pytest.mark.parametrize(("changed", "stale"), [("widths", True), ("liteinfer-paged-b32", True), ("kv_memory", False)])
def test_a_curve_is_stale_if_its_own_code_or_a_row_s_has_changed(changed: str, stale: bool) -> None:
    hashes = {"widths": "aaaa", "liteinfer-paged-b32": "bbbb", changed: "cccc"}
    assert ("stale: the code has changed" in markdown([WIDTHS], ("widths",), hashes.get)) == stale


def test_rendering_and_staleness_of_pages(tmp_path: Path) -> None:
    results = tmp_path / "benchmarks/results"
    results.mkdir(parents=True)
    (results / "memory.json").write_text(json.dumps(KV_MEMORY))
    (results / "widths.json").write_text(json.dumps(WIDTHS))
    page = tmp_path / "README.md"
    page.write_text("<!-- table: kv_memory results=memory -->\n<!-- end -->\n<!-- table: waste results=memory -->\n"
                    "<!-- end -->\n<!-- table: widths results=widths -->\n<!-- end -->\n"
                    "<!--v: results=memory lengths.0.saved .1%-->?<!--/v--> and "
                    "<!--v: results=memory lengths.0.paged_bytes .1fMiB-->?<!--/v--> and "
                    "<!--v: results=widths rows.0.widths.1.tok_s .0f-->?<!--/v--> and "
                    "<!--v: results=widths turning_point .0f-->?<!--/v-->\n")
    assert len(render(tmp_path, check=False, current=no_hash)) == 7
    text = page.read_text()
    assert all(f"**{title}" in text for title in ("KV memory", "Waste", "Widths"))
    assert [part.split("-->")[-1] for part in text.splitlines()[-1].split("<!--/v-->")[:-1]] == [
        "50.0%", "45.0 MiB", "160", "22"]
    assert render(tmp_path, check=True, current=no_hash) == []
    found = render(tmp_path, check=True, current={"kv_memory": "new", "widths": "aaaa"}.get)
    assert "benchmarks/results/memory.json is stale: its code has changed" in found
    assert not any("widths" in line for line in found)
    for path in ("lengths.1.saved", "lengths.saved", "lengths.0", "waste.by_block_size.-1.waste"):
        page.write_text(f"<!--v: results=memory {path} .1%-->?<!--/v-->\n")
        with pytest.raises(ValueError, match=f"README.md:1 no value at '{path}'"):
            render(tmp_path, check=True, current=no_hash)


def test_the_ladder_s_tables_need_rows_of_the_ladder() -> None:
    with pytest.raises(ValueError, match="'latency' shows rows of the ladder, and none of these results holds any"):
        markdown([WIDTHS], ("latency",), no_hash)
    with pytest.raises(ValueError, match="none of these results is of the kind 'kv_memory'"):
        markdown([WIDTHS], ("waste",), no_hash)
