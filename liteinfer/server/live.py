"""The engine at work, as JSON, for a page that shows it. Read-only; `--no-live` leaves it out."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from liteinfer.server.service import Service
from liteinfer.server.snapshot import Snapshots


def live_routes(service: Service) -> APIRouter:
    """The routes that show the engine at work."""
    router, snapshots = APIRouter(), Snapshots(service)

    @router.get("/live/state")
    async def state() -> dict[str, Any]:
        """The engine between two steps: requests, pool, prefix tree, latest steps, counters."""
        return await snapshots.latest()

    return router
