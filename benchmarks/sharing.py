"""What a prefix cache finds: conversations, many questions after the same examples, and prompts with nothing in common.

A workload is a number of conversations. All of them say their next prompt at once, and
only when every answer is there the next. A prompt is the whole conversation so far:
the ids of the last prompt, of its answer, and of what the user says next. So the
number of tokens that a cache can find does not depend on what the model answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import metrics
from benchmarks.codehash import row_hash
from benchmarks.loop import Trace, drive
from benchmarks.measurement import Measurement, chosen_rows, pool_blocks, requests, same_counts
from benchmarks.radix import forget
from benchmarks.result_file import Result
from benchmarks.run import BLOCK_SIZE, Watch, check_fits, differing
from benchmarks.scenarios import Scenario
from benchmarks.stopwatch import KV_CALLS, Stopwatch
from benchmarks.workloads import Shape, take
from liteinfer import lineage
from liteinfer.lineage import Row
from liteinfer.loading import LoadedModel

PASS = "wall"            # what the watch is told, in seconds
WARMUP = (4, 32, 4)      # prompts, their tokens, tokens of their answers
USED = 64              # windows of the text that the workloads may use: those after them are the warm-up's
COUNTED = ("prompt_tokens", "prefix_hit_tokens", "tokens_computed", "forward_passes", "preemptions")


@dataclass
class Case:
    """A row on a workload, and what it has shown so far."""

    row: Row
    scenario: Scenario
    code_hash: str                 # of the row's code as it was when the run began
    counters: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, list[int]] = field(default_factory=dict)   # the first round's tokens by request id
    pool: str = ""
    rounds: list[Result] = field(default_factory=list)
    stopped: str | None = None     # why it takes no further turns

    @property
    def label(self) -> tuple[str, int]:
        return title(self.row, self.scenario), 1


@dataclass
class Sharing(Measurement):
    """One run, and all it needs. `build` and `clock` are replaced in tests."""

    kind = "sharing"

    model: LoadedModel
    rows: Sequence[Row]
    scenarios: Sequence[Scenario]
    rounds: int
    machine: Mapping[str, Any]
    watch: Watch
    out: Path | None = None
    build: Callable[..., Any] = lineage.build
    clock: Callable[[], float] = time.perf_counter
    cases: list[Case] = field(init=False)
    warmup: list[list[int]] = field(init=False)
    interrupted: bool = False

    def __post_init__(self) -> None:
        for scenario in self.scenarios:
            output = scenario.output * scenario.turns
            check_fits(self.model, Shape(scenario.name, scenario.longest - output, (output, output), 1, {1: 1}))
        hashes = {row.name: row_hash(row) for row in self.rows}
        self.cases = [Case(row, scenario, hashes[row.name]) for scenario in self.scenarios for row in self.rows]
        self.warmup = take(self.model, WARMUP[1], USED + WARMUP[0])[USED:]

    @property
    def num_blocks(self) -> int:
        """All conversations of a workload to their ends."""
        return max(pool_blocks(scenario.lengths) for scenario in self.scenarios)

    @property
    def turns(self) -> Sequence[Case]:
        return self.cases

    def _turn(self, case: Case, round_: int) -> None:
        engine = self.build(case.row, self.model, block_size=BLOCK_SIZE, num_blocks=self.num_blocks)
        case.pool = str(engine.pool_size)
        drive(engine, requests("warmup", self.warmup, WARMUP[2]), None, self.clock)
        forget(engine)
        engine.counters = type(engine.counters)()
        kv = Stopwatch(self.clock).watch(engine.scheduler.kv, *KV_CALLS)
        traces, wall = self._converse(engine, case.scenario)
        counters = {key: count for key, count in asdict(engine.counters).items() if key in COUNTED}
        case.counters = same_counts(case.counters, counters)
        for trace in traces:
            case.outputs.setdefault(trace.request_id, trace.token_ids)
        ttft = metrics.latency(traces, {trace.request_id: case.scenario.output for trace in traces})["ttft_p50_ms"]
        case.rounds.append({"ttft_p50_ms": ttft, "wall_s": wall, "kv_ms": kv.seconds * 1000})
        self.watch.passed(*case.label, round_, PASS, wall)

    def _converse(self, engine: Any, scenario: Scenario) -> tuple[list[Trace], float]:
        """All turns of all conversations; the traces, and the seconds from first to last token event of the turns."""
        every, wall, prompts = list[Trace](), 0.0, scenario.openings
        for turn in range(scenario.turns):
            asked = requests(f"turn-{turn}", prompts, scenario.output)
            traces = drive(engine, asked, None, self.clock)
            wanted = {request.request_id: scenario.output for request in asked}
            if failed := metrics.failures(traces, wanted):
                raise RuntimeError(failed[0])
            every += traces
            wall += metrics.throughput(traces, wanted)["wall_s"] or 0.0
            prompts = [prompt + trace.token_ids + said for prompt, trace, said
                       in zip(prompts, traces, scenario.said_after(turn), strict=True)]
        return every, wall

    def result(self) -> Result:
        """The result JSON of what is finished so far."""
        done = [case for case in self.cases if case.rounds]
        return self.framed(
            pool=done[0].pool if done else None,
            workloads=[{"name": scenario.name, "what": scenario.what, "prompt_hash": scenario.prompt_hash}
                       for scenario in self.scenarios],
            rows=[self._row(case, next(first for first in done if first.scenario is case.scenario)) for case in done])

    def _row(self, case: Case, first: Case) -> Result:
        """`first`: the first row on the same workload, with which this one is compared round by round."""
        ttft, wall = ([taken[key] for taken in case.rounds] for key in ("ttft_p50_ms", "wall_s"))
        return {"name": case.row.name, "workload": case.scenario.name, "prompts": case.scenario.prompts,
                **case.counters, "hit_rate": case.counters["prefix_hit_tokens"] / case.counters["prompt_tokens"],
                "ttft_p50_ms": median(ttft), "ttft_range": [min(ttft), max(ttft)],
                "wall_s": median(wall), "wall_range": [min(wall), max(wall)],
                "ttft_gain": gain(case, first, "ttft_p50_ms"), "wall_gain": gain(case, first, "wall_s"),
                "kv_ms": median(taken["kv_ms"] for taken in case.rounds),
                "kv_share": median(taken["kv_ms"] / 1000 / taken["wall_s"] for taken in case.rounds),
                "differs_from_first": differing(case.outputs, first.outputs), "rounds": case.rounds,
                "code_hash": case.code_hash, **({"stopped": case.stopped} if case.stopped else {})}


def title(row: Row, scenario: Scenario) -> str:
    return f"{row.name}, {scenario.name}"


def gain(case: Case, first: Case, key: str) -> float:
    """How many times less the case takes than the first row: the median over rounds."""
    pairs = zip(first.rounds, case.rounds, strict=False)   # Ctrl-C: fewer of one
    return median(theirs[key] / mine[key] for theirs, mine in pairs)


def scheduling(names: str) -> list[Row]:
    """The rows of these names. Raises ValueError as `chosen_rows` does, and for a row without a KV manager."""
    engine = lineage.find("continuous").engine
    return chosen_rows(names, lambda row: row.engine == engine, "has no KV manager; the rows that have one:")
