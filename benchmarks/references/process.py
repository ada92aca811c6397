"""A reference's process, from the outside: start it, ask it, and notice when it dies or hangs."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.loop import Trace
from liteinfer.request import Request

ROOT = Path(__file__).resolve().parent.parent.parent
PATIENCE = 600.0   # seconds without a sign of life until a process counts as hanging: to compile may take minutes
LAST = 300         # letters of the log's last line that a reason quotes


class ProcessFailed(RuntimeError):
    """The process could not do what it was asked: it said so, died, or hung."""


class Process:
    """One engine in a process of its own.

    Args:
        python: of the environment that has what the engine needs.
        engine: "module:Class" of the adapter.
        settings: its arguments.
        variables: environment variables beside ours.
        log: the file that what it prints goes to.
        patience: seconds without a line from it after which it counts as hanging, and is killed.

    Raises:
        ProcessFailed: it cannot be started, or the engine cannot be built.
    """

    def __init__(self, python: Path, engine: str, settings: Mapping[str, Any], variables: Mapping[str, str], log: Path,
                 patience: float = PATIENCE) -> None:
        self.log, self.patience = log, patience
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with log.open("w", encoding="utf-8") as written:
                self.process = subprocess.Popen(   # a session of its own: Ctrl-C is ours, and kill takes its children
                    [str(python), "-m", "benchmarks.references.worker"], stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE, stderr=written, text=True, encoding="utf-8", cwd=ROOT,
                    env={**os.environ, **variables}, start_new_session=True)
        except OSError as error:
            raise ProcessFailed(f"{python} cannot be started: {error.strerror}") from None
        self.said: queue.Queue[str | None] = queue.Queue()   # None: it says nothing more
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            self.versions: dict[str, str] = self._ask({"engine": engine, "settings": dict(settings)})["ready"]
        except BaseException:
            self.close()
            raise

    def drive(self, requests: Sequence[Request], max_in_flight: int | None = None,
              arrivals: Sequence[float] | None = None) -> list[Trace]:
        """`loop.drive`, over there. The times are those of its clock.

        Raises:
            ProcessFailed: the pass raised, the process died, or gave no sign of life for `patience` seconds.
        """
        asked = [[one.request_id, one.prompt_token_ids, one.params.max_tokens] for one in requests]
        answer = self._ask({"requests": asked, "max_in_flight": max_in_flight, "arrivals": arrivals})
        return [Trace(**{**trace, "events": [(at, tokens) for at, tokens in trace["events"]]})
                for trace in answer["traces"]]

    def close(self) -> None:
        """End it, whatever it is doing, with all that it has started."""
        with suppress(ProcessLookupError, PermissionError):   # it is gone; macOS says so in its own way
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in filter(None, (self.process.stdin, self.process.stdout)):
            with suppress(OSError):   # what a dead process never read
                pipe.close()

    def _listen(self) -> None:
        with suppress(ValueError):   # closed while we listened
            for line in self.process.stdout or ():
                self.said.put(line)
        self.said.put(None)

    def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        with suppress(OSError):   # it is gone already: its silence says why
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        while True:
            try:
                line = self.said.get(timeout=self.patience)
            except queue.Empty:
                raise ProcessFailed(f"no sign of life for {self.patience:g} s; {self._last_words()}") from None
            if line is None:
                raise ProcessFailed(f"the process ended with exit status {self.process.wait()}; {self._last_words()}")
            answer: dict[str, Any] = json.loads(line)
            if "error" in answer:
                raise ProcessFailed(f"{answer['error']} (its log: {self.log})")
            if "alive" not in answer:
                return answer

    def _last_words(self) -> str:
        lines = [line for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        return f"the last line of {self.log}: {lines[-1].strip()[:LAST]}" if lines else f"{self.log} is empty"
