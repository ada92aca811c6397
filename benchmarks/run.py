"""The runner: rows take turns, round after round, over one loaded model.

A turn builds the row's engine anew (the weights are shared, so this is cheap,
and no cache is warm from the turn before), warms it up on prompts of their own,
then makes a latency pass (one request in flight) and a throughput pass (all at
once, or as they arrive at a rate). Each round starts with another row, so that none always goes first on a
cool machine. What is finished is saved after every turn.
"""

from __future__ import annotations

import gc
import inspect
import pkgutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from benchmarks import ceilings, drafts, metrics
from benchmarks.codehash import row_hash, total_hash
from benchmarks.loop import Trace, drive
from benchmarks.result_file import Result, head, save
from benchmarks.workloads import Shape, Workload, workload
from liteinfer import lineage
from liteinfer.lineage import Row
from liteinfer.trace import StepTrace

if TYPE_CHECKING:
    from liteinfer.loading import LoadedModel

PASSES = ("latency", "throughput")
BLOCK_SIZE = 16   # tokens per KV block, wherever an engine has blocks
NEEDS_DRAFT = "a draft model"   # what the ladder says of a row that is run with the draft named by the reader
T = TypeVar("T")


class Turn(Protocol):
    """What takes turns in a run: a row at a width, a point of a curve."""

    stopped: str | None   # why it takes no further turns

    @property
    def label(self) -> tuple[str, int]:
        """Its name and width, for the watch."""


U = TypeVar("U", bound=Turn)


@dataclass(frozen=True)
class Entry:
    """A row at one of its widths: what gets a line in the tables."""

    row: Row
    width: int = 1


@dataclass
class Record:
    """What an entry has shown so far."""

    entry: Entry
    load: Workload
    code_hash: str   # of the code as it was when the run began
    rounds: list[Result] = field(default_factory=list)
    outputs: dict[str, list[int]] = field(default_factory=dict)   # the first round's tokens by request id
    counters: dict[str, dict[str, int]] = field(default_factory=dict)   # by pass
    failed: list[str] = field(default_factory=list)
    linear_path: str | None = None
    pool: str | None = None   # the engine's KV pool, in words
    stopped: str | None = None   # why it takes no further turns

    @property
    def label(self) -> tuple[str, int]:
        return self.entry.row.name, self.entry.width


class Watch(Protocol):
    """Told what happens, to show it."""

    def passed(self, name: str, width: int, round_: int, what: str, headline: float | None) -> None:
        """A pass ended. `headline`: ITL p50 in ms, or tok/s."""

    def stopped(self, name: str, width: int, reason: str) -> None:
        """An entry takes no further turns."""


