"""How much of everything a training run makes, and whom it tells how it goes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from liteinfer.speculative.train.fit import Settings

K = 4                    # tokens of the drafts that acceptance is told of
ANSWER = 160             # tokens of an answer, at most
HELD_OUT_ANSWER = 128
DATA_SHARE = 0.45        # of a run that is given minutes
EVALUATIONS = 10
TIMED_STEPS = 5          # from which a run that is given minutes tells how many there is time for


class Show(Protocol):
    """Is told how a run goes."""

    def stage(self, name: str, total: float) -> None:
        """A stage begins that has so much to do; of training it is told again once it is known."""

    def at(self, done: float) -> None:
        """So much of it is done."""

    def say(self, line: str) -> None:
        """A line worth keeping."""


@dataclass(frozen=True)
class Plan:
    """How much of everything. Minutes, if given, take the place of tokens and steps.

    Args:
        tokens: of the target's answers to train on.
        steps: of training.
        minutes: for all of it together; those of a run that was cut short count too.
    """

    tokens: int = 66_000
    steps: int = 1200
    minutes: float | None = None
    seed: int = 0
    settings: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        for name, least in (("tokens", 1), ("steps", TIMED_STEPS + 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.minutes is not None and not self.minutes > 0:
            raise ValueError(f"minutes must be above 0, got {self.minutes:g}")
