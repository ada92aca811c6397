"""The width curve: what a decode step takes, and yields, with B sequences in it.

A point is a row at a width B. In each round every point gets an engine of its
own, a warm-up, and B requests at once; only the steps after the first, which
reads the prompts, are timed. Points take turns and another begins each round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import ceilings, metrics
from benchmarks.codehash import row_hash
from benchmarks.loop import drive
from benchmarks.measurement import Measurement, chosen_rows
from benchmarks.result_file import Result
from benchmarks.run import Watch, check_fits, raw, settings
from benchmarks.workloads import Shape, Workload, workload
from liteinfer import lineage
from liteinfer.lineage import Row
from liteinfer.loading import LoadedModel

PASS = "throughput"   # what the watch is told, with tok/s


@dataclass
class Point:
    """A row at a width, and what it has shown so far."""

    row: Row
    width: int
    load: Workload
    code_hash: str                 # of the row's code as it was when the run began
    linear_path: str | None = None
    rounds: list[Result] = field(default_factory=list)
    stopped: str | None = None     # why it takes no further turns

    @property
    def label(self) -> tuple[str, int]:
        return self.row.name, self.width


@dataclass
class Curve(Measurement):
    """One run, and all it needs. `build`, `clock` and `linear_ms` are replaced in tests."""

    kind = "widths"

    model: LoadedModel
    rows: Sequence[Row]
    widths: Sequence[int]
    shape: Shape
    rounds: int
    machine: Mapping[str, Any]
    watch: Watch
    out: Path | None = None
    build: Callable[..., Any] = lineage.build
    clock: Callable[[], float] = time.perf_counter
    linear_ms: Callable[..., float] = ceilings.linear_ms
    points: list[Point] = field(init=False)
    interrupted: bool = False

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(f"rounds must be at least 1, got {self.rounds}")
        check_fits(self.model, self.shape)
        loads = {width: workload(self.model, self.shape, width) for width in self.widths}
        hashes = {row.name: row_hash(row) for row in self.rows}
        self.points = [Point(row, width, loads[width], hashes[row.name]) for row in self.rows for width in self.widths]

    @property
    def turns(self) -> Sequence[Point]:
        return self.points

    def _turn(self, point: Point, round_: int) -> None:
        longest = self.shape.isl + max(self.shape.output)   # or a contiguous cache takes gigabytes at width 32
        engine = self.build(point.row, self.model, max_model_len=longest,
                            **settings(point.row, point.width, self.shape))
        point.linear_path = getattr(engine, "linear_path", None)
        drive(engine, point.load.requests("warmup"), None, self.clock)
        requests = point.load.requests("throughput")
        wanted = {request.request_id: request.params.max_tokens for request in requests}
        traces = drive(engine, requests, None, self.clock)
        if failed := metrics.failures(traces, wanted):
            raise RuntimeError(failed[0])
        itl = metrics.throughput(traces, wanted)["itl_p50_ms"]
        assert itl is not None   # no failure, and two tokens each
        point.rounds.append({"itl_ms": itl, "linear_ms": self.linear_ms(engine, self.model, point.width, point.width),
                             "raw": [raw(trace, traces[0].added_at) for trace in traces]})
        self.watch.passed(point.row.name, point.width, round_, PASS, point.width / itl * 1000)

    def result(self) -> Result:
        """The result JSON of what is finished so far."""
        rows = []
        for row in self.rows:
            if points := [point for point in self.points if point.row == row and point.rounds]:
                rows.append({"name": row.name, "linear_path": points[0].linear_path, "code_hash": points[0].code_hash,
                             "widths": [self._point(point) for point in points]})
        return self.framed(isl=self.shape.isl, osl=self.shape.osl, rows=rows,
                           turning_point=turning_point(self.model, self.shape, self.machine))

    def skip(self, one: Point) -> Result:
        return {**super().skip(one), "width": one.width}

    def _point(self, point: Point) -> Result:
        itl = [taken["itl_ms"] for taken in point.rounds]
        sizes = ceilings.Sizes.of(self.model.config, self.model.dtype)
        seconds, bound = ceilings.allowed(step(self.shape, point.width), sizes, self.machine)
        return {"width": point.width, "itl_p50_ms": median(itl), "itl_range": [min(itl), max(itl)],
                "tok_s": point.width / median(itl) * 1000, "ceiling_ms": seconds * 1000, "bound": bound,
                "linear_ms": median(taken["linear_ms"] for taken in point.rounds), "rounds": point.rounds,
                **({"stopped": point.stopped} if point.stopped else {})}


def step(shape: Shape, width: int) -> ceilings.Step:
    """The mean decode step: one new token of each sequence."""
    return ceilings.Step(1, shape.isl + max(shape.output) / 2, cached=True, sequences=width)


def turning_point(model: LoadedModel, shape: Shape, machine: Mapping[str, Any]) -> float | None:
    """The width from which on the machine's two limits say that a step is bound by computing."""
    return ceilings.turning_point(step(shape, 1), ceilings.Sizes.of(model.config, model.dtype), machine)


def shape_of(isl: int, osl: int, widths: Sequence[int]) -> Shape:
    """As many prompts as the width. Raises ValueError for a width or a length that makes no curve."""
    if not widths or min(widths) < 1:
        raise ValueError(f"widths must be at least 1, got {', '.join(map(str, widths)) or 'none'}")
    if osl < 2:
        raise ValueError(f"osl must be at least 2 to have a step after the first, got {osl}")
    Shape("widths", isl, (osl, osl), 1, {1: 1}).override(isl, osl)   # refuses what no shape has
    return Shape("widths", isl, (osl, osl), 1, {width: width for width in widths}, warmup_tokens=min(4, osl))


def batched(names: str) -> list[Row]:
    """The rows of these names. Raises ValueError as `chosen_rows` does, and for a row that runs one at a time."""
    return chosen_rows(names, lambda row: max(row.widths) > 1,
                       "runs one request at a time; a width curve is there for")