@dataclass
class Bench:
    """One run, and all it needs. `build`, `clock` and `sleep` are replaced in tests.

    Args:
        draft: the draft model of the rows that need one, or whatever else drafts; without it they are skipped.
    """

    model: LoadedModel
    entries: Sequence[Entry]
    shape: Shape
    rounds: int
    machine: Mapping[str, Any]
    watch: Watch
    out: Path | None = None
    build: Callable[..., Any] = lineage.build
    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep
    draft: str | None = None
    records: list[Record] = field(init=False)
    interrupted: bool = False

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(f"rounds must be at least 1, got {self.rounds}")
        check_fits(self.model, self.shape)
        self.records = [Record(entry, workload(self.model, self.shape, entry.width), row_hash(entry.row))
                        for entry in runnable(self.entries, self.draft)]

    def run(self) -> Result:
        """All rounds; an exception costs the row that raised it, Ctrl-C ends the run. Returns what is saved."""
        self.interrupted = take_turns(self.records, self.rounds, self._turn, self.watch, self._save)
        self._save()
        return self.result()

    def _turn(self, record: Record, round_: int) -> None:
        row, width = record.entry.row, record.entry.width
        steps = StepTrace(clock=self.clock) if self.shape.rate and takes(row, "trace") else None
        engine = self.build(row, self.model, **settings(row, width, self.shape), **self._drafter(row),
                            **({"trace": steps} if steps else {}))
        longest = self.shape.isl + max(self.shape.output)
        if longest > getattr(engine, "max_model_len", longest):
            raise ValueError(f"isl + osl = {longest} tokens is over the engine's max_model_len {engine.max_model_len}")
        record.linear_path = getattr(engine, "linear_path", None)
        record.pool = str(engine.pool_size) if hasattr(engine, "pool_size") else None
        drive(engine, record.load.requests("warmup"), width, self.clock)
        taken: Result = {"raw": {}}
        for what in PASSES:
            requests = record.load.requests(what)
            wanted = {request.request_id: request.params.max_tokens for request in requests}
            engine.counters = type(engine.counters)()
            arrivals = self.shape.arrivals(len(requests)) if what == "throughput" else None
            traces = drive(engine, requests, 1 if what == "latency" else None, self.clock, arrivals, self.sleep)
            self._count(record, what, asdict(engine.counters))
            taken[what] = metrics.latency(traces, wanted) if what == "latency" else metrics.throughput(traces, wanted)
            if arrivals:
                taken[what] |= metrics.arrivals(traces, wanted, steps.first_scheduled() if steps else None)
            taken["raw"][what] = [raw(trace, traces[0].added_at) for trace in traces]
            record.failed += [line for line in metrics.failures(traces, wanted) if line not in record.failed]
            for trace in traces:
                record.outputs.setdefault(trace.request_id, trace.token_ids)
            self.watch.passed(row.name, width, round_, what, taken[what][_headline(what)])
        step = self._step(record)
        taken["linear_ms"] = ceilings.linear_ms(engine, self.model, max(1, round(step.tokens))) if step else None
        record.rounds.append(taken)

    def _drafter(self, row: Row) -> dict[str, Any]:
        """The engine's arguments if the row needs a draft; a draft model's pool is as long as max_model_len asks."""
        if self.draft is None or row.needs != NEEDS_DRAFT:
            return {}
        longest = self.shape.isl + max(*self.shape.output, self.shape.warmup_tokens)
        return {"drafter": drafts.named(self.draft), "max_model_len": longest}

    def _count(self, record: Record, what: str, counters: dict[str, int]) -> None:
        """Keep a pass's counters. They depend on nothing but row and prompts, so rounds must agree.

        Where requests arrive by the clock, who shares a step depends on it: the first round's are kept.
        """
        first, by_the_clock = record.counters.setdefault(what, counters), what == "throughput" and self.shape.rate
        if first != counters and not by_the_clock:
            raise RuntimeError(f"the {what} pass counted {counters}, the first round {record.counters[what]}")

    def _step(self, record: Record) -> ceilings.Step | None:
        lengths = [self.shape.output_length(i) for i in range(len(record.load.latency))]
        return ceilings.mean_step(record.counters["latency"], len(lengths), self.shape.isl, mean(lengths))

    def result(self) -> Result:
        """The result JSON of what is finished so far."""
        done = [record for record in self.records if record.rounds]
        rows = [self._row(record, done[0]) for record in done]
        widest = max(self.records, key=lambda record: len(record.load.throughput)).load
        result: Result = {
            **head(self.model, self.machine), "shape": self.shape.name, "rounds": self.rounds,
            "code_hash": total_hash(row["code_hash"] for row in rows),
            "workload": {"shape": self.shape.name, "isl": self.shape.isl, "osl": self.shape.osl,
                         "latency_prompts": len(widest.latency), "throughput_prompts": len(widest.throughput),
                         "warmup_prompts": len(widest.warmup), "decoding": "greedy, forced length",
                         "prompt_hash": widest.prompt_hash,
                         **({"rate": self.shape.rate} if self.shape.rate else {})},
            "rows": rows,
            "skipped": [{"name": entry.row.name, "width": entry.width, "reason": reason}
                        for entry, reason in self._skipped()],
        }
        return result | ({"interrupted": True} if self.interrupted else {})

    def _skipped(self) -> list[tuple[Entry, str]]:
        """The entries without a result, and why: what the machine lacks, or what stopped them."""
        stopped = {(record.entry.row.name, record.entry.width): record.stopped
                   for record in self.records if not record.rounds}
        reasons = [lacking(entry.row, self.draft) or stopped.get((entry.row.name, entry.width))
                   for entry in self.entries]
        return [(entry, reason) for entry, reason in zip(self.entries, reasons, strict=True) if reason]

    def _row(self, record: Record, first: Record) -> Result:
        row, width = record.entry.row, record.entry.width
        out: Result = {"name": row.name, "chapter": row.chapter, "improves_on": row.improves_on, "width": width,
                       "what": row.what, "reference": row.reference,
                       "prompts": {"latency": len(record.load.latency), "throughput": len(record.load.throughput),
                                   "hashes": record.load.hashes}}
        for what in PASSES:
            out[what], out[f"{what}_range"] = metrics.over_rounds([taken[what] for taken in record.rounds])
        linear = [taken["linear_ms"] for taken in record.rounds if taken["linear_ms"] is not None]
        sizes = ceilings.Sizes.of(self.model.config, self.model.dtype)
        out |= {"rounds": record.rounds, "counters": record.counters["throughput"], "failed": record.failed,
                "differs_from_first": differing(record.outputs, first.outputs),
                "ceiling": ceilings.report(self._step(record), sizes, self.machine, out["latency"]["itl_p50_ms"],
                                           median(linear) if linear else None),
                "code_hash": record.code_hash}
        draft = drafts.shown(self.draft) if self.draft and row.needs == NEEDS_DRAFT else None
        for key, value in (("linear_path", record.linear_path), ("pool", record.pool), ("draft", draft),
                           ("stopped", record.stopped)):
            if value is not None:
                out[key] = value
        return out

    def _save(self) -> None:
        if self.out is not None and any(record.rounds for record in self.records):   # keep an older file till then
            save(self.result(), self.out)


