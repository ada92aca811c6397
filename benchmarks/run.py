"""The runner: rows take turns, round after round, over one loaded model.

A turn builds the row's engine anew (the weights are shared, so this is cheap,
and no cache is warm from the turn before), warms it up on prompts of their own,
then makes a latency pass (one request in flight) and a throughput pass (all at
once). Each round starts with another row, so that none always goes first on a
cool machine. What is finished is saved after every turn.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any, Protocol

from benchmarks import ceilings, metrics
from benchmarks.codehash import row_hash, total_hash
from benchmarks.loop import Trace, drive
from benchmarks.workloads import Shape, Workload, workload
from liteinfer import lineage
from liteinfer.lineage import Row

if TYPE_CHECKING:
    from liteinfer.loading import LoadedModel

Result = dict[str, Any]
PASSES = ("latency", "throughput")


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
    stopped: str | None = None   # why it takes no further turns


class Watch(Protocol):
    """Told what happens, to show it."""

    def passed(self, name: str, width: int, round_: int, what: str, headline: float | None) -> None:
        """A pass ended. `headline`: ITL p50 in ms, or tok/s."""

    def stopped(self, name: str, width: int, reason: str) -> None:
        """An entry takes no further turns."""


@dataclass
class Bench:
    """One run, and all it needs. `build` and `clock` are replaced in tests."""

    model: LoadedModel
    entries: Sequence[Entry]
    shape: Shape
    rounds: int
    machine: Mapping[str, Any]
    watch: Watch
    out: Path | None = None
    build: Callable[..., Any] = lineage.build
    clock: Callable[[], float] = time.perf_counter
    records: list[Record] = field(init=False)
    interrupted: bool = False

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(f"rounds must be at least 1, got {self.rounds}")
        longest = self.shape.isl + max(self.shape.output)
        if longest > self.model.config.max_position_embeddings:
            raise ValueError(f"isl {self.shape.isl} + osl {max(self.shape.output)} = {longest} tokens is over the "
                             f"model's {self.model.config.max_position_embeddings}")
        self.records = [Record(entry, workload(self.model, self.shape, entry.width), row_hash(entry.row))
                        for entry in self.entries]

    def run(self) -> Result:
        """All rounds; an exception costs the row that raised it, Ctrl-C ends the run. Returns what is saved."""
        gc.freeze()   # or Python walks every object of torch in mid-pass, and that pause is in some p95
        try:
            for round_ in range(self.rounds):
                for record in rotated(self.records, round_):
                    if record.stopped is None:
                        self._try_turn(record, round_)
                        self._save()
        except KeyboardInterrupt:
            self.interrupted = True
        finally:
            gc.unfreeze()
        self._save()
        return self.result()

    def _try_turn(self, record: Record, round_: int) -> None:
        try:
            self._turn(record, round_)
        except Exception as error:
            record.stopped = " ".join(f"{type(error).__name__}: {error}".split())
            self.watch.stopped(record.entry.row.name, record.entry.width, record.stopped)
        gc.collect()   # the engine is gone: give its memory back before the next one asks

    def _turn(self, record: Record, round_: int) -> None:
        row, width = record.entry.row, record.entry.width
        engine = self.build(row, self.model, **({} if width == 1 else {"max_num_seqs": width}))
        longest = self.shape.isl + max(self.shape.output)
        if longest > getattr(engine, "max_model_len", longest):
            raise ValueError(f"isl + osl = {longest} tokens is over the engine's max_model_len {engine.max_model_len}")
        record.linear_path = getattr(engine, "linear_path", None)
        drive(engine, record.load.requests("warmup"), width, self.clock)
        taken: Result = {"raw": {}}
        for what in PASSES:
            requests = record.load.requests(what)
            wanted = {request.request_id: request.params.max_tokens for request in requests}
            engine.counters = type(engine.counters)()
            traces = drive(engine, requests, 1 if what == "latency" else None, self.clock)
            self._count(record, what, asdict(engine.counters))
            taken[what] = metrics.latency(traces, wanted) if what == "latency" else metrics.throughput(traces, wanted)
            taken["raw"][what] = [raw(trace, traces[0].added_at) for trace in traces]
            record.failed += [line for line in metrics.failures(traces, wanted) if line not in record.failed]
            for trace in traces:
                record.outputs.setdefault(trace.request_id, trace.token_ids)
            self.watch.passed(row.name, width, round_, what, taken[what][_headline(what)])
        step = self._step(record)
        taken["linear_ms"] = ceilings.linear_ms(engine, self.model, max(1, round(step.tokens))) if step else None
        record.rounds.append(taken)

    def _count(self, record: Record, what: str, counters: dict[str, int]) -> None:
        """Keep a pass's counters. They depend on nothing but row and prompts, so rounds must agree."""
        if record.counters.setdefault(what, counters) != counters:
            raise RuntimeError(f"the {what} pass counted {counters}, the first round {record.counters[what]}")

    def _step(self, record: Record) -> ceilings.Step | None:
        lengths = [self.shape.output_length(i) for i in range(len(record.load.latency))]
        return ceilings.mean_step(record.counters["latency"], len(lengths), self.shape.isl, mean(lengths))

    def result(self) -> Result:
        """The result JSON of what is finished so far."""
        done = [record for record in self.records if record.rounds]
        rows = [self._row(record, done[0]) for record in done]
        sizes = ceilings.Sizes.of(self.model.config, self.model.dtype)
        widest = max(self.records, key=lambda record: len(record.load.throughput)).load
        result: Result = {
            "schema": 1, "shape": self.shape.name, "date": date.today().isoformat(), "rounds": self.rounds,
            "machine": dict(self.machine), "versions": versions(),
            "model": {"name": self.model.name, "parameters": sizes.parameters, "weight_bytes": sizes.weight_bytes,
                      "dtype": str(self.model.dtype).removeprefix("torch.")},
            "code_hash": total_hash(row["code_hash"] for row in rows),
            "workload": {"shape": self.shape.name, "isl": self.shape.isl, "osl": self.shape.osl,
                         "latency_prompts": len(widest.latency), "throughput_prompts": len(widest.throughput),
                         "warmup_prompts": len(widest.warmup), "decoding": "greedy, forced length",
                         "prompt_hash": widest.prompt_hash},
            "rows": rows,
            "skipped": [{"name": record.entry.row.name, "width": record.entry.width, "reason": record.stopped}
                        for record in self.records if record.stopped and not record.rounds],
        }
        return result | ({"interrupted": True} if self.interrupted else {})

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
        for key, value in (("linear_path", record.linear_path), ("stopped", record.stopped)):
            if value is not None:
                out[key] = value
        return out

    def _save(self) -> None:
        if self.out is not None and any(record.rounds for record in self.records):   # keep an older file till then
            save(self.result(), self.out)


