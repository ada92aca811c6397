"""How long an object's methods take, while it does its usual work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

KV_CALLS = ("match", "allocate", "publish", "truncate", "free")   # what the scheduler and the engine ask a KV manager


class Stopwatch:
    """Adds up the time inside some methods. They must not call each other through the object, or time counts twice."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.seconds = 0.0

    def watch(self, owner: Any, *names: str) -> Stopwatch:
        """Replace these methods of this one object by timed ones."""
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))
        return self

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = self.clock()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += self.clock() - started

        return timed
