"""Pictures of chapter 6: slots filled again at once, a long prompt in chunks, a preemption, what fewer passes buy."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from liteinfer.cache.paged import GatherSdpa, PagedCache
from liteinfer.engines.continuous import ContinuousEngine
from liteinfer.kv_manager import KVManager
from liteinfer.loading import LoadedModel, tiny_model
from liteinfer.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, ch05
from liteinfer.plots.ch05 import RAGGED, Gantt, gantt
from liteinfer.request import Counters, Request, SamplingParams
from liteinfer.scheduler import Scheduler, SchedulerConfig
from liteinfer.trace import Part, StepRecord, StepTrace

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
HAND_RUN = ((5, 3), (11, 2), (3, 2))   # prompt and output tokens of A, B, C
TIGHT = ((8, 10), (8, 10), (8, 10))    # each of which comes to hold 5 blocks of 4 tokens; the pool has 8
Lengths = Sequence[tuple[int, int]]    # prompt and output tokens of each request


def pictures() -> dict[str, Figure]:
    """The chapter's stored pictures. The last needs the committed results and is left out without them."""
    model = tiny_model("llama")
    found = {"gantt.svg": gantt_picture({"static batches": gantt(model, RAGGED),
                                         "continuous": slots_of(continuous(model, [(8, n) for n in RAGGED], width=4))}),
             "chunks.svg": chunks_picture({f"chunks of {size}": long_prompt(model, size) for size in (200, 16)}),
             "preemption.svg": preemption_picture(tight(model), block_size=4)}
    if all((RESULTS / f"{name}.json").is_file() for name in ("widths", "ragged")):
        widths, ragged = (json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
                          for name in ("widths", "ragged"))
        found["gain.svg"] = gain_picture(gains(widths, ragged))
    return found


# --- runs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A run of the continuous engine: its steps, what it counted, and each request's tokens."""

    steps: list[StepRecord]
    counters: Counters
    outputs: list[list[int]]
    num_blocks: int


def requests_of(lengths: Lengths) -> list[Request]:
    """Requests A, B, C, ... of these lengths, with different prompts."""
    return [Request(chr(ord("A") + i), [1 + (7 * i + 3 * j) % 60 for j in range(prompt)],
                    SamplingParams(max_tokens=output, ignore_eos=True)) for i, (prompt, output) in enumerate(lengths)]


def continuous(model: LoadedModel, lengths: Lengths, width: int, num_blocks: int = 256,
               arrivals: Sequence[int] = (), **settings: Any) -> Run:
    """Run requests of these lengths through the live engine, and keep every step.

    Args:
        arrivals: before which step each request is added; all before the first unless given.
    """
    trace = StepTrace()
    engine = ContinuousEngine(model, max_num_seqs=width, num_blocks=num_blocks, trace=trace, **settings)
    requests = requests_of(lengths)
    due = sorted(zip(arrivals or [0] * len(requests), requests, strict=True), key=lambda pair: pair[0])
    while due or engine.has_unfinished():
        while due and due[0][0] <= len(trace.steps):
            engine.add(due.pop(0)[1])
        engine.step()
        engine.scheduler.kv.check()
    return Run(list(trace.steps), engine.counters, [r.output_token_ids for r in requests], num_blocks)


def dry_run(config: SchedulerConfig, lengths: Lengths, num_blocks: int = 256, block_size: int = 16) -> list[StepRecord]:
    """The steps that the real scheduler plans over a real pool. No model: every token that is wanted is a 0."""
    model = tiny_model("llama")
    kv = KVManager(PagedCache(model.config, num_blocks, block_size, model.dtype, model.device, GatherSdpa()))
    scheduler, steps = Scheduler(config, kv), list[StepRecord]()
    for request in requests_of(lengths):
        scheduler.add(request)
    while scheduler.waiting or scheduler.running:
        plan = scheduler.schedule()
        for chunk in plan.chunks:
            chunk.request.num_computed_tokens = chunk.start + chunk.num_tokens
            if chunk.num_logits and chunk.request.append(0, ()):
                scheduler.remove(chunk.request)
        parts = tuple(Part(c.request.request_id, c.start, c.num_tokens, c.num_logits) for c in plan.chunks)
        steps.append(StepRecord(0.0, 0.0, parts, kv.cache.pool.num_used, len(scheduler.running),
                                len(scheduler.waiting), tuple(r.request_id for r in plan.preempted)))
    return steps


def tight(model: LoadedModel, num_blocks: int = 8, **settings: Any) -> Run:
    """Three requests that together outgrow a pool of 8 blocks."""
    return continuous(model, TIGHT, width=3, num_blocks=num_blocks, block_size=4, **settings)


def long_prompt(model: LoadedModel, chunk: int) -> Run:
    """A is decoding when B comes with a prompt of 200 tokens, read by at most `chunk` a step."""
    return continuous(model, ((4, 20), (200, 4)), width=2, arrivals=(0, 3), max_prefill_chunk=chunk)


