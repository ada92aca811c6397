"""What each piece of the fast row brings: the row with one of its parts replaced by the plain one, and with all.

A point is such a variant at a width. In each round every point gets an engine of its own, a warm-up, and as many
requests at once as it is wide; points take turns and another begins each round. The first step reads all prompts, the
others decode.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import metrics
from benchmarks.codehash import row_hash
from benchmarks.loop import drive
from benchmarks.measurement import Measurement
from benchmarks.result_file import Result
from benchmarks.run import Watch, check_fits, raw, settings
from benchmarks.widths import shape_of
from benchmarks.workloads import Workload, workload
from liteinfer import lineage
from liteinfer.lineage import Row
from liteinfer.loading import LoadedModel

PASS = "throughput"   # what the watch is told, with tok/s
PIECES = {            # of the fast row, each with the plain part of rung 6 in its place
    "linear": "liteinfer.model.linear:Packed()", "attention": "liteinfer.cache.paged:GatherSdpa()",
    "runner": "liteinfer.runner:Runner", "drafter": "liteinfer.engines.continuous:NoDrafter"}
NAMES = {"linear": "our linear layers", "attention": "attention in place", "runner": "the fused forward",
         "drafter": "batched sampling"}
ALL = tuple(PIECES)


@dataclass
class Point:
    """The fast row without some of its pieces, at a width, and what it has shown so far."""

    without: tuple[str, ...]
    width: int
    load: Workload
    rounds: list[Result] = field(default_factory=list)
    stopped: str | None = None     # why it takes no further turns

    @property
    def label(self) -> tuple[str, int]:
        return title(self.without), self.width


@dataclass
class Pieces(Measurement):
    """One run, and all it needs. `build` and `clock` are replaced in tests."""

    kind = "pieces"

    model: LoadedModel
    row: Row
    widths: Sequence[int]
    isl: int
    osl: int
    rounds: int
    machine: Mapping[str, Any]
    watch: Watch
    out: Path | None = None
    build: Callable[..., Any] = lineage.build
    clock: Callable[[], float] = time.perf_counter
    points: list[Point] = field(init=False)
    interrupted: bool = False

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(f"rounds must be at least 1, got {self.rounds}")
        self.shape = shape_of(self.isl, self.osl, self.widths)
        check_fits(self.model, self.shape)
        loads = {width: workload(self.model, self.shape, width) for width in self.widths}
        self.points = [Point(without, width, loads[width]) for without in variants() for width in self.widths]
        self.code_hash = row_hash(self.row)

    @property
    def turns(self) -> Sequence[Point]:
        return self.points

    def _turn(self, point: Point, round_: int) -> None:
        row = without(self.row, point.without)
        engine = self.build(row, self.model, max_num_batched_tokens=point.width * self.isl,
                            **settings(row, point.width, self.shape))
        drive(engine, point.load.requests("warmup"), None, self.clock)
        requests = point.load.requests("throughput")
        wanted = {request.request_id: request.params.max_tokens for request in requests}
        traces = drive(engine, requests, None, self.clock)
        if failed := metrics.failures(traces, wanted):
            raise RuntimeError(failed[0])
        took = metrics.throughput(traces, wanted)
        assert took["itl_p50_ms"] is not None   # no failure, and two tokens each
        first = [metrics.ttft(trace) for trace in traces]
        point.rounds.append({"itl_ms": took["itl_p50_ms"], "prefill_ms": max(filter(None, first)) * 1000,
                             "raw": [raw(trace, traces[0].added_at) for trace in traces]})
        self.watch.passed(*point.label, round_, PASS, point.width / took["itl_p50_ms"] * 1000)

    def result(self) -> Result:
        """The result JSON of what is finished so far."""
        rows = [self._row(point) for point in self.points if point.rounds]
        return self.framed(isl=self.isl, osl=self.osl, rows=rows)

    def skip(self, one: Point) -> Result:
        return {**super().skip(one), "width": one.width}

    def _row(self, point: Point) -> Result:
        itl, prefill = ([taken[key] for taken in point.rounds] for key in ("itl_ms", "prefill_ms"))
        return {"name": self.row.name, "without": list(point.without), "width": point.width, "itl_p50_ms": median(itl),
                "itl_range": [min(itl), max(itl)], "prefill_ms": median(prefill),
                "prefill_range": [min(prefill), max(prefill)], "rounds": point.rounds, "code_hash": self.code_hash,
                **({"stopped": point.stopped} if point.stopped else {})}


def variants() -> list[tuple[str, ...]]:
    """The whole row, without each piece, without all of them."""
    return [(), *((piece,) for piece in PIECES), ALL]


def without(row: Row, pieces: Sequence[str]) -> Row:
    """The row with the plain part in the place of each of these pieces."""
    parts = {**row.parts, **{piece: PIECES[piece] for piece in pieces}}
    return Row(row.name, row.chapter, row.engine, row.what, row.improves_on, row.widths, parts)


def title(pieces: Sequence[str]) -> str:
    """A variant in words."""
    if not pieces:
        return "all pieces"
    return "none of them" if tuple(pieces) == ALL else f"without {NAMES[pieces[0]]}"

