"""The radix table: time to first token after a long shared prefix, not in the cache and in it.

In each round every prefix length gets an engine of its own, and a warm-up on other
text of the same length. Then the tree is emptied, and two prompts run one after the
other: the prefix and a question (cold), the prefix and another question (cached).
Both are timed to their first token, which is their only one.
"""

from __future__ import annotations

import pkgutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import metrics
from benchmarks.codehash import row_hash
from benchmarks.loop import drive
from benchmarks.measurement import Measurement, chosen_rows
from benchmarks.result_file import Result
from benchmarks.run import BLOCK_SIZE, Watch
from benchmarks.workloads import LONGEST_ISL, take
from liteinfer import lineage
from liteinfer.lineage import Row
from liteinfer.loading import LoadedModel
from liteinfer.request import Request, SamplingParams

PASS = "TTFT"   # what the watch is told, with the cached one in ms
# The mini-infer documentation's own figures, on an RTX 3050 6 GB laptop GPU: TTFT in ms, standard and cached.
PUBLISHED = {256: (48.2, 6.1), 512: (98.4, 8.4), 1024: (210.5, 11.2), 2048: (465.0, 14.8)}


@dataclass
class Line:
    """A row at a prefix length, and what it has shown so far."""

    row: Row
    prefix: list[int]
    other: list[int]               # as long; for the warm-up
    code_hash: str                 # of the row's code as it was when the run began
    tokens: tuple[int, int] = (0, 0)   # computed, cold and cached
    pool: str = ""
    rounds: list[Result] = field(default_factory=list)
    stopped: str | None = None     # why it takes no further turns

    @property
    def label(self) -> tuple[str, int]:
        return title(self.row, len(self.prefix)), 1


@dataclass
class Prefixes(Measurement):
    """One run, and all it needs. `build` and `clock` are replaced in tests.

    Args:
        lengths: of the prefixes, in tokens; multiples of the block size, so that all of a prefix is shared.
        question: tokens of the question after it.
    """

    kind = "radix"

    model: LoadedModel
    rows: Sequence[Row]
    lengths: Sequence[int]
    question: int
    rounds: int
    machine: Mapping[str, Any]
    watch: Watch
    out: Path | None = None
    build: Callable[..., Any] = lineage.build
    clock: Callable[[], float] = time.perf_counter
    lines: list[Line] = field(init=False)
    questions: list[list[int]] = field(init=False)   # the cold one's and the cached one's
    interrupted: bool = False

    def __post_init__(self) -> None:
        limit = self.model.config.max_position_embeddings
        if self.longest > limit:
            raise ValueError(f"prefix {max(self.lengths)} + question {self.question} + 1 = {self.longest} tokens is "
                             f"over the model's {limit}")
        hashes = {row.name: row_hash(row) for row in self.rows}
        self.questions = take(self.model, self.question, 2)
        texts = [take(self.model, length, 4)[2:] for length in self.lengths]   # the first two are the questions'
        self.lines = [Line(row, prefix, other, hashes[row.name]) for row in self.rows for prefix, other in texts]

    @property
    def longest(self) -> int:
        return max(self.lengths) + self.question + 1

    @property
    def num_blocks(self) -> int:
        """The longest prefix once, and both questions: nothing is ever evicted."""
        return max(self.lengths) // BLOCK_SIZE + 2 * -(-(self.question + 1) // BLOCK_SIZE)

    @property
    def turns(self) -> Sequence[Line]:
        return self.lines

    def _turn(self, line: Line, round_: int) -> None:
        engine = self.build(line.row, self.model, max_model_len=self.longest, block_size=BLOCK_SIZE,
                            num_blocks=self.num_blocks)
        line.pool = str(engine.pool_size)
        self._pair(engine, line.other)
        (cold, cold_tokens), (cached, cached_tokens) = self._pair(engine, line.prefix)
        line.tokens, due = (cold_tokens, cached_tokens), (len(line.prefix) + self.question, self.question)
        if line.tokens != due:
            raise RuntimeError(f"cold and cached computed {line.tokens} tokens, not {due}")
        line.rounds.append({"cold_ms": cold, "cached_ms": cached})
        self.watch.passed(*line.label, round_, PASS, cached)

    def _pair(self, engine: Any, prefix: list[int]) -> list[tuple[float, int]]:
        """TTFT in ms, and tokens computed, of two prompts with this prefix: the first finds nothing, the second it."""
        forget(engine)
        return [self._first_token(engine, prefix + question) for question in self.questions]

    def _first_token(self, engine: Any, prompt: list[int]) -> tuple[float, int]:
        engine.counters = type(engine.counters)()
        request = Request("prefix", prompt, SamplingParams(max_tokens=1, ignore_eos=True))
        trace, = drive(engine, [request], None, self.clock)
        ttft = metrics.ttft(trace)
        if ttft is None or trace.error:
            raise RuntimeError(metrics.failure(trace, 1))
        return ttft * 1000, engine.counters.tokens_computed

    def result(self) -> Result:
        """The result JSON of what is finished so far."""
        done = [line for line in self.lines if line.rounds]
        rows = [self._row(line) for line in done]
        mine = [row["cached_ms"] for row in rows if row["name"] == rows[0]["name"]]
        return self.framed(question=self.question, pool=done[0].pool if done else None, rows=rows,
                           growth=mine[-1] / mine[0] if len(mine) > 1 else None)

    def _row(self, line: Line) -> Result:
        cold, cached = ([taken[key] for taken in line.rounds] for key in ("cold_ms", "cached_ms"))
        speedups = [a / b for a, b in zip(cold, cached, strict=True)]
        return {"name": line.row.name, "prefix": len(line.prefix), "cold_ms": median(cold),
                "cold_range": [min(cold), max(cold)], "cached_ms": median(cached),
                "cached_range": [min(cached), max(cached)], "speedup": median(speedups),
                "speedup_range": [min(speedups), max(speedups)], "cold_tokens": line.tokens[0],
                "cached_tokens": line.tokens[1], "published": published(len(line.prefix)), "rounds": line.rounds,
                "code_hash": line.code_hash, **({"stopped": line.stopped} if line.stopped else {})}


