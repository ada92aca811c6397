"""The prompts of the speculative table: data/speculative.json, chat messages of three kinds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from liteinfer.loading import LoadedModel

CHATS = Path(__file__).parent / "data" / "speculative.json"
KINDS = ("code", "json", "conversation")

Messages = list[dict[str, str]]
Chats = dict[str, list[Messages]]


def all_chats() -> Chats:
    """Every prompt's messages, by kind."""
    data = json.loads(CHATS.read_text(encoding="utf-8"))
    return {kind: [chat["messages"] for chat in data[kind]] for kind in KINDS}


def chosen(kinds: str, limit: int | None = None) -> Chats:
    """The first `limit` prompts (all) of the kinds in "code,json", in the table's order.

    Raises:
        ValueError: an unknown kind, or a limit below 1.
    """
    names = {name.strip() for name in kinds.split(",")}
    if unknown := sorted(names - set(KINDS)):
        raise ValueError(f"unknown kind {unknown[0]!r}; the kinds are {', '.join(KINDS)}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    return {kind: chats[:limit] for kind, chats in all_chats().items() if kind in names}


def encode(model: LoadedModel, chats: Mapping[str, Sequence[Messages]]) -> dict[str, list[list[int]]]:
    """Token ids through the model's chat template. Raises ValueError for a model without one."""
    return {kind: [model.encode_chat(messages) for messages in each] for kind, each in chats.items()}
