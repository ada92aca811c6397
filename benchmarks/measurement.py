"""What the measurements share that are no rows of the ladder: turns, one result file, rows chosen by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.codehash import kind_hash
from benchmarks.result_file import Result, head, save
from benchmarks.run import Watch, take_turns
from liteinfer import lineage
from liteinfer.lineage import LADDER, Row
from liteinfer.loading import LoadedModel


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
        skipped = [self.skip(one) for one in self.turns if one.stopped and not one.rounds]
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
