"""Show a run as it goes: a bar on a terminal, one line per pass elsewhere.

Nothing is drawn while a pass runs. A bar that refreshes itself is a thread that
takes time from the very steps being timed, so it moves only between passes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

Stage = tuple[str, int, str]   # row, width, pass
UNITS = {"latency": "ms ITL p50", "throughput": "tok/s", "TTFT": "ms with the prefix cached", "wall": "s", "step": "µs",
         "prompt": "tok/s without drafts", "guess": "ms", "answer": "ms E2E", "profile": "ms of a step"}


@dataclass
class Remaining:
    """Estimates the time left from the passes done.

    A pass costs its tokens times a rate: the rate of the same pass of an earlier
    round if there was one, else of the row's other pass, else the mean of all rows.
    """

    ahead: list[tuple[Stage, int]]   # every pass still to come, with its output tokens
    rates: dict[Stage, float] = field(default_factory=dict)   # seconds per token

    def done(self, stage: Stage, seconds: float) -> None:
        for i, (other, tokens) in enumerate(self.ahead):
            if other == stage:
                self.rates[stage] = seconds / tokens
                del self.ahead[i]
                return

    def drop(self, row: str, width: int) -> None:
        self.ahead = [(stage, tokens) for stage, tokens in self.ahead if stage[:2] != (row, width)]

    def seconds(self) -> float | None:
        """None before the first pass is done."""
        if not self.rates:
            return None
        return sum(tokens * self._rate(stage) for stage, tokens in self.ahead)

    def _rate(self, stage: Stage) -> float:
        same_row = [rate for other, rate in self.rates.items() if other[:2] == stage[:2]]
        return self.rates.get(stage, mean(same_row or self.rates.values()))


class Show:
    """A `run.Watch` on a console."""

    def __init__(self, console: Console, stages: Sequence[tuple[Stage, int]], rounds: int,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self.console, self.rounds, self.clock = console, rounds, clock
        self.remaining = Remaining([stage for _ in range(rounds) for stage in stages])
        self.last = clock()
        self.bar = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
                            TextColumn("{task.fields[left]}"), console=console, auto_refresh=False, transient=True)
        self.task = self.bar.add_task("warming up", total=len(self.remaining.ahead), left="")

    def __enter__(self) -> Show:
        if self.console.is_terminal:
            self.bar.start()
            self.bar.refresh()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self.bar.stop()

    def passed(self, name: str, width: int, round_: int, what: str, headline: float | None) -> None:
        seconds, self.last = self.clock() - self.last, self.clock()
        self.remaining.done((name, width, what), seconds)
        value = "no request succeeded" if headline is None else f"{headline:,.1f} {UNITS[what]}"
        self._show(f"round {round_ + 1}/{self.rounds} {title(name, width)} {what}: {value} ({seconds:,.1f} s)")

    def stopped(self, name: str, width: int, reason: str) -> None:
        self.last = self.clock()
        self.remaining.drop(name, width)
        self._show(f"{title(name, width)} stopped: {reason}")

    def _show(self, line: str) -> None:
        left = self.remaining.seconds()
        words = "" if left is None or not self.remaining.ahead else f"about {duration(left)} left"
        if not self.console.is_terminal:
            self.console.print(f"{line}; {words}" if words else line, markup=False, highlight=False, soft_wrap=True)
            return
        self.bar.console.print(line, markup=False, highlight=False)
        total = self.bar.tasks[0].total or 0
        self.bar.update(self.task, description="measuring", completed=total - len(self.remaining.ahead), left=words)
        self.bar.refresh()


def title(name: str, width: int) -> str:
    return name if width == 1 else f"{name} (width {width})"


def duration(seconds: float) -> str:
    """
    >>> duration(42), duration(200)
    ('42 s', '3 min 20 s')
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
