"""What a request alone on the machine takes, from short prompts and answers to long ones: where each idea matters.

A point is a row at an ISL and an OSL. In each round every point gets an engine of its own, a short warm-up, and its
prompts one after the other. Points take turns and another begins each round; those of one shape follow each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import metrics
from benchmarks.codehash import row_hash
from benchmarks.loop import Trace, drive
from benchmarks.measurement import Measurement
from benchmarks.references.bench import started
from benchmarks.references.process import Process
from benchmarks.result_file import Result, save
from benchmarks.run import Watch, check_fits, raw, settings
from benchmarks.workloads import Shape, Workload, workload
from liteinfer import lineage
from liteinfer.lineage import LADDER, Row
from liteinfer.loading import LoadedModel
from liteinfer.request import Request

PASS = "answer"           # what the watch is told, with E2E in ms
WIDTH = 1
WARMUP_ISL = 64           # a warm-up as long as a long prompt would take as long as what is measured
RECOMPUTES = LADDER[0]    # for each token it computes the whole text again: it runs at the least ISL only
FIGURES = {"ttft_ms": "ttft_p50_ms", "tpot_ms": "tpot_p50_ms", "e2e_ms": "e2e_p50_ms"}


@dataclass
class Point:
    """A row at a shape, and what it has shown so far."""

    row: Row
    shape: Shape
    load: Workload
    warmup: list[Request]
    code_hash: str                 # of the row's code as it was when the run began
    stopped: str | None            # why it takes no further turns
    rounds: list[Result] = field(default_factory=list)

    @property
    def label(self) -> tuple[str, int]:
        return title(self.row, self.shape), WIDTH


@dataclass
class Shapes(Measurement):
    """One run, and all it needs. `build`, `start` and `clock` are replaced in tests.

    Args:
        shapes: from `grid`.
        logs: the folder for what references print.
    """

    kind = "shapes"

    model: LoadedModel
    rows: Sequence[Row]
    shapes: Sequence[Shape]
    rounds: int
    machine: Mapping[str, Any]
    watch: Watch
    out: Path | None = None
    logs: Path = Path("benchmarks/results/local")
    build: Callable[..., Any] = lineage.build
    start: Callable[..., Any] = Process
    clock: Callable[[], float] = time.perf_counter
    points: list[Point] = field(init=False)
    interrupted: bool = False

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(f"rounds must be at least 1, got {self.rounds}")
        for shape in self.shapes:
            check_fits(self.model, shape)
        hashes = {row.name: row_hash(row) for row in self.rows}
        self.points = []
        for shape in self.shapes:
            short = replace(shape, isl=min(shape.isl, WARMUP_ISL))
            load, warmup = workload(self.model, shape), workload(self.model, short)
            self.points += [Point(row, shape, load, warmup.requests("warmup"), hashes[row.name], lineage.missing(row))
                            for row in able(self.rows, shape, self.shapes)]

    @property
    def turns(self) -> Sequence[Point]:
        return self.points

    def _turn(self, point: Point, round_: int) -> None:
        if point.row.environment is None:
            engine = self.build(point.row, self.model, **settings(point.row, WIDTH, point.shape))
            self._answers(point, round_, lambda requests: drive(engine, requests, WIDTH, self.clock))
        else:
            with started(point.row, WIDTH, self.model, point.shape, self.logs, self.start) as process:
                self._answers(point, round_, lambda requests: process.drive(requests, WIDTH))
        if self.out is not None:
            save(self.result(), self.out)   # a run of half an hour: what is finished is not lost

    def _answers(self, point: Point, round_: int, ask: Callable[[list[Request]], list[Trace]]) -> None:
        ask(point.warmup)
        requests = point.load.requests("latency")
        wanted = {request.request_id: request.params.max_tokens for request in requests}
        traces = ask(requests)
        if failed := metrics.failures(traces, wanted):
            raise RuntimeError(failed[0])
        took = metrics.latency(traces, wanted)
        point.rounds.append({name: took[of] for name, of in FIGURES.items()}
                            | {"raw": [raw(trace, traces[0].added_at) for trace in traces]})
        self.watch.passed(*point.label, round_, PASS, took["e2e_p50_ms"])

    def result(self) -> Result:
        """The result JSON of what is finished so far."""
        return self.framed(prompts=self.shapes[0].latency_prompts,
                           rows=[self._row(point) for point in self.points if point.rounds])

    def skip(self, one: Point) -> Result:
        """What the machine cannot run is named once, what failed with its shape."""
        return {"name": one.row.name if lineage.missing(one.row) else one.label[0], "reason": one.stopped}

    def _row(self, point: Point) -> Result:
        figures = [{name: taken[name] for name in FIGURES} for taken in point.rounds]
        medians, ranges = metrics.over_rounds(figures)
        return {"name": point.row.name, "improves_on": point.row.improves_on, "isl": point.shape.isl,
                "osl": point.shape.osl, **medians, "ranges": ranges, "prompt_hash": point.load.prompt_hash,
                "rounds": point.rounds, "code_hash": point.code_hash,
                **({"stopped": point.stopped} if point.stopped else {})}


def able(rows: Sequence[Row], shape: Shape, shapes: Sequence[Shape]) -> list[Row]:
    """The rows that are run at this shape of these."""
    return [row for row in rows if row != RECOMPUTES or shape.isl == min(each.isl for each in shapes)]


def title(row: Row, shape: Shape) -> str:
    return f"{row.name} {shape.isl:,} in, {shape.osl:,} out"


def grid(isl: Sequence[int], osl: Sequence[int], prompts: int) -> list[Shape]:
    """A shape for every pair of lengths. Raises ValueError for a length or a number that makes none."""
    if min(osl) < 2:
        raise ValueError(f"osl must be at least 2 to have a token after the first, got {min(osl)}")
    some = Shape("shapes", min(isl), (2, 2), 1, {WIDTH: 1})
    return [some.override(long, short, prompts) for long in isl for short in osl]


def chosen(names: str, references: bool) -> list[Row]:
    """The rows of these names in ladder order, then the references that answer one request at a time, if asked for.

    Raises:
        ValueError: a name that no row has, or a row that is not measured with one request at a time.
    """
    every = (*LADDER, *lineage.REFERENCES)
    named = [lineage.find(name.strip(), every) for name in names.split(",")]
    named += [row for row in lineage.REFERENCES if references and WIDTH in row.widths]
    for row in named:
        if WIDTH not in row.widths:
            raise ValueError(f"{row.name} is measured at width {row.widths[0]}; shapes are for those of width {WIDTH}: "
                             f"{', '.join(other.name for other in every if WIDTH in other.widths)}")
    return [row for row in every if row in named]
