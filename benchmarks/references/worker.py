"""The process in which a reference runs: it takes requests as JSON lines on stdin and answers on stdout.

It runs in the reference's environment, so of this repository it imports nothing but the timing loop, the contract
and the reference's adapter. The first line names the adapter and its settings; each further line is a pass:

    {"engine": "benchmarks.references.vllm_engine:VllmEngine", "settings": {"model": "/some/folder", ...}}
    {"requests": [["latency-0", [1, 2, 3], 64], ...], "max_in_flight": 1, "arrivals": null}

It answers {"ready": {package: version}}, then {"traces": [...]} for each pass, {"error": "..."} where one raised, and
{"alive": true} every few seconds while a pass goes on: whoever waits can tell a long pass from one that hangs.
Once stdin ends, it ends, whatever it is doing: a killed parent leaves no process behind.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib import import_module
from typing import Any, TextIO

from benchmarks.loop import drive
from benchmarks.references.contract import Request, Settings

BEAT = 5.0   # seconds between two signs of life


class Clock:
    """The loop's clock. A pass that goes on reads it after every step, and so now and then says that it lives."""

    def __init__(self, out: TextIO) -> None:
        self.out = out
        self.said = time.perf_counter()

    def __call__(self) -> float:
        now = time.perf_counter()
        if now - self.said > BEAT:
            say(self.out, alive=True)
            self.said = now
        return now


def say(out: TextIO, **message: Any) -> None:
    """One line of JSON, sent at once."""
    out.write(json.dumps(message) + "\n")
    out.flush()


def private_stdout() -> TextIO:
    """Stdout for our lines alone: whatever a library prints goes to stderr from here on."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return out


def lines() -> Iterator[dict[str, Any]]:
    """What the parent says, line by line; a thread listens, and ends the process when the parent is gone."""
    heard: queue.Queue[str] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            heard.put(line)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        yield json.loads(heard.get())


def one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def main() -> None:
    """Build the engine that the first line names, then drive it as often as asked."""
    out = private_stdout()
    said = lines()
    try:
        first = next(said)
        module, _, name = first["engine"].partition(":")
        engine = getattr(import_module(module), name)(Settings(**first["settings"]))
    except Exception as error:
        say(out, error=one_line(error))
        raise   # its traceback belongs into the log
    say(out, ready=engine.versions())
    for asked in said:
        requests = [Request(*each) for each in asked["requests"]]
        try:
            traces = drive(engine, requests, asked["max_in_flight"], Clock(out), asked["arrivals"])
        except Exception as error:
            say(out, error=one_line(error))
            raise
        say(out, traces=[asdict(trace) for trace in traces])


if __name__ == "__main__":
    main()
