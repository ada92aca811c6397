"""Two drafters, one after the other: the second guesses where the first has nothing to say."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from liteinfer.engines.continuous import ContinuousEngine
from liteinfer.request import Request
from liteinfer.speculative.drafter import Draft, Pause, SpeculativeDrafter


class FallbackDrafter(SpeculativeDrafter):
    """Drafts of `first`; for requests that get none of it, those of `then`. Both are made for this engine."""

    def __init__(self, engine: ContinuousEngine, first: Callable[[ContinuousEngine], SpeculativeDrafter],
                 then: Callable[[ContinuousEngine], SpeculativeDrafter], num_speculative_tokens: int = 4,
                 pause: Pause | None = None) -> None:
        super().__init__(engine, num_speculative_tokens, pause)
        self.first, self.then = first(engine), then(engine)

    def guess(self, rooms: Mapping[Request, int]) -> dict[str, Draft]:
        drafts = self.first.guess(rooms)
        return drafts | self.then.guess({request: room for request, room in rooms.items()
                                         if request.request_id not in drafts})

    def keep_only(self, request_ids: Collection[str]) -> None:
        self.first.keep_only(request_ids)
        self.then.keep_only(request_ids)

    def free(self, request_id: str) -> None:
        super().free(request_id)
        self.first.free(request_id)
        self.then.free(request_id)