def title(row: Row, prefix: int) -> str:
    return f"{row.name}, prefix {prefix:,}"


def published(prefix: int) -> Result | None:
    """What mini-infer reports for this prefix length, None if nothing."""
    if prefix not in PUBLISHED:
        return None
    cold, cached = PUBLISHED[prefix]
    return {"cold_ms": cold, "cached_ms": cached, "speedup": round(cold / cached, 1)}


def forget(engine: Any) -> None:
    """Empty the engine's prefix cache, if it has one. Raises RuntimeError if a block is still held."""
    if hasattr(engine.scheduler.kv, "reset"):
        engine.scheduler.kv.reset()
    if held := engine.cache.pool.num_used:
        raise RuntimeError(f"{held} KV blocks are still held: what follows would not start cold")


def check_lengths(lengths: Sequence[int], question: int, rounds: int) -> None:
    """Raises ValueError for what makes no table; the message names the setting and the numbers."""
    for length in lengths:
        if length < BLOCK_SIZE or length % BLOCK_SIZE:
            raise ValueError(f"prefixes must be multiples of the block size {BLOCK_SIZE}, got {length}")
        if length > LONGEST_ISL:
            raise ValueError(f"prefixes must be at most {LONGEST_ISL}, got {length}")
    for setting, value in (("question", question), ("rounds", rounds)):
        if value < 1:
            raise ValueError(f"{setting} must be at least 1, got {value}")
    if question > LONGEST_ISL:
        raise ValueError(f"question must be at most {LONGEST_ISL}, got {question}")


def caches_prefixes(row: Row) -> bool:
    """Whether the row's KV manager keeps what requests leave behind, and can forget it."""
    manager = row.parts.get("kv_manager")
    return manager is not None and hasattr(pkgutil.resolve_name(manager.removesuffix("()")), "reset")


def caching(names: str) -> list[Row]:
    """The rows of these names. Raises ValueError as `chosen_rows` does, and for a row without a prefix cache."""
    return chosen_rows(names, caches_prefixes, "has no prefix cache; the table is there for")
