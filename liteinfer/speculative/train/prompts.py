"""Prompts to train on: thousands, drawn from a small grammar of templates and slots, and the reader's own."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

KINDS = ("code", "json", "conversation")
HERE = Path(__file__).parent
SLOT = re.compile(r"\{\{|\}\}|\{(\w+)(?::(\w+))?\}")


@dataclass(frozen=True)
class Prompt:
    """What a user might say, and what kind of thing it is."""

    kind: str
    text: str


class Grammar:
    """Templates of each kind. `{slot}` is one of the slot's options, whose own slots are filled likewise.

    `{slot:label}` is the same everywhere in a prompt; `{{` and `}}` are braces.

        templates  "Greet {name:a}, and ask {name:a} the time."   slot name: Ada, Bo
        prompt     "Greet Bo, and ask Bo the time."
    """

    def __init__(self, templates: Mapping[str, Sequence[str]], slots: Mapping[str, Sequence[str]]) -> None:
        self.templates, self.slots = templates, slots

    def draw(self, kind: str, seed: str) -> Prompt:
        """The prompt of this kind that a seed stands for."""
        return Prompt(kind, self._fill(rng := random.Random(seed), rng.choice(self.templates[kind]), {}))

    def _fill(self, rng: random.Random, text: str, chosen: dict[str, str]) -> str:
        def option(found: re.Match[str]) -> str:
            slot, label = found.groups()
            if slot is None:
                return found[0][0]
            if label is None:
                return self._fill(rng, rng.choice(self.slots[slot]), chosen)
            key = f"{slot}:{label}"
            if key not in chosen:
                chosen[key] = self._fill(rng, rng.choice(self.slots[slot]), chosen)
            return chosen[key]

        return SLOT.sub(option, text)


def shipped() -> Grammar:
    """The grammar of templates.json."""
    data = json.loads((HERE / "templates.json").read_text(encoding="utf-8"))
    return Grammar({kind: data[kind] for kind in KINDS}, data["slots"])


def held_out() -> list[Prompt]:
    """Prompts that no template made: what a head is evaluated on."""
    data = json.loads((HERE / "held_out.json").read_text(encoding="utf-8"))
    return [Prompt(kind, text) for kind in KINDS for text in data[kind]]


def own(path: Path) -> list[Prompt]:
    """The reader's own prompts, one a line. Raises ValueError for a file that has none."""
    texts = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not texts:
        raise ValueError(f"prompts {path} has no line with a prompt in it")
    return [Prompt("own", text) for text in texts]


def prompt(number: int, seed: int, grammar: Grammar, mine: Sequence[Prompt] = ()) -> Prompt:
    """The prompt of this number: the kinds take turns, and each of the reader's own prompts comes first, once."""
    if number < len(mine):
        return mine[number]
    return grammar.draw(KINDS[number % len(KINDS)], f"{seed}/{number}")
