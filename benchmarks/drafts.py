"""Who guesses tokens, by name: what the measurements that draft share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from liteinfer.speculative.choose import MakeDrafter, drafter
from liteinfer.speculative.drafter import Pause


@dataclass(frozen=True)
class Variant:
    """A draft as the command line names it: "ngram@2+pause" is n-grams, up to 2 tokens, and the pause rule."""

    name: str
    k: int
    pause: Pause | None = None

    def __str__(self) -> str:
        return f"{shown(self.name)}@{self.k}{'+pause' if self.pause else ''}"

    @property
    def row(self) -> str:
        """The ladder's row whose code it runs."""
        return "liteinfer-ngram" if self.name == "ngram" else "liteinfer-speculative"

    def drafter(self) -> MakeDrafter:
        return drafter(self.name, self.k, self.pause)


def variants(text: str, pause_cost: float) -> list[Variant]:
    """The drafts in "ngram@4,early-exit:15@4+pause", in this order.

    Raises:
        ValueError: something that is no draft, one that is there twice, or a cost below 0.
    """
    if not pause_cost >= 0:
        raise ValueError(f"pause-cost must be at least 0, got {pause_cost:g}")
    found = [_variant(word.strip(), Pause(pause_cost)) for word in text.split(",")]
    if twice := next((one for one in found if found.count(one) > 1), None):
        raise ValueError(f"drafts has {twice} twice")
    for one in found:
        one.drafter()   # refuses what needs no model to be refused
    return found


def _variant(word: str, pause: Pause) -> Variant:
    name, _, number = word.removesuffix("+pause").rpartition("@")
    if not name or not number.isdecimal():
        raise ValueError(f"drafts must be NAME@K or NAME@K+pause, separated by commas, got {word!r}")
    return Variant(name, int(number), pause if word.endswith("+pause") else None)


def named(draft: str) -> MakeDrafter:
    """The drafter of this name, with the usual number of tokens. Raises ValueError for one that is none."""
    return drafter(draft)


def shown(draft: str) -> str:
    """A draft's name in a result: of a folder only its own, not where it lies."""
    first, plus, then = draft.partition("+")
    if plus and not Path(draft).is_dir():
        return f"{shown(first)}+{shown(then)}"
    return Path(draft).resolve().name if Path(draft).is_dir() else draft


def check_named(draft: str | None, needed: Sequence[str]) -> None:
    """Raises ValueError for a draft that none of the rows asks for (`needed` has those that do), or that is none."""
    if draft is not None and not needed:
        raise ValueError(f"draft {draft!r} is given, but none of the chosen rows needs a draft model")
    if draft is not None:
        named(draft)