def lacking(row: Row, draft: str | None = None) -> str | None:
    """What is lacking to run the row, in a few words: nothing, if it was a draft and one is named."""
    return None if draft is not None and row.needs == NEEDS_DRAFT else lineage.missing(row)


def runnable(entries: Sequence[Entry], draft: str | None = None) -> list[Entry]:
    """Those that this machine can run. Raises ValueError, with the reasons, if it can run none of them."""
    able = [entry for entry in entries if lacking(entry.row, draft) is None]
    if not able:
        reasons = dict.fromkeys(f"{entry.row.name} {lacking(entry.row, draft)}" for entry in entries)
        raise ValueError(f"this machine can run none of the chosen rows: {', '.join(reasons)}")
    return able


def check_fits(model: LoadedModel, shape: Shape) -> None:
    """Raises ValueError if the model was not made for sequences as long as the shape's."""
    longest, limit = shape.isl + max(shape.output), model.config.max_position_embeddings
    if longest > limit:
        raise ValueError(f"isl {shape.isl} + osl {max(shape.output)} = {longest} tokens is over the model's {limit}")


def settings(row: Row, width: int, shape: Shape) -> dict[str, int]:
    """The engine's arguments for a run at this width.

    A KV pool is given in blocks, as many as `width` of the longest sequences (a warm-up may be the
    longest) take and no more, so that counters do not depend on the machine's memory.
    """
    found = {"max_num_seqs": width} if max(row.widths) > 1 else {}
    if takes(row, "num_blocks"):
        longest = shape.isl + max(*shape.output, shape.warmup_tokens)
        found |= {"block_size": BLOCK_SIZE, "num_blocks": width * -(-longest // BLOCK_SIZE)}
    return found


def takes(row: Row, argument: str) -> bool:
    """Whether the row's engine has this argument."""
    return argument in inspect.signature(pkgutil.resolve_name(row.engine)).parameters


def take_turns(turns: Sequence[U], rounds: int, turn: Callable[[U, int], None], watch: Watch,
               after: Callable[[], None] = lambda: None) -> bool:
    """Give everyone a turn in every round; another begins each round. Returns whether Ctrl-C ended it early.

    An exception costs the one that raised it its further turns. `after` is called after each turn.
    """
    gc.freeze()   # or Python walks every object of torch in mid-pass, and that pause is in some p95
    try:
        for round_ in range(rounds):
            for one in rotated(turns, round_):
                if one.stopped is None:
                    attempt(one, partial(turn, one, round_), watch)
                    gc.collect()   # the engine is gone: give its memory back before the next one asks
                    after()
    except KeyboardInterrupt:
        return True
    finally:
        gc.unfreeze()
    return False


def attempt(one: Turn, work: Callable[[], object], watch: Watch) -> None:
    """Do a part of a turn. An exception costs the one whose turn it is what is left of it, and all further ones."""
    try:
        work()
    except Exception as error:
        one.stopped = " ".join(f"{type(error).__name__}: {error}".split())
        watch.stopped(*one.label, one.stopped)


def rotated(items: Sequence[T], round_: int) -> list[T]:
    """The order of a round: each starts one entry later than the one before."""
    start = round_ % len(items)
    return [*items[start:], *items[:start]]


def raw(trace: Trace, start: float) -> Result:
    """A trace with its times in seconds since the pass began, to the microsecond."""
    return {**asdict(trace), "added_at": round(trace.added_at - start, 6),
            "events": [[round(at - start, 6), tokens] for at, tokens in trace.events]}


def differing(outputs: Mapping[str, list[int]], first: Mapping[str, list[int]]) -> dict[str, int]:
    """Of the prompts that this row and the first one both ran, how many gave other tokens."""
    shared = outputs.keys() & first.keys()
    return {"differ": sum(outputs[key] != first[key] for key in shared), "prompts": len(shared)}


def _headline(what: str) -> str:
    return "itl_p50_ms" if what == "latency" else "tok_s"