def rotated(records: Sequence[Record], round_: int) -> list[Record]:
    """The order of a round: each starts one entry later than the one before."""
    start = round_ % len(records)
    return [*records[start:], *records[:start]]


def raw(trace: Trace, start: float) -> Result:
    """A trace with its times in seconds since the pass began, to the microsecond."""
    return {**asdict(trace), "added_at": round(trace.added_at - start, 6),
            "events": [[round(at - start, 6), tokens] for at, tokens in trace.events]}


def differing(outputs: Mapping[str, list[int]], first: Mapping[str, list[int]]) -> dict[str, int]:
    """Of the prompts that this row and the first one both ran, how many gave other tokens."""
    shared = outputs.keys() & first.keys()
    return {"differ": sum(outputs[key] != first[key] for key in shared), "prompts": len(shared)}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package, distribution in (("torch", "torch"), ("transformers", "transformers"),
                                  ("liteinfer", "liteinfer-course")):
        try:
            found[package] = version(distribution)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def save(result: Result, path: Path) -> None:
    """Write the result whole or not at all, whenever the process is stopped."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, path)


def without_raw(result: Result) -> Result:
    """A copy without the timestamps: what is committed."""
    rows = [{**row, "rounds": [{key: value for key, value in taken.items() if key != "raw"}
                               for taken in row["rounds"]]} for row in result["rows"]]
    return {**result, "rows": rows}


def _headline(what: str) -> str:
    return "itl_p50_ms" if what == "latency" else "tok_s"
