"""What the measurements share that are no rows of the ladder: turns, one result file, rows chosen by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from benchmarks.codehash import kind_hash
from benchmarks.result_file import Result, head, save
from benchmarks.run import BLOCK_SIZE, Watch, take_turns
from liteinfer import lineage
from liteinfer.lineage import LADDER, Row
from liteinfer.loading import LoadedModel
from liteinfer.request import Request, SamplingParams

T = TypeVar("T")


class Measurement(ABC):
    """Things take turns, round after round; what they have shown becomes a result of this kind."""

    kind: ClassVar[str]
    model: LoadedModel
    rounds: int
    machine: Mapping[str, Any]
    watch: Watch
    out: Path | None
    interrupted: bool

    @property
    @abstractmethod
    def turns(self) -> Sequence[Any]:
        """What takes turns: each has `label`, `rounds` and `stopped`."""

    @property
    def listed(self) -> Sequence[Any]:
        """What is listed as skipped if it has shown nothing: what takes turns."""
        return self.turns

    @abstractmethod
    def _turn(self, one: Any, round_: int) -> None:
        """A turn of one of them. What it raises costs it its further turns."""

    @abstractmethod
    def result(self) -> Result:
        """The result JSON of what is finished so far."""

    def run(self) -> Result:
        """All rounds; Ctrl-C ends the run. Returns what is saved."""
        self.interrupted = take_turns(self.turns, self.rounds, self._turn, self.watch)
        result = self.result()
        if self.out is not None and result["rows"]:
            save(result, self.out)
        return result

    def framed(self, **figures: Any) -> Result:
        """A result with these figures: what every result of a kind begins and ends with."""
        skipped = [self.skip(one) for one in self.listed if one.stopped and not one.rounds]
        return {**head(self.model, self.machine, self.kind), "rounds": self.rounds, **figures, "skipped": skipped,
                "code_hash": kind_hash(self.kind)} | ({"interrupted": True} if self.interrupted else {})

    def skip(self, one: Any) -> Result:
        """How one that has shown nothing is listed."""
        return {"name": one.label[0], "reason": one.stopped}


def chosen_rows(names: str, able: Callable[[Row], bool], refusal: str) -> list[Row]:
    """The rows of these names, in ladder order.

    Raises:
        ValueError: a name no row has, a row that is not `able` (it "`refusal`" and the names of those that are),
            or one that this machine cannot run.
    """
    chosen = [lineage.find(name.strip()) for name in names.split(",")]
    for row in chosen:
        if not able(row):
            raise ValueError(f"{row.name} {refusal} {', '.join(other.name for other in LADDER if able(other))}")
        if reason := lineage.missing(row):
            raise ValueError(f"this machine cannot run {row.name}: it {reason}")
    return [row for row in LADDER if row in chosen]


def requests(name: str, prompts: Sequence[list[int]], output: int, ignore_eos: bool = True) -> list[Request]:
    """Greedy, and of a forced length unless they may end at EOS."""
    return [Request(f"{name}-{i}", list(prompt), SamplingParams(max_tokens=output, seed=0, ignore_eos=ignore_eos))
            for i, prompt in enumerate(prompts)]


def pool_blocks(lengths: Sequence[int]) -> int:
    """Blocks that hold sequences of these lengths to their ends, and what the watermark keeps free: none is evicted."""
    most = sum(-(-length // BLOCK_SIZE) for length in lengths)
    return most + most // 50 + 1


def same_counts(first: T, now: T) -> T:
    """What was counted, the same in every round. Raises RuntimeError if it is not; an empty `first` is no round's."""
    if first and first != now:
        raise RuntimeError(f"counted {now}, the first round {first}")
    return now
