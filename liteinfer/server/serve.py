"""`liteinfer serve`: listen, and go down in order.

On SIGTERM or Ctrl-C the server stops listening and takes no more requests. Those in flight have `drain_seconds` to
end; what is left then is aborted, and its client is told (an error event, or a 503).
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from liteinfer.server.async_engine import AsyncEngine
from liteinfer.server.service import Service

GRACE = 2.0   # seconds after the drain in which the last events may be read, before connections are cut


def bind(host: str, port: int) -> socket.socket:
    """A socket that will listen there; port 0 takes a free one.

    Raises:
        ValueError: the port is taken or none, or there is no such host.
    """
    if not 0 <= port < 2**16:   # getaddrinfo would take its last 16 bits
        raise ValueError(f"port must be from 0 to {2**16 - 1}, got {port}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # Named as TCP, or asyncio leaves Nagle's algorithm on: each answer on a connection then waits some 40 ms.
        listener = socket.socket(family, kind, protocol)
        if os.name == "posix":   # elsewhere it would let two listen on one port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ValueError(f"cannot listen on host {host} port {port}: {error}") from None
    return listener


def url(listener: socket.socket) -> str:
    """Where clients find it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def greeting(service: Service, listener: socket.socket) -> str:
    """The one line at the start: where, what, and how much room there is."""
    pool = getattr(service.engine.engine, "pool_size", "no KV pool")
    return (f"{service.model_name} on {service.row} at {url(listener)}/v1: up to {service.engine.max_num_seqs} run, "
            f"{service.engine.max_num_waiting} wait, {service.context:,} tokens each. {pool}")


class Server(uvicorn.Server):
    """uvicorn, which lets the engine finish before it goes.

    Args:
        app: its lifespan starts and ends the engine.
        engine: the one that is drained.
        drain_seconds: what requests in flight have to end in, once the server is told to stop.
        ready: called when it listens.
    """

    def __init__(self, app: FastAPI, engine: AsyncEngine, drain_seconds: float = 30.0,
                 ready: Callable[[], None] = lambda: None) -> None:
        if drain_seconds < 0:
            raise ValueError(f"drain_seconds must be at least 0, got {drain_seconds}")
        super().__init__(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="on", ws="none",
                                        timeout_keep_alive=30,   # clients that pool connections wait longer than 5 s
                                        timeout_graceful_shutdown=int(drain_seconds + GRACE) + 1))
        self.engine, self.drain_seconds, self.ready = engine, drain_seconds, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as error:   # two were bound to the port before either listened
            raise ValueError(f"cannot listen: {error}") from None
        self.ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        draining = asyncio.create_task(self.engine.drain(self.drain_seconds))
        await super().shutdown(sockets)
        await draining
