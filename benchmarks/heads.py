"""What a draft head's size buys: how often it is right, from its card, and what a guess of it costs, measured here."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.loop import Trace, drive
from benchmarks.measurement import Measurement, pool_blocks, requests
from benchmarks.result_file import Result
from benchmarks.run import BLOCK_SIZE, Watch, check_fits
from benchmarks.stopwatch import Stopwatch
from benchmarks.workloads import Shape, take
from liteinfer import lineage
from liteinfer.loading import LoadedModel
from liteinfer.speculative.draft_head import DraftHeadDrafter, num_layers
from liteinfer.speculative.head_files import load_head, read_card

K = 4
PASS = "guess"            # what the watch is told, in ms
ISL, OSL, WARMUP = 64, 48, 8


@dataclass
class Head:
    """A head, and what it has shown so far: a round is a plain step's ms, and those of a guess."""

    name: str
    card: Mapping[str, Any]
    weights: Mapping[str, Any]
    rounds: list[Result] = field(default_factory=list)
    stopped: str | None = None     # why it takes no further turns

    @property
    def label(self) -> tuple[str, int]:
        return self.name, 1


@dataclass
class Heads(Measurement):
    """One run, and all it needs. `build` and `clock` are replaced in tests.

    Args:
        folders: of the heads, made by python -m liteinfer.speculative.train for this model.
    """

    kind = "heads"

    model: LoadedModel
    folders: Sequence[Path]
    rounds: int
    machine: Mapping[str, Any]
    watch: Watch
    out: Path | None = None
    build: Callable[..., Any] = lineage.build
    clock: Callable[[], float] = time.perf_counter
    heads: list[Head] = field(init=False)
    interrupted: bool = False

    def __post_init__(self) -> None:
        check_fits(self.model, Shape("heads", ISL, (OSL, OSL), 1, {1: 1}))
        self.heads = [Head(folder.resolve().name, read_card(folder), load_head(folder, self.model))
                      for folder in self.folders]

    @property
    def turns(self) -> Sequence[Head]:
        return self.heads

    def _turn(self, head: Head, round_: int) -> None:
        times = [at for at, _ in self._decode(self._engine()).events]
        plain_ms = median(after - before for before, after in pairwise(times)) * 1000
        engine = self._engine(partial(DraftHeadDrafter, weights=head.weights, num_speculative_tokens=K))
        watch = Stopwatch(self.clock).watch(engine.drafter, "guess")
        self._decode(engine)
        drafted = engine.counters.drafted_tokens
        head.rounds.append({"plain_ms": plain_ms, "guess_ms": watch.seconds * 1000 / drafted, "drafted": drafted})
        self.watch.passed(*head.label, round_, PASS, head.rounds[-1]["guess_ms"])

    def _engine(self, drafter: Any = None) -> Any:
        """One request at a time, warmed up, its counters at 0."""
        drafting = {} if drafter is None else {"drafter": drafter}
        engine = self.build(lineage.find("radix"), self.model, max_num_seqs=1, max_model_len=ISL + OSL,
                            block_size=BLOCK_SIZE, num_blocks=pool_blocks([ISL + OSL] * 2), **drafting)
        drive(engine, requests("warmup", take(self.model, ISL // 2, 1), WARMUP), None, self.clock)
        engine.counters = type(engine.counters)()
        return engine

    def _decode(self, engine: Any) -> Trace:
        trace, = drive(engine, requests("prompt", take(self.model, ISL, 1), OSL), None, self.clock)
        if trace.error:
            raise RuntimeError(trace.error)
        return trace

    def result(self) -> Result:
        """The result JSON of what is finished so far."""
        return self.framed(k=K, isl=ISL, osl=OSL, rows=[self._row(head) for head in self.heads if head.rounds])

    def _row(self, head: Head) -> Result:
        costs = [taken["guess_ms"] / taken["plain_ms"] for taken in head.rounds]
        numbers = sum(tensor.numel() for name, tensor in head.weights.items() if name != "tokens")
        return {"name": head.name, "layers": num_layers(head.weights),
                "intermediate_size": head.weights["layers.0.mlp.gate_proj.weight"].shape[0],
                "vocab_size": len(head.weights["tokens"]), "parameters": numbers,
                "tokens": head.card["tokens"], "steps": head.card["steps"], "acceptance": head.card["acceptance"],
                "plain_ms": median(taken["plain_ms"] for taken in head.rounds),
                "guess_ms": median(taken["guess_ms"] for taken in head.rounds),
                "cost": median(costs), "cost_range": [min(costs), max(costs)],
                "rounds": head.rounds,
                **({"stopped": head.stopped} if head.stopped else {})}