# --- who works when --------------------------------------------------------------------------------------------------


def slots_of(run: Run) -> Gantt:
    """A run of the continuous engine as chapter 5 draws one: a request keeps the slot that it found empty."""
    width = run.counters.batch_slots // run.counters.forward_passes
    held: dict[str, int] = {}
    passes = []
    for step in run.steps:
        here = {part.request_id: part for part in step.parts}
        held = {name: slot for name, slot in held.items() if name in here}
        for name in here:
            if name not in held:
                held[name] = min(set(range(width)) - set(held.values()))
        slots = [("", False)] * width
        for name, slot in held.items():
            slots[slot] = (name, here[name].num_tokens > 1 or not here[name].start)
        passes.append(slots)
    assert sum(slots.count(("", False)) for slots in passes) == run.counters.idle_slots, "trace and counters disagree"
    return Gantt(passes, run.counters)


def gantt_picture(runs: Mapping[str, Gantt]) -> Figure:
    """As in chapter 5; here a slot's next request comes when its last one ends, not when the batch does."""
    return ch05.gantt_picture(runs, "decode of the next request in the slot", "idle")


# --- a long prompt and its neighbour ---------------------------------------------------------------------------------


def chunks_picture(runs: Mapping[str, Run]) -> Figure:
    """Tokens of each step: A's one, and as many of B's prompt as it was given."""
    figure = Figure(figsize=(9.6, 3.3), layout="constrained")
    panels = figure.subplots(1, len(runs), sharey=True, squeeze=False)[0]
    for axes, (name, run) in zip(panels, runs.items(), strict=True):
        places = range(1, len(run.steps) + 1)
        mine, theirs = ([sum(part.num_tokens for part in step.parts if part.request_id == who) for step in run.steps]
                        for who in "AB")
        axes.bar(places, theirs, color=ORANGE, width=0.85)
        axes.bar(places, mine, bottom=theirs, color=BLUE, width=0.85)
        largest = max(step.num_tokens for step in run.steps)
        first = next(i for i, step in zip(places, run.steps, strict=True)
                     if any(part.request_id == "B" and part.new_tokens for part in step.parts))
        late = first > len(run.steps) / 2
        axes.annotate(f"B's first token: step {first}", (first, theirs[first - 1] + 1),
                      (first + (-1 if late else 1), 110), arrowprops={"arrowstyle": "->"},
                      ha="right" if late else "left", va="center", fontsize=9)
        axes.set_title(f"{name}: A waits for {largest} tokens at most", fontsize=9.5, loc="left")
        axes.set(xlabel="step", xlim=(0.3, max(len(r.steps) for r in runs.values()) + 0.7))
        axes.set_xticks(range(2, max(len(r.steps) for r in runs.values()) + 1, 2))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("tokens computed in the step")
    handles = [Patch(color=BLUE, label="A: decodes, 1 token a step"),
               Patch(color=ORANGE, label="B: its prompt of 200, then 1 token a step")]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
    return figure


# --- a preemption ----------------------------------------------------------------------------------------------------


def preemption_picture(run: Run, block_size: int) -> Figure:
    """Above: what each request does in each step. Below: the blocks each holds while the step runs."""
    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    lanes, pool = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.25))
    names = sorted({part.request_id for step in run.steps for part in step.parts})
    _draw_lanes(lanes, run, names)
    _draw_pool(pool, run, names, block_size)
    pool.set_xlabel("step")
    return figure


def _draw_lanes(axes: Axes, run: Run, names: Sequence[str]) -> None:
    given = dict.fromkeys(names, 0)
    for x, step in enumerate(run.steps, 1):
        for part in step.parts:
            again = part.start == 0 and given[part.request_id] > 0
            y, decode = names.index(part.request_id), part.num_tokens == 1
            axes.barh(y, 0.92, left=x - 0.46, height=0.8,
                      color=VERMILION if again else BLUE if decode else ORANGE)
            axes.text(x, y, str(part.num_tokens), ha="center", va="center", fontsize=8.5,
                      color="white" if decode or again else "black")
            given[part.request_id] += part.new_tokens
        for name in step.preempted:
            axes.text(x, names.index(name), "out", ha="center", va="center", fontsize=8.5, color=VERMILION,
                      fontweight="bold")
    axes.set_yticks(range(len(names)), names)
    axes.set(ylim=(len(names) - 0.5, -0.5))
    axes.set_title("tokens computed by each request in each step", fontsize=9.5, loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    handles = [Patch(color=ORANGE, label="prompt"), Patch(color=BLUE, label="decode"),
               Patch(color=VERMILION, label="again: prompt and own output")]
    axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, frameon=False, fontsize=9,
                borderaxespad=0.0)


