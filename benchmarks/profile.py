"""Where the time of a decode step goes: its parts, by torch.profiler, beside what the machine allows each.

The engine runs as ever, under the profiler, with a named range around each part; the profiler sees every operation of
torch besides. A range's own time is its time without the ranges inside it. Within the forward, own time in which an
operation of torch ran is "norms and rotations", the rest is Python on its way from one operation to the next. Only
steps in which every sequence decodes are counted. The profiler itself takes time: the step without it stands beside.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest.mock import patch

from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks import ceilings
from benchmarks.codehash import row_hash
from benchmarks.measurement import Measurement, chosen_rows, requests
from benchmarks.result_file import Result
from benchmarks.run import Watch, check_fits, settings
from benchmarks.workloads import Shape, take
from liteinfer import lineage
from liteinfer.cache import paged
from liteinfer.lineage import Row
from liteinfer.loading import LoadedModel

PASS = "profile"   # what the watch is told, in ms of a step
MARK = "part: "    # before the names of our ranges
# In the order of a step. "between" and "norms" are the forward's own time, told apart by what torch says it did.
PARTS = ("linear", "attention", "gather", "norms", "sampling", "scheduling", "between", "unattributed")
WARMUP = 4         # steps that are not counted, after the first in which all decode
COUNTED = 12       # steps that the profiler sees: at width 32 it keeps ten thousand events of each


@dataclass
class Point:
    """A row at a width, and what it has shown so far."""

    row: Row
    width: int
    code_hash: str                 # as it was when the run began
    rounds: list[Result] = field(default_factory=list)
    stopped: str | None = None     # why it takes no further turns

    @property
    def label(self) -> tuple[str, int]:
        return self.row.name, self.width


@dataclass
class Profile(Measurement):
    """One run, and all it needs. `build` is replaced in tests."""

    kind = "profile"

    model: LoadedModel
    rows: Sequence[Row]
    widths: Sequence[int]
    isl: int
    osl: int
    rounds: int
    machine: Mapping[str, Any]
    watch: Watch
    out: Path | None = None
    build: Callable[..., Any] = lineage.build
    points: list[Point] = field(init=False)
    interrupted: bool = False

    def __post_init__(self) -> None:
        check_fits(self.model, self._shape(1))
        self.points = [Point(row, width, row_hash(row)) for row in self.rows for width in self.widths]

    @property
    def turns(self) -> Sequence[Point]:
        return self.points

    def _shape(self, width: int) -> Shape:
        return Shape("profile", self.isl, (self.osl, self.osl), 1, {1: width})

    def _turn(self, point: Point, round_: int) -> None:
        engine = self.build(point.row, self.model, **settings(point.row, point.width, self._shape(point.width)))
        plain = list(self._decode(engine, point.width))
        seen = profile(activities=[ProfilerActivity.CPU], acc_events=True)
        with ExitStack() as ranges:
            mark(engine, ranges)
            for i, _ in enumerate(self._decode(engine, point.width)):
                if i == 0:
                    ranges.enter_context(seen)   # from the next step on
                elif i == COUNTED:
                    break                        # the engine has served its turn
        steps = split(seen.events())
        parts = {part: mean(step[part] for step in steps) for part in PARTS}
        point.rounds.append({"step_ms": median(plain), "profiled_ms": sum(parts.values()), "parts_ms": parts})
        self.watch.passed(*point.label, round_, PASS, point.rounds[-1]["step_ms"])

    def _decode(self, engine: Any, width: int) -> Iterator[float]:
        """Milliseconds of each counted step. Raises RuntimeError if a request failed, or there are not two of them."""
        asked = requests("profile", take(self.model, self.isl, width), self.osl)
        for request in asked:
            engine.add(request)
        decoding = 0
        while engine.has_unfinished():
            decoding += len(engine.scheduler.running) == width and all(request.output_token_ids for request in asked)
            began = time.perf_counter()
            with record_function(f"{MARK}step"):
                events = engine.step()
            ms = (time.perf_counter() - began) * 1000
            if failed := [event.error for event in events if event.error]:
                raise RuntimeError(failed[0])
            if decoding > WARMUP:
                yield ms
        if decoding < WARMUP + 2:
            raise RuntimeError(f"osl {self.osl} leaves too few steps in which all {width} sequences decode: "
                               f"{decoding}, and {WARMUP + 2} are needed")

    def result(self) -> Result:
        """The result JSON of what is finished so far."""
        return self.framed(isl=self.isl, osl=self.osl, rows=[self._row(point) for point in self.points if point.rounds])

    def skip(self, one: Point) -> Result:
        return {**super().skip(one), "width": one.width}

    def _row(self, point: Point) -> Result:
        step = [taken["step_ms"] for taken in point.rounds]
        parts = {part: median(taken["parts_ms"][part] for taken in point.rounds) for part in PARTS}
        return {"name": point.row.name, "width": point.width, "step_ms": median(step),
                "step_range": [min(step), max(step)],
                "profiled_ms": median(taken["profiled_ms"] for taken in point.rounds), "parts_ms": parts,
                "ceilings_ms": allowed(self.model, self.isl + self.osl / 2, point.width, self.machine),
                "rounds": point.rounds, "code_hash": point.code_hash,
                **({"stopped": point.stopped} if point.stopped else {})}


def check_lengths(widths: Sequence[int], isl: int, osl: int, rounds: int) -> None:
    """Raises ValueError for what makes no profile; the message names the setting and the number."""
    for setting, value, least in (("widths", min(widths), 1), ("isl", isl, 1), ("osl", osl, WARMUP + 3),
                                  ("rounds", rounds, 1)):
        if value < least:
            raise ValueError(f"{setting} must be at least {least}, got {value}")


def continuous(names: str) -> list[Row]:
    """The rows of these names. Raises ValueError as `chosen_rows` does, and for one without scheduler and runner."""
    engine = lineage.find("continuous").engine
    return chosen_rows(names, lambda row: row.engine == engine, "is not scheduled; the rows that are:")


def mark(engine: Any, ranges: ExitStack) -> None:
    """Put a range around each part of this engine; they are gone when `ranges` closes."""
    llama = engine.llama
    for layer in llama.layers:
        for name in ("qkv", "o", "gate_up", "down"):
            around(ranges, layer, name, "linear")
    around(ranges, llama, "head", "linear")
    around(ranges, engine.cache, "attention", "attention")
    around(ranges, engine.runner, "run", "forward")
    around(ranges, engine.drafter, "verify", "sampling")
    around(ranges, engine.scheduler, "schedule", "scheduling")
    around(ranges, engine, "_update", "scheduling")
    around(ranges, paged, "gather", "gather")
    ops = getattr(getattr(engine.runner, "model", None), "ops", None)
    for name in ("add_rms_norm", "rotate_and_store", "silu_mul") if ops else ():
        around(ranges, ops, name, "norms")


def around(ranges: ExitStack, owner: Any, name: str, part: str) -> None:
    """Replace owner.name by itself in a range."""
    ranges.enter_context(patch.object(owner, name, Ranged(getattr(owner, name), part)))


class Ranged:
    """Something callable, each call of it in a range; in all else itself."""

    def __init__(self, inner: Any, part: str) -> None:
        self._inner, self._name = inner, MARK + part

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with record_function(self._name):
            return self._inner(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def split(events: Sequence[Any]) -> list[dict[str, float]]:
    """Milliseconds of each part, step by step, from the profiler's events: ranges of ours, and operations of torch."""
    steps: dict[int, dict[str, float]] = {}
    own: dict[int, float] = {}
    for event in events:
        if event.name.startswith(MARK):
            own[event.id] = own.get(event.id, 0) + took(event)
            if (parent := enclosing(event)) is not None:
                own[parent.id] = own.get(parent.id, 0) - took(event)
    operations = dict.fromkeys(own, 0.0)
    for event in events:   # outermost operations in a range
        parent = event.cpu_parent
        if not event.name.startswith(MARK) and parent is not None and parent.name.startswith(MARK):
            operations[parent.id] += took(event) - sum(took(inner) for inner in ranges_in(event))
    for event in events:
        if not event.name.startswith(MARK):
            continue
        step = outermost(event)
        parts = steps.setdefault(step.id, dict.fromkeys(PARTS, 0.0))
        part = event.name.removeprefix(MARK)
        if part == "forward":
            parts["norms"] += operations[event.id]
            parts["between"] += own[event.id] - operations[event.id]
        else:
            parts["unattributed" if part == "step" else part] += own[event.id]
    return list(steps.values())


