"""What Python costs in a step: scheduling and bookkeeping, measured with a runner that does no arithmetic.

Everything but the forward is the engine's own code, over a tiny model whose 64
logits are all zero: no time goes into numbers. The prompts share nothing, so the
prefix cache is all cost and no gain. Only steps in which every sequence decodes are
counted; all figures are medians over them, so that the parts need not add up to the
whole. Prompts have all lengths modulo the block size, since what the prefix cache
does in a step is for the blocks that become full in it: about 2 of 32 sequences'.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.codehash import row_hash
from benchmarks.measurement import Measurement
from benchmarks.radix import forget
from benchmarks.result_file import Result
from benchmarks.run import BLOCK_SIZE, Watch, check_fits
from benchmarks.stopwatch import KV_CALLS, Stopwatch
from benchmarks.workloads import Shape, take
from liteinfer import lineage
from liteinfer.lineage import Row
from liteinfer.loading import LoadedModel, tiny_model
from liteinfer.model.layout import Layout
from liteinfer.request import Request, SamplingParams
from liteinfer.runner import Runner, StepOutput

PASS = "step"   # what the watch is told, in microseconds
PARTS = ("step_us", "schedule_us", "layout_us", "sampling_us", "update_us")
MICRO = 1e6


class NoArithmetic(Runner):
    """Lays out the step and fills the block tables as ever; then says that all tokens are equally likely."""

    def forward(self, ids: Tensor, layout: Layout, logits_at: Tensor) -> StepOutput:
        return StepOutput(torch.zeros(len(logits_at), self.llama.config.vocab_size), torch.empty(0))


@dataclass
class Case:
    """A row, and what it has shown so far."""

    row: Row
    code_hash: str                 # as it was when the run began
    rounds: list[Result] = field(default_factory=list)
    stopped: str | None = None     # why it takes no further turns

    @property
    def label(self) -> tuple[str, int]:
        return self.row.name, 1


@dataclass
class Overhead(Measurement):
    """One run, and all it needs. `build` and `clock` are replaced in tests."""

    kind = "overhead"

    model: LoadedModel             # whose real step the tree's time is compared with
    rows: Sequence[Row]
    sequences: int
    isl: int
    osl: int
    rounds: int
    machine: Mapping[str, Any]
    watch: Watch
    out: Path | None = None
    build: Callable[..., Any] = lineage.build
    clock: Callable[[], float] = time.perf_counter
    cases: list[Case] = field(init=False)
    tiny: LoadedModel = field(init=False)
    real_step_ms: float | None = None
    interrupted: bool = False

    def __post_init__(self) -> None:
        check_fits(self.model, Shape("overhead", self.isl + BLOCK_SIZE - 1, (self.osl, self.osl), 1, {1: 1}))
        self.tiny = tiny_model(max_position_embeddings=self.longest)
        self.cases = [Case(row, row_hash(row)) for row in self.rows]

    @property
    def longest(self) -> int:
        return self.isl + BLOCK_SIZE - 1 + self.osl

    @property
    def settings(self) -> dict[str, int]:
        """A pool that holds all sequences, and what the watermark keeps free."""
        blocks = self.sequences * -(-self.longest // BLOCK_SIZE)
        return {"max_num_seqs": self.sequences, "max_model_len": self.longest, "block_size": BLOCK_SIZE,
                "num_blocks": blocks + blocks // 50 + 1}

    @property
    def turns(self) -> Sequence[Case]:
        return self.cases

    def run(self) -> Result:
        """The real step, then all rounds. Returns what is saved."""
        real = self.build(self.rows[0], self.model, **self.settings)
        self.real_step_ms = median(step["step_us"] for step in self._decode(real, self.model)) / 1000
        return super().run()

    def _turn(self, case: Case, round_: int) -> None:
        engine = self.build(case.row, self.tiny, runner=NoArithmetic, **self.settings)
        self._decode(engine, self.tiny)                # warm up
        forget(engine)
        parts = {"schedule_us": (engine.scheduler, "schedule"), "layout_us": (engine.runner, "run"),
                 "sampling_us": (engine.drafter, "verify")}
        watches = {part: Stopwatch(self.clock).watch(*call) for part, call in parts.items()}
        steps = self._decode(engine, self.tiny, watches)
        forget(engine)
        kv = {"kv_us": Stopwatch(self.clock).watch(engine.scheduler.kv, *KV_CALLS)}   # its clock would be in the parts
        in_kv = median(step["kv_us"] for step in self._decode(engine, self.tiny, kv))
        if hits := engine.counters.prefix_hit_tokens:
            raise RuntimeError(f"{hits} prompt tokens were found in the prefix cache, and none should")
        for step in steps:
            step["update_us"] = step["step_us"] - sum(step[part] for part in parts)
        case.rounds.append({part: median(step[part] for step in steps) for part in PARTS}
                           | {"kv_us": in_kv, "steps": len(steps)})
        self.watch.passed(*case.label, round_, PASS, case.rounds[-1]["step_us"])

    def _decode(self, engine: Any, model: LoadedModel, watches: Mapping[str, Stopwatch] | None = None
                ) -> list[dict[str, float]]:
        """Run the sequences; microseconds of each step in which all of them decode, and of its parts.

        Raises:
            ValueError: there was no such step: the first were over before the last had begun.
        """
        watches, steps = watches or {}, list[dict[str, float]]()
        asked = self._requests(model)
        for request in asked:
            engine.add(request)
        while engine.has_unfinished():
            decoding = len(engine.scheduler.running) == len(asked) and all(r.output_token_ids for r in asked)
            before, started = {part: watch.seconds for part, watch in watches.items()}, self.clock()
            events = engine.step()
            took = self.clock() - started
            if failed := [event.error for event in events if event.error]:
                raise RuntimeError(failed[0])
            if decoding:
                steps.append({"step_us": took * MICRO} | {part: (watch.seconds - before[part]) * MICRO
                                                          for part, watch in watches.items()})
        if not steps:
            raise ValueError(f"osl {self.osl} is too short: in no step did all {self.sequences} sequences decode")
        return steps

    def _requests(self, model: LoadedModel) -> list[Request]:
        """Of every length modulo the block size, so that about as many blocks become full in every step."""
        params = SamplingParams(max_tokens=self.osl, ignore_eos=True)
        return [Request(str(i), prompt[:self.isl + i % BLOCK_SIZE], params)
                for i, prompt in enumerate(take(model, self.isl + BLOCK_SIZE - 1, self.sequences))]

    def result(self) -> Result:
        """The result JSON of what is finished so far."""
        rows = [self._row(case) for case in self.cases if case.rounds]
        tree = rows[-1]["kv_us"] - rows[0]["kv_us"] if len(rows) > 1 else None
        share = None if tree is None or not self.real_step_ms else tree / 1000 / self.real_step_ms
        return self.framed(sequences=self.sequences, isl=self.isl, osl=self.osl, real_step_ms=self.real_step_ms,
                           tree_us=tree, tree_share=share, rows=rows)

    def _row(self, case: Case) -> Result:
        step = [taken["step_us"] for taken in case.rounds]
        medians = {part: median(taken[part] for taken in case.rounds) for part in (*PARTS, "kv_us")}
        return {"name": case.row.name, **medians, "step_range": [min(step), max(step)],
                "steps": case.rounds[0]["steps"], "rounds": case.rounds, "code_hash": case.code_hash,
                **({"stopped": case.stopped} if case.stopped else {})}


def check_sizes(sequences: int, isl: int, osl: int, rounds: int) -> None:
    """Raises ValueError for what makes no measurement; the message names the setting and the number."""
    for setting, value, least in (("sequences", sequences, 1), ("isl", isl, 1), ("osl", osl, 2), ("rounds", rounds, 1)):
        if value < least:
            raise ValueError(f"{setting} must be at least {least}, got {value}")
