"""The loop that takes timestamps: the only one, for every row and every reference.

It imports nothing but the standard library, so that it also runs inside a
reference's own process and environment. Whatever it drives needs `add`, `step`
and `has_unfinished`; a request needs `request_id`; an event needs `request_id`,
`token_ids`, `finish_reason` and `error`.

Closed loop: a request is added when there is room for it. Open loop: requests
have arrival times and are added when these have come, however busy the engine is.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class Drivable(Protocol):
    """The part of the engine contract that the loop uses. Requests and events are opaque here."""

    def add(self, request: Any) -> None: ...

    def step(self) -> list[Any]: ...

    def has_unfinished(self) -> bool: ...


@dataclass
class Trace:
    """One request as the caller saw it. Times are the clock's, in seconds.

    `added_at` is when it was handed to the engine; in an open loop, when it was due. A step that was
    running then makes the two differ, and that wait is the engine's doing, so it counts.

    `events` holds a (time, number of tokens) pair for every event of the
    request, those that carried no token included.
    """

    request_id: str
    added_at: float
    events: list[tuple[float, int]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None


def drive(engine: Drivable, requests: Iterable[Any], max_in_flight: int | None = None,
          clock: Callable[[], float] = time.perf_counter, arrivals: Sequence[float] | None = None,
          sleep: Callable[[float], None] = time.sleep) -> list[Trace]:
    """Run the requests, at most `max_in_flight` of them at a time (None: all at once).

    With `arrivals`, an open loop: request i is due that many seconds after the call, and is added as
    soon as it is due and no step is running. Nothing sleeps while the engine has work.

    Every event of a step gets the time at which the step returned. A request
    whose `add` raises has failed, with the reason in its trace; the others go on.

    Raises:
        ValueError: max_in_flight below 1, a request id that occurs twice, or arrivals that are not one
            for each request, go back in time, or come with a max_in_flight.
    """
    if max_in_flight is not None and max_in_flight < 1:
        raise ValueError(f"max_in_flight must be None or at least 1, got {max_in_flight}")
    waiting = deque(requests)
    due = _due(len(waiting), max_in_flight, arrivals, clock)
    traces: dict[str, Trace] = {}
    in_flight: set[str] = set()
    while True:
        while waiting and (max_in_flight is None or len(in_flight) < max_in_flight):
            if due and due[0] > clock():
                break
            trace = _add(engine, waiting.popleft(), traces, due.popleft() if due else clock())
            if trace.error is None:
                in_flight.add(trace.request_id)
        if engine.has_unfinished():
            events = engine.step()
            now = clock()
            for event in events:
                _record(traces[event.request_id], event, now)
                if event.finish_reason is not None:
                    in_flight.discard(event.request_id)
        elif due:
            sleep(max(0.0, due[0] - clock()))
        elif waiting:
            in_flight.clear()   # the engine is idle: what it never finished must not hold up the rest
        else:
            return list(traces.values())


def _due(count: int, max_in_flight: int | None, arrivals: Sequence[float] | None,
         clock: Callable[[], float]) -> deque[float]:
    """When each request is due, by the clock; nothing in a closed loop."""
    if arrivals is None:
        return deque()
    if max_in_flight is not None:
        raise ValueError(f"requests that arrive by themselves have no limit, but max_in_flight is {max_in_flight}")
    if len(arrivals) != count:
        raise ValueError(f"{count} requests, but {len(arrivals)} arrivals")
    if list(arrivals) != sorted(arrivals):
        raise ValueError("arrivals must not go back in time")
    begin = clock()
    return deque(begin + seconds for seconds in arrivals)


def _add(engine: Drivable, request: Any, traces: dict[str, Trace], at: float) -> Trace:
    if request.request_id in traces:
        raise ValueError(f"request id {request.request_id!r} occurs twice")
    trace = traces[request.request_id] = Trace(request.request_id, at)
    try:
        engine.add(request)
    except Exception as error:
        trace.finish_reason, trace.error = "error", f"{type(error).__name__}: {error}"
    return trace


def _record(trace: Trace, event: Any, now: float) -> None:
    trace.events.append((now, len(event.token_ids)))
    trace.token_ids.extend(event.token_ids)
    if event.finish_reason is not None:
        trace.finish_reason = event.finish_reason
    if event.error is not None:
        trace.error = event.error
