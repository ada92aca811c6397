"""An adapter that needs no library: it counts up from the prompt's last token, or fails as its model's name says."""

from __future__ import annotations

import os
import time

from benchmarks.references.contract import Event, Request, Settings


class Engine:
    def __init__(self, settings: Settings) -> None:
        if settings.model == "absent":
            raise FileNotFoundError("no such model")
        print("a library prints what it likes")
        self.fault = settings.model
        self.running: list[Request] = []
        self.made: dict[str, int] = {}

    def versions(self) -> dict[str, str]:
        return {"fake": "1.0"}

    def add(self, request: Request) -> None:
        self.running.append(request)
        self.made[request.request_id] = 0

    def has_unfinished(self) -> bool:
        return bool(self.running)

    def step(self) -> list[Event]:
        if self.running[0].request_id.startswith("latency"):
            if self.fault == "dies":
                os.write(2, b"out of memory\n")
                os._exit(9)
            if self.fault == "hangs":
                time.sleep(1000)
            if self.fault == "raises":
                raise ValueError("a fault of its own")
        events = []
        for request in list(self.running):
            self.made[request.request_id] += 1
            made = self.made[request.request_id]
            over = made == request.max_tokens
            events.append(Event(request.request_id, [request.prompt_token_ids[-1] + made], "length" if over else None))
            if over:
                self.running.remove(request)
        return events
