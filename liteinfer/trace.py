"""What every step of an engine ran, kept on demand, and written as a Chrome trace.

Ground file. The JSON opens in https://ui.perfetto.dev or chrome://tracing: a lane
for each request, a slice for each step it took part in, and counters below.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any


@dataclass(frozen=True)
class Part:
    """A request's share of a step."""

    request_id: str
    start: int           # its tokens computed before the step
    num_tokens: int      # computed in it
    new_tokens: int      # given out at the end of it: 0 in the middle of a prompt
    draft: tuple[int, ...] = ()   # the last of the tokens computed, if they were only guessed

    @property
    def what(self) -> str:
        """The name of its kind of work."""
        return "verify" if self.draft else "decode" if self.num_tokens == 1 and self.start else "prefill"


@dataclass(frozen=True)
class StepRecord:
    """One step. Times are the clock's, in seconds."""

    started_at: float
    ended_at: float
    parts: tuple[Part, ...]
    blocks_used: int
    running: int
    waiting: int
    preempted: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(part.num_tokens for part in self.parts)


@dataclass
class StepTrace:
    """Records of an engine's latest steps; hand one to an engine that takes `trace`.

    Args:
        max_steps: how many are kept, the latest ones.
        clock: in seconds; replaced in tests.
    """

    max_steps: int = 100_000
    clock: Callable[[], float] = perf_counter
    steps: deque[StepRecord] = field(init=False)

    def __post_init__(self) -> None:
        self.steps = deque(maxlen=self.max_steps)

    def record(self, started_at: float, plan: Any, events: Sequence[Any], scheduler: Any,
               blocks_used: int) -> None:
        """Keep a step that began at `started_at` and ends now: the scheduler's plan, and what came of it."""
        given = {event.request_id: len(event.token_ids) for event in events}
        parts = tuple(Part(chunk.request.request_id, chunk.start, chunk.num_tokens,
                           given.get(chunk.request.request_id, 0), chunk.draft) for chunk in plan.chunks)
        self.steps.append(StepRecord(started_at, self.clock(), parts, blocks_used, len(scheduler.running),
                                     len(scheduler.waiting), tuple(r.request_id for r in plan.preempted)))

    def first_scheduled(self) -> dict[str, float]:
        """By request id, when the first step that ran it began: the end of its time in the queue."""
        found: dict[str, float] = {}
        for step in self.steps:
            for part in step.parts:
                found.setdefault(part.request_id, step.started_at)
        return found

    def chrome(self) -> dict[str, Any]:
        """The trace in Chrome's trace event format, times in microseconds from the first step on."""
        events: list[dict[str, Any]] = []
        lanes: dict[str, int] = {}
        begin = self.steps[0].started_at if self.steps else 0.0
        for number, step in enumerate(self.steps):
            at, lasts = (step.started_at - begin) * 1e6, (step.ended_at - step.started_at) * 1e6
            for part in step.parts:
                lane = lanes.setdefault(part.request_id, len(lanes) + 1)
                events.append({"name": f"{part.what} {part.num_tokens}", "cat": part.what, "ph": "X", "pid": 0,
                               "tid": lane, "ts": at, "dur": lasts, "args": {"step": number, "start": part.start,
                                                                "new tokens": part.new_tokens}})
            events += [{"name": "preempted", "ph": "i", "s": "t", "pid": 0, "tid": lanes.get(request_id, 0), "ts": at}
                       for request_id in step.preempted]
            for name, value in (("tokens", step.num_tokens), ("KV blocks", step.blocks_used),
                                ("running", step.running), ("waiting", step.waiting)):
                events.append({"name": name, "ph": "C", "pid": 0, "ts": at, "args": {name: value}})
        names: list[dict[str, Any]] = [{"name": "thread_name", "ph": "M", "pid": 0, "tid": lane,
                                        "args": {"name": f"request {request_id}"}}
                                       for request_id, lane in lanes.items()]
        return {"traceEvents": names + events, "displayTimeUnit": "ms"}

    def save(self, path: Path) -> None:
        """Write the Chrome trace as JSON."""
        path.write_text(json.dumps(self.chrome()), encoding="utf-8")