def took(event: Any) -> float:
    return float(event.time_range.elapsed_us()) / 1000


def enclosing(event: Any) -> Any:
    """The innermost range of ours around an event."""
    parent = event.cpu_parent
    while parent is not None and not parent.name.startswith(MARK):
        parent = parent.cpu_parent
    return parent


def outermost(event: Any) -> Any:
    """The step that an event is part of."""
    while (parent := enclosing(event)) is not None:
        event = parent
    return event


def ranges_in(event: Any) -> Iterator[Any]:
    """The outermost ranges of ours inside an operation."""
    for child in event.cpu_children:
        if child.name.startswith(MARK):
            yield child
        else:
            yield from ranges_in(child)


def allowed(model: LoadedModel, context: float, width: int, machine: Mapping[str, Any]) -> dict[str, float]:
    """The least milliseconds that each part could take: its bytes and operations on this machine."""
    sizes = ceilings.Sizes.of(model.config, model.dtype)
    one = ceilings.Step(1, context, cached=True, sequences=width)
    none = ceilings.Step(1, 0, cached=False, sequences=width)
    linear, _ = ceilings.allowed(none, sizes, machine)
    kv = sizes.kv_per_token * context * width * sizes.itemsize / (machine["bandwidth_gb_s"] * 1e9)
    logits = model.config.vocab_size * width * sizes.itemsize / (machine["bandwidth_gb_s"] * 1e9)
    whole, _ = ceilings.allowed(one, sizes, machine)
    return {"linear": linear * 1000, "attention": kv * 1000, "sampling": logits * 1000, "step": whole * 1000}

