"""Drafts of the target's own first layers, over the target's own cache.

No second model and no second cache: the first N layers run on, token by token,
and the target's head reads their output. The keys and values they write lie in
slots past the request's last token, where the target's pass then writes its own.
(Elhoushi et al. 2024 train models for this. One that is not trained for it says
little of use before its last layers.)
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from functools import partial

from liteinfer.engines.continuous import ContinuousEngine
from liteinfer.engines.paged import feed
from liteinfer.model.llama import Llama
from liteinfer.request import Counters, Request
from liteinfer.speculative.draft_model import draft_ahead
from liteinfer.speculative.drafter import Draft, Pause, SpeculativeDrafter


def first_layers(llama: Llama, layers: int) -> Llama:
    """The same model, weights shared, that stops after so many layers. Raises ValueError if it has too few."""
    if not 1 <= layers < len(llama.layers):
        raise ValueError(f"early-exit must stop after 1 to {len(llama.layers) - 1} of the target's "
                         f"{len(llama.layers)} layers, got {layers}")
    early = copy(llama)
    early.layers = llama.layers[:layers]
    return early


class EarlyExitDrafter(SpeculativeDrafter):
    """Greedy or drawn guesses of the target's first `layers` layers."""

    def __init__(self, engine: ContinuousEngine, layers: int, num_speculative_tokens: int = 4,
                 pause: Pause | None = None) -> None:
        super().__init__(engine, num_speculative_tokens, pause)
        self.llama, self.counters = first_layers(engine.llama, layers), Counters()

    def guess(self, rooms: Mapping[Request, int]) -> dict[str, Draft]:
        kv, stored = self.engine.scheduler.kv, {request: request.num_computed_tokens for request in rooms}
        try:
            first = {request: request.token_ids for request, room in rooms.items()
                     if kv.allocate(request, stored[request] + room)}
            return draft_ahead(rooms, first, partial(feed, self.llama, self.engine.cache, counters=self.counters))
        finally:                              # nothing of a draft may be taken for stored, not even after Ctrl-C
            for request, length in stored.items():
                kv.truncate(request, length)
