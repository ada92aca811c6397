"""Drafts without a model: what followed the last time these tokens stood here.

Prompt lookup (Saxena 2023; vLLM's "ngram"): the request's last n tokens are
looked for earlier in its own prompt and output, longest n first, and what
followed them the latest time is the draft. The longer the match, the further it
is trusted: for n tokens that match, at most n + 1 are copied.

    5 6 7 8 9 5 6     5 6 matched, so the draft is 7 8 9
    4 4               4 matched, so the draft is 4 4: it runs on into what it copied
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from liteinfer.engines.continuous import ContinuousEngine
from liteinfer.request import Request
from liteinfer.speculative.drafter import Draft, Pause, SpeculativeDrafter


@dataclass
class NgramIndex:
    """Where in a sequence each n-gram ended the last time, for several n; grows with the sequence."""

    sizes: range
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)   # n-gram -> tokens before what followed it
    indexed: int = 0

    def extend(self, ids: list[int]) -> None:
        """Index every n-gram of ids that something follows: never the one at the very end, which is looked up."""
        for end in range(self.indexed + 1, len(ids)):
            for n in self.sizes:
                if n <= end:
                    self.ends[tuple(ids[end - n:end])] = end
        self.indexed = len(ids) - 1

    def follows(self, ids: list[int], count: int) -> list[int]:
        """What followed the longest known n-gram at the end of ids: at most `count` tokens, and n + 1."""
        for n in reversed(self.sizes):
            if n <= len(ids) and (start := self.ends.get(tuple(ids[-n:]))) is not None:
                text = list(ids)
                for i in range(start, start + min(count, n + 1)):
                    text.append(text[i])
                return text[len(ids):]
        return []


class NgramDrafter(SpeculativeDrafter):
    """Prompt lookup, n from prompt_lookup_max down to prompt_lookup_min."""

    def __init__(self, engine: ContinuousEngine, num_speculative_tokens: int = 4, pause: Pause | None = None,
                 prompt_lookup_min: int = 1, prompt_lookup_max: int = 4) -> None:
        super().__init__(engine, num_speculative_tokens, pause)
        if not 1 <= prompt_lookup_min <= prompt_lookup_max:
            raise ValueError(f"prompt_lookup_min {prompt_lookup_min} must be from 1 to prompt_lookup_max "
                             f"{prompt_lookup_max}")
        self.sizes = range(prompt_lookup_min, prompt_lookup_max + 1)
        self.indexes: dict[str, NgramIndex] = {}

    def guess(self, rooms: Mapping[Request, int]) -> dict[str, Draft]:
        drafts = {}
        for request, room in rooms.items():
            index, ids = self.indexes.setdefault(request.request_id, NgramIndex(self.sizes)), request.token_ids
            index.extend(ids)
            if tokens := index.follows(ids, room):
                drafts[request.request_id] = Draft(tokens)
        return drafts

    def free(self, request_id: str) -> None:
        super().free(request_id)
        self.indexes.pop(request_id, None)
