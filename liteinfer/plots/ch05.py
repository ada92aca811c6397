"""Pictures of chapter 5: a batch as rectangle and as ragged row, which slots work when, what width buys."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from liteinfer import lineage
from liteinfer.engines.static_batch import DynamicStaticBatch, NativeStaticBatch, StaticBatch, positions_of
from liteinfer.loading import LoadedModel, tiny_model
from liteinfer.model.layout import Layout
from liteinfer.plots import BLUE, GREY, ORANGE, SKY, VERMILION
from liteinfer.request import Counters, Request, SamplingParams

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "widths.json"
PROMPTS = ([7, 3, 51, 20], [44, 9], [31])
RAGGED = (16, 164, 72, 221, 129, 37, 186, 94, 243, 151, 59, 208)   # the first 12 outputs of the workload `ragged`
NO_CELL = "#F2F2F2"


def pictures() -> dict[str, Figure]:
    """The chapter's stored pictures. The last needs the committed results and is left out without them."""
    model = tiny_model("llama")
    equal = [round(sum(RAGGED) / len(RAGGED))] * len(RAGGED)
    found = {"rectangle.svg": rectangle_picture(*worked_example(model)),
             "gantt.svg": gantt_picture({f"{len(equal)} requests of {equal[0]} tokens each": gantt(model, equal),
                                         f"{len(RAGGED)} requests of 16 to 243 tokens": gantt(model, RAGGED)})}
    if RESULTS.is_file():
        found["widths.svg"] = widths_picture(json.loads(RESULTS.read_text(encoding="utf-8")))
    return found


# --- the rectangle and the ragged row --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Padded:
    """A step of transformers' batch: the rectangle after it. Columns before `held` were cached already."""

    ids: list[list[int | None]]   # [B, S], None where padding is
    positions: list[list[int]]    # [B, S]
    held: int
    computed: int


@dataclass(frozen=True)
class Ragged:
    """The same step of ours: one flat row."""

    ids: list[int]                # [N]
    layout: Layout
    computed: int


def worked_example(model: LoadedModel, steps: int = 2) -> tuple[list[Padded], list[Ragged]]:
    """Run the first steps of PROMPTS through both kinds of batch, and look at what each step fed."""
    padded, ragged = [], []
    theirs, ours = DynamicStaticBatch(model, len(PROMPTS)), NativeStaticBatch(model, len(PROMPTS), 16)
    for engine in (theirs, ours):
        requests = [Request(str(i), list(p), SamplingParams(max_tokens=8, ignore_eos=True))
                    for i, p in enumerate(PROMPTS)]
        for request in requests:
            engine.add(request)
        for _ in range(steps):
            fed, before = [request.token_ids for request in requests], engine.counters.tokens_computed
            engine.step()
            computed = engine.counters.tokens_computed - before
            if engine is theirs:
                padded.append(_rectangle(theirs, fed, computed))
            else:
                ragged.append(_flat(ours, fed, computed))
    return padded, ragged


def _rectangle(engine: DynamicStaticBatch, fed: list[list[int]], computed: int) -> Padded:
    ids: list[list[int | None]] = []
    for mask, tokens in zip(engine.mask.tolist(), fed, strict=True):
        rest = iter(tokens)
        ids.append([next(rest) if real else None for real in mask])
    columns = computed // len(fed)
    return Padded(ids, positions_of(engine.mask).tolist(), len(ids[0]) - columns, computed)


def _flat(engine: NativeStaticBatch, fed: list[list[int]], computed: int) -> Ragged:
    layout = engine.cache.layout
    new = [token for tokens, context in zip(fed, layout.context_lens, strict=True) for token in tokens[context:]]
    return Ragged(new, layout, computed)


def rectangle_picture(padded: Sequence[Padded], ragged: Sequence[Ragged]) -> Figure:
    """Above: the rectangle of each step. Below: the same step as one flat row."""
    figure = Figure(figsize=(9.6, 4.7), layout="constrained", dpi=80)
    grid = figure.subplots(2, len(padded), height_ratios=(1.45, 1), width_ratios=(7.6, 6.4))
    for step, name in enumerate(("prefill", "first decode step")):
        _draw_rectangle(grid[0][step], padded[step], name)
        _draw_flat(grid[1][step], ragged[step])
    handles = [Patch(facecolor=ORANGE, edgecolor="black", label="computed by this step"),
               Patch(facecolor="white", edgecolor=VERMILION, hatch="////", label="padding: computed and held"),
               Patch(facecolor=SKY, edgecolor="black", label="held in the cache"),
               Patch(color="none", label="small figure: position")]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, handlelength=1.6)
    return figure


