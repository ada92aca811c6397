"""Chapter 1's pictures: which tokens each step computes, and how long a forward of n tokens takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, ScalarFormatter

from liteinfer.engines.base import Engine
from liteinfer.engines.no_cache import NoCacheEngine
from liteinfer.loading import tiny_model
from liteinfer.plots import BLUE, GREY, ORANGE
from liteinfer.request import Request, SamplingParams


@dataclass(frozen=True)
class StepRecord:
    """What one step of one request did, read off the live engine."""

    length: int     # tokens of the sequence before the step: prompt and output so far
    computed: int   # tokens fed through the layers, from the engine's counter
    token: int      # the token that came out


def record(engine: Engine, request: Request) -> list[StepRecord]:
    """Run one request alone and note what each step computed.

    Raises:
        RuntimeError: the request ended in an error.
    """
    engine.add(request)
    steps = []
    while engine.has_unfinished():
        length, before = len(request.token_ids), engine.counters.tokens_computed
        event, = engine.step()
        if event.error:
            raise RuntimeError(event.error)
        steps.append(StepRecord(length, engine.counters.tokens_computed - before, event.token_ids[0]))
    return steps


def triangle(steps: Sequence[StepRecord]) -> Figure:
    """Left: a row per step, a column per position, what was computed. Right: the running total against the need."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _grid(left, steps)
    _totals(right, steps)
    figure.legend(handles=[Patch(color=BLUE, label="computed for the first time"),
                           Patch(color=ORANGE, label="computed again")],
                  loc="outside upper center", ncols=2, frameon=False)
    return figure


def first_times(steps: Sequence[StepRecord]) -> list[int]:
    """Of the tokens each step computed, how many no earlier step had computed."""
    seen, fresh = 0, []
    for step in steps:
        fresh.append(step.length - seen)
        seen = step.length
    return fresh


def _grid(axes: Axes, steps: Sequence[StepRecord]) -> None:
    positions, prompt = steps[-1].length, steps[0].length
    cells = np.zeros((len(steps), positions))   # 0 not computed, 1 for the first time, 2 again
    for row, (step, fresh) in enumerate(zip(steps, first_times(steps), strict=True)):
        cells[row, step.length - step.computed:step.length] = 2
        cells[row, step.length - fresh:step.length] = 1
    axes.pcolormesh(np.arange(positions + 1) - 0.5, np.arange(len(steps) + 1) + 0.5, cells, vmin=0, vmax=2,
                    cmap=ListedColormap(["white", BLUE, ORANGE]), edgecolors="white", linewidth=1.5)
    axes.axvline(prompt - 0.5, color="black", linewidth=1, linestyle="--")
    middle_of_outputs = (prompt + positions - 1) / 2
    for x, name in (((prompt - 1) / 2, "prompt tokens"), (middle_of_outputs, "output tokens, fed back")):
        axes.annotate(name, (x, 1), xycoords=("data", "axes fraction"), xytext=(0, 4), textcoords="offset points",
                      ha="center", va="bottom", fontsize=9)
    axes.invert_yaxis()
    axes.set(xlabel="position in the sequence, from 0", ylabel="step (one output token each)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=4))
    axes.spines[["top", "right"]].set_visible(False)


def _totals(axes: Axes, steps: Sequence[StepRecord]) -> None:
    numbers = np.arange(1, len(steps) + 1)
    for counts, colour, name in (([s.computed for s in steps], ORANGE, "computed"),
                                 (first_times(steps), BLUE, "needed")):
        total = np.cumsum(counts)
        axes.plot(numbers, total, color=colour, marker="o", markersize=4, linewidth=2)
        axes.annotate(f"{total[-1]} {name}", (numbers[-1], total[-1]), xytext=(-4, 8), textcoords="offset points",
                      ha="right", va="bottom")
    axes.set(xlabel="step", ylabel="tokens computed so far", ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)


def roofline(tokens: Sequence[int], seconds: Sequence[float], read_s: float, compute_s: float) -> Figure:
    """Measured time of a forward by the number of tokens fed, over the machine's two limits.

    Args:
        tokens, seconds: the measurements.
        read_s: seconds to read the weights once, whatever the number of tokens.
        compute_s: seconds of arithmetic per token.
    """
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    grid = np.geomspace(min(tokens), max(tokens), 200)
    axes.plot(grid, np.maximum(read_s, compute_s * grid) * 1e3, color="black", linewidth=1.5,
              label="the machine's limit")
    axes.plot(tokens, np.array(seconds) * 1e3, color=BLUE, marker="o", linewidth=2, label="measured")
    crossing = read_s / compute_s
    if min(tokens) < crossing < max(tokens):
        axes.axvline(crossing, color=GREY, linestyle="--", linewidth=1)
        axes.annotate(f"reading = computing\nat {crossing:.0f} tokens", (crossing, 0.97),
                      xycoords=("data", "axes fraction"), xytext=(-6, 0), textcoords="offset points",
                      ha="right", va="top", color="#404040", fontsize=9)
    axes.set(xscale="log", yscale="log", xlabel="tokens fed in one forward", ylabel="time of the forward, ms")
    axes.set_xticks(list(tokens), labels=[str(n) for n in tokens])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def pictures() -> dict[str, Figure]:
    """The chapter's stored pictures by file name, drawn from a live engine on the tiny model."""
    request = Request("picture", [1, 2, 3, 4, 5, 6, 7, 8], SamplingParams(max_tokens=12))
    return {"triangle.svg": triangle(record(NoCacheEngine(tiny_model()), request))}