def _draw_pool(axes: Axes, run: Run, names: Sequence[str], block_size: int) -> None:
    places, below = range(1, len(run.steps) + 1), [0] * len(run.steps)
    for name, colour in zip(names, (SKY, GREEN, PURPLE), strict=True):
        held = [sum(-(-(part.start + part.num_tokens) // block_size) for part in step.parts if part.request_id == name)
                for step in run.steps]
        axes.bar(places, held, bottom=below, width=0.92, color=colour, edgecolor="white", linewidth=0.5)
        for x, n, under in zip(places, held, below, strict=True):
            if n:
                axes.text(x, under + n / 2, name, ha="center", va="center", fontsize=8.5)
        below = [a + b for a, b in zip(below, held, strict=True)]
    assert max(below) == run.counters.blocks_peak, "trace and counters disagree"
    axes.axhline(run.num_blocks, color="black", linestyle="--", linewidth=1)
    axes.text(len(run.steps) + 0.55, run.num_blocks + 0.1, f"the pool: {run.num_blocks} blocks", ha="right",
              va="bottom", fontsize=9)
    axes.set(ylim=(0, run.num_blocks * 1.15), xlim=(0.4, len(run.steps) + 0.6), ylabel="blocks held")
    axes.set_xticks(list(places))
    axes.spines[["top", "right"]].set_visible(False)


# --- what fewer passes are worth -------------------------------------------------------------------------------------


def static_passes(lengths: Lengths, width: int) -> list[int]:
    """Tokens of each pass of static batches: the prompts, then one for each sequence that goes on."""
    passes = []
    for i in range(0, len(lengths), width):
        batch = lengths[i:i + width]
        passes.append(sum(prompt for prompt, _ in batch))
        passes += [sum(output > done for _, output in batch) for done in range(1, max(n for _, n in batch))]
    return passes


def continuous_passes(lengths: Lengths, width: int) -> list[int]:
    """Tokens of each pass of the continuous engine, with blocks for everybody."""
    blocks = width * max(-(-sum(pair) // 16) for pair in lengths)
    return [step.num_tokens for step in dry_run(SchedulerConfig(max_num_seqs=width), lengths, blocks)]


def predicted_ms(passes: Sequence[int], curve: Sequence[Mapping[str, float]]) -> float:
    """Milliseconds of passes with these numbers of tokens, read off chapter 5's curve.

    Between two measured widths a straight line; beyond the widest, the last line goes on.

    Args:
        curve: points with `width` and `itl_p50_ms`, at least two, the narrowest first.
    """
    def one(tokens: int) -> float:
        right = next((i for i, point in enumerate(curve) if point["width"] >= tokens), len(curve) - 1)
        (x0, y0), (x1, y1) = ((p["width"], p["itl_p50_ms"]) for p in (curve[max(right, 1) - 1], curve[max(right, 1)]))
        return y0 + (tokens - x0) * (y1 - y0) / (x1 - x0)

    return sum(map(one, passes))


def ragged_lengths() -> list[tuple[int, int]]:
    """The 128 requests of the workload `ragged`."""
    from benchmarks.workloads import SHAPES  # beside the chapters in the repository, not part of the package

    shape = SHAPES["ragged"]
    return [(shape.isl, shape.output_length(i)) for i in range(shape.prompts_at(32))]


def gains(widths: Mapping[str, Any], ragged: Mapping[str, Any]) -> dict[str, float]:
    """paged-b32 over continuous on `ragged`: passes by the counters, time as predicted, time as measured."""
    rows = {row["name"]: row for row in ragged["rows"]}
    static, ours = rows["liteinfer-paged-b32"], rows["liteinfer-continuous"]
    curve = next(row["widths"] for row in widths["rows"] if row["name"] == "liteinfer-paged-b32")
    lengths = ragged_lengths()
    before, after = (predicted_ms(passes(lengths, 32), curve) for passes in (static_passes, continuous_passes))
    return {"forward passes, counted": static["counters"]["forward_passes"] / ours["counters"]["forward_passes"],
            "time, predicted from the width curve": before / after,
            "time, measured": static["throughput"]["wall_s"] / ours["throughput"]["wall_s"]}


def gain_picture(found: Mapping[str, float]) -> Figure:
    """Bars that begin at 1: how many times as many passes, or as much time, static batches took."""
    figure = Figure(figsize=(7.6, 1.9), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(list(found), [value - 1 for value in found.values()], left=1, color=[GREY, SKY, BLUE])
    axes.bar_label(bars, [f"{value:.2f}x" for value in found.values()], padding=4)
    axes.axvline(1, color="black", linewidth=1)
    axes.invert_yaxis()
    least, most = min(1, *found.values()), max(found.values())
    axes.set(xlabel="static batches of 32 / continuous", xlim=(least - 0.02, 1 + (most - 1) * 1.15))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    return figure