def _cell(axes: Axes, x: float, y: float, token: int | None, position: int, new: bool) -> None:
    pad = token is None
    axes.add_patch(Rectangle((x + 0.04, y), 0.92, 0.8, facecolor="white" if pad else ORANGE if new else SKY,
                             edgecolor=VERMILION if pad else "black", hatch="////" if pad else None))
    if not pad:
        axes.text(x + 0.42, y + 0.4, str(token), ha="center", va="center", fontsize=11)
        axes.text(x + 0.92, y + 0.06, str(position), ha="right", va="bottom", fontsize=7.5)


def _draw_rectangle(axes: Axes, step: Padded, name: str) -> None:
    rows, pads = len(step.ids), sum(token is None for row in step.ids for token in row[step.held:])
    for row, (ids, positions) in enumerate(zip(step.ids, step.positions, strict=True)):
        for column, (token, position) in enumerate(zip(ids, positions, strict=True)):
            _cell(axes, column, rows - 1 - row, token, position, column >= step.held)
        axes.text(-0.2, rows - 1 - row + 0.4, "ABC"[row], ha="right", va="center")
    axes.set_title(f"{name}, padded on the left: {step.computed} tokens computed"
                   + (f", {pads} of them padding" if pads else ""), fontsize=9.5, loc="left")
    axes.set(xlim=(-1.5, 7.3), ylim=(-0.1, rows))
    axes.axis("off")


def _draw_flat(axes: Axes, step: Ragged) -> None:
    layout, starts = step.layout, step.layout.query_start_loc.tolist()
    for row, (token, position) in enumerate(zip(step.ids, layout.positions.tolist(), strict=True)):
        _cell(axes, row, 0, token, position, new=True)
    for b, (start, end) in enumerate(pairwise(starts)):
        axes.text(start + 0.1, 0.88, f"{'ABC'[b]}: {int(layout.seq_lens[b])}", ha="left", va="bottom", fontsize=8)
        axes.text(end - 0.5, -0.1, "↑", ha="center", va="top", fontsize=11)
    axes.text(-0.2, 0.88, "seq_lens", ha="right", va="bottom", fontsize=8)
    axes.text(0, -0.5, f"logits at rows {', '.join(str(end - 1) for end in starts[1:])}", ha="left", va="top",
              fontsize=9)
    for start in starts:
        axes.plot([start, start], [-0.12, 1.15], color="black", linewidth=1.5)
    axes.set_title(f"the same step, ragged: {step.computed} tokens computed", fontsize=9.5, loc="left")
    axes.set(xlim=(-1.5, 7.3), ylim=(-0.95, 1.35))
    axes.axis("off")


# --- who works when --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gantt:
    """A run of a static batch: for each pass, slot by slot, what it worked on."""

    passes: list[list[tuple[str, bool]]]   # [passes][slots]: (request id, "" for none; whether it was its prefill)
    counters: Counters

    @property
    def idle_share(self) -> float:
        return self.counters.idle_slots / self.counters.batch_slots


def gantt(model: LoadedModel, lengths: Sequence[int], width: int = 4, prompt: int = 8) -> Gantt:
    """Run requests with these output lengths in static batches on pages of the model, and watch every pass."""
    blocks = width * -(-(prompt + max(lengths)) // 16)
    engine = lineage.build(lineage.find("paged-b4"), model, max_num_seqs=width, num_blocks=blocks)
    assert isinstance(engine, StaticBatch)
    return watch(engine, [Request(str(i), [1 + (i + j) % 60 for j in range(prompt)],
                                  SamplingParams(max_tokens=n, ignore_eos=True)) for i, n in enumerate(lengths)])


def watch(engine: StaticBatch, requests: Sequence[Request]) -> Gantt:
    """Run requests to their ends. A slot's work is read off the events, and has to agree with the counters."""
    for request in requests:
        engine.add(request)
    seen: set[str] = set()
    passes = []
    while engine.has_unfinished():
        idle = engine.counters.idle_slots
        slots = [("", False)] * engine.max_num_seqs
        for event in engine.step():
            slots[engine.slots[event.request_id]] = (event.request_id, event.request_id not in seen)
            seen.add(event.request_id)
        passes.append(slots)
        assert slots.count(("", False)) == engine.counters.idle_slots - idle, "events and counters disagree"
    return Gantt(passes, engine.counters)


def stretches(slot: Sequence[tuple[str, bool]]) -> Iterator[tuple[int, int, str, bool]]:
    """(first pass, passes, request id, prefill) of each run of equal work in a slot."""
    start = 0
    for work, group in groupby(slot):
        n = len(list(group))
        yield start, n, *work
        start += n


def gantt_picture(runs: Mapping[str, Gantt], second: str = "decode, every second batch",
                  idle: str = "idle: waits for the longest") -> Figure:
    """One panel per run, one row per slot, over the same number of passes.

    Args:
        second: what the legend calls every second request of a slot, which has a colour of its own.
        idle: what it calls a slot without work.
    """
    figure = Figure(figsize=(9.6, 0.9 + 1.75 * len(runs)), layout="constrained", dpi=80)
    panels = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    longest = max(len(run.passes) for run in runs.values())
    for axes, (name, run) in zip(panels, runs.items(), strict=True):
        _draw_slots(axes, run, longest)
        c = run.counters
        axes.set_title(f"{name}: {c.forward_passes} passes, {c.idle_slots:,} of {c.batch_slots:,} slot-steps idle "
                       f"({run.idle_share:.1%})", fontsize=9.5, loc="left")
    panels[-1].set_xlabel("forward pass")
    handles = [Patch(color=ORANGE, label="prefill"), Patch(color=BLUE, label="decode"),
               Patch(color=SKY, label=second),
               Patch(facecolor=NO_CELL, edgecolor=GREY, hatch="////", label=idle)]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    return figure


def _draw_slots(axes: Axes, run: Gantt, longest: int) -> None:
    width = len(run.passes[0])
    for y, slot in enumerate(zip(*run.passes, strict=True)):
        requests = 0
        for start, n, request, first in stretches(slot):
            requests += first
            if not request:
                axes.barh(y, n, left=start, height=0.8, facecolor=NO_CELL, edgecolor=GREY, hatch="////", linewidth=0.5)
            elif first:   # one pass, drawn wide enough to be seen
                axes.barh(y, max(n, longest / 150), left=start, height=0.8, color=ORANGE, zorder=3)
            else:
                axes.barh(y, n, left=start, height=0.8, color=BLUE if requests % 2 else SKY)
                axes.text(start + n / 2 + longest / 300, y, str(n + 1), ha="center", va="center", fontsize=8,
                          color="white" if requests % 2 else "black")
    axes.set_yticks(range(width), [f"slot {i}" for i in range(width)])
    axes.set(xlim=(0, longest * 1.01), ylim=(width - 0.5, -0.5))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)


