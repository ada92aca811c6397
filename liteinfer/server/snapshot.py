"""The engine as it stands between two steps, as JSON: what the live page draws.

Taken on the engine thread, and only when somebody asks: four times a second at most, however many look on. Steps are
recorded from the first look until nobody has looked for ten seconds. So a server that nobody looks at pays nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from time import perf_counter
from typing import Any

from liteinfer.cache.radix import RadixTree
from liteinfer.request import Request
from liteinfer.server.metrics import blocks_cached
from liteinfer.server.service import Service
from liteinfer.trace import StepRecord, StepTrace

STEPS, NODES = 60, 400          # shown at most: the latest steps, the tree's nodes from the root on
EVERY, FORGET = 0.25, 10.0      # seconds
FREE, CACHED, SHARED = -1, -2, -3   # in the map of the pool, where no single owner's number stands


class Snapshots:
    """The latest snapshot of a service's engine, made anew when somebody asks and it is too old."""

    def __init__(self, service: Service) -> None:
        self.service, self.trace = service, StepTrace(max_steps=STEPS)
        self._taking: asyncio.Task[dict[str, Any]] | None = None
        self._taken_at = float("-inf")
        self._forget: asyncio.TimerHandle | None = None
        self._resting: asyncio.Task[None] | None = None

    async def latest(self) -> dict[str, Any]:
        """At most EVERY seconds old, and the same for all who ask meanwhile."""
        now, loop = perf_counter(), asyncio.get_running_loop()
        if self._forget is not None:
            self._forget.cancel()
        self._forget = loop.call_later(FORGET, self._rest)
        if self._taking is None or (self._taking.done() and now - self._taken_at > EVERY):
            self._taking, self._taken_at = asyncio.create_task(self._take()), now
        return await asyncio.shield(self._taking)

    async def _take(self) -> dict[str, Any]:
        service = self.service
        about = {"row": service.row, "model": service.model_name, "context": service.context,
                 "max_num_seqs": service.engine.max_num_seqs, "capacity": service.engine.capacity,
                 "in_flight": len(service.engine.receivers), "why_not": service.engine.why_not}
        return about | await service.engine.ask(self._look)

    def _look(self, engine: Any) -> dict[str, Any]:
        if getattr(engine, "trace", self) is None:      # it can record its steps, and does not
            engine.trace = self.trace
        return snapshot(engine)

    def _rest(self) -> None:
        """Nobody has looked for a while."""
        def rest(engine: Any) -> None:
            if getattr(engine, "trace", None) is self.trace:
                engine.trace = None
            self.trace.steps.clear()

        self._resting = asyncio.create_task(self.service.engine.ask(rest))


def snapshot(engine: Any) -> dict[str, Any]:
    """Requests, pool, prefix tree, latest steps and counters of any rung's engine; null for what it does not have."""
    queue, cache = getattr(engine, "scheduler", engine), getattr(engine, "cache", None)
    tables: Mapping[Any, list[int]] = getattr(cache, "tables", {})
    tree, trace = getattr(getattr(queue, "kv", None), "tree", None), getattr(engine, "trace", None)
    return {
        "at": perf_counter(),                       # of the same clock as the times of the steps
        "running": [_request(request, tables) for request in queue.running],
        "waiting": [_request(request, tables) for request in queue.waiting],
        "pool": _pool(engine, tables) if hasattr(cache, "pool") else None,
        "tree": None if tree is None else _tree(tree),
        "steps": None if trace is None else [_step(step) for step in list(trace.steps)[-STEPS:]],
        "counters": asdict(engine.counters),
    }


def _request(request: Request, tables: Mapping[Any, list[int]]) -> dict[str, Any]:
    return {"id": request.request_id, "prompt": len(request.prompt_token_ids), "cached": request.num_cached_tokens,
            "computed": request.num_computed_tokens, "output": len(request.output_token_ids),
            "max_tokens": request.params.max_tokens, "blocks": len(tables.get(request.request_id, ())),
            "drafted": request.num_drafted_tokens, "accepted": request.num_accepted_tokens}


def _pool(engine: Any, tables: Mapping[Any, list[int]]) -> dict[str, Any]:
    """Numbers, and for each block who holds it: FREE, CACHED (the tree alone), SHARED, or the place in `owners`."""
    pool, cached = engine.cache.pool, blocks_cached(engine)
    holders = [CACHED if count else FREE for count in pool.ref_counts]
    for number, table in enumerate(tables.values()):
        for block in table:
            holders[block] = number if holders[block] == CACHED else SHARED
    return {"block_size": pool.block_size, "total": pool.num_blocks, "used": pool.num_used - cached, "cached": cached,
            "free": pool.num_free, "owners": [str(owner) for owner in tables], "map": holders}


def _tree(tree: RadixTree) -> dict[str, Any]:
    """Nested nodes, the nearest to the root first if there are too many; `left_out` counts the rest."""
    size = tree.pool.block_size
    root: dict[str, Any] = {"tokens": 0, "locks": 0, "last_use": 0, "children": []}
    waiting, shown = deque((child, root) for child in tree.root.children.values()), 0
    while waiting and shown < NODES:
        node, above = waiting.popleft()
        each = {"tokens": len(node.blocks) * size, "blocks": list(node.blocks), "locks": node.lock_count,
                "last_use": node.last_use, "children": []}
        above["children"].append(each)
        waiting.extend((child, each) for child in node.children.values())
        shown += 1
    return root | {"nodes": shown, "left_out": sum(1 for _ in tree.nodes()) - shown}


def _step(step: StepRecord) -> dict[str, Any]:
    parts = [{"id": part.request_id, "what": part.what, "start": part.start, "tokens": part.num_tokens,
              "new": part.new_tokens, "draft": len(part.draft)} for part in step.parts]
    return {"began": step.started_at, "ended": step.ended_at, "blocks_used": step.blocks_used,
            "running": step.running, "waiting": step.waiting, "preempted": list(step.preempted), "parts": parts}