# --- what width buys -------------------------------------------------------------------------------------------------


def widths_picture(result: Mapping[str, Any]) -> Figure:
    """Left: ms of a decode step by width. Right: tokens per second. Both with what the machine allows."""
    figure = Figure(figsize=(9.6, 3.9), layout="constrained", dpi=80)
    left, right = figure.subplots(1, 2)
    rows = sorted(result["rows"], key=lambda row: "plain" in row["linear_path"])   # packed ones first
    for row, (colour, marker) in zip(rows, ((BLUE, "o"), (VERMILION, "s")), strict=False):
        points = row["widths"]
        widths = [p["width"] for p in points]
        label = f"{row['name'].removeprefix('liteinfer-').rsplit('-b', 1)[0]} ({row['linear_path']})"
        left.plot(widths, [p["itl_p50_ms"] for p in points], color=colour, marker=marker, label=label)
        linear = [p.get("linear_ms") for p in points]
        if all(linear):
            left.plot(widths, linear, color=colour, linestyle=":", label="its linear layers alone")
        right.plot(widths, [p["tok_s"] for p in points], color=colour, marker=marker)
    points = rows[0]["widths"]
    widths, ceiling = [p["width"] for p in points], [p["ceiling_ms"] for p in points]
    left.plot(widths, ceiling, color="black", linestyle="--", label="ceiling")
    right.plot(widths, [1000 * w / ms for w, ms in zip(widths, ceiling, strict=True)], color="black", linestyle="--")
    for axes, what in ((left, "ms per decode step"), (right, "tokens per second")):
        if turn := result["turning_point"]:
            axes.axvline(turn, color=GREY, linestyle="-.", linewidth=1,
                         label=f"predicted turning point: {turn:.0f} sequences")
        axes.set_xscale("log", base=2)
        axes.set_xticks(widths, [str(w) for w in widths])
        axes.minorticks_off()
        axes.set(xlabel="sequences in a step", ylim=(0, None))
        axes.set_title(what, fontsize=10, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def linear_picture(plain: Mapping[int, float], packed: Mapping[int, float], ceiling: Mapping[int, float]) -> Figure:
    """Milliseconds per token of all linear layers of a step, by rows fed, plain and packed."""
    figure = Figure(figsize=(7.0, 3.0), layout="constrained", dpi=80)
    axes, places = figure.subplots(), range(len(plain))
    axes.bar([x - 0.2 for x in places], [ms / n for n, ms in plain.items()], 0.38, color=VERMILION, label="plain")
    axes.bar([x + 0.2 for x in places], [ms / n for n, ms in packed.items()], 0.38, color=BLUE, label="packed")
    for x, (n, ms) in zip(places, ceiling.items(), strict=True):
        axes.hlines(ms / n, x - 0.42, x + 0.42, color="black", linestyle="--", label="" if x else "ceiling")
    axes.set_xticks(list(places), [str(n) for n in plain])
    axes.set(xlabel="rows in a step", ylabel="ms per token")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure
