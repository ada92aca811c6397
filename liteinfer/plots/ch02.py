"""Pictures of chapter 2: a live DynamicCache, what each step copies, and where copying catches up with the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from liteinfer.engines.dynamic_cache import DynamicCacheEngine, kv_bytes
from liteinfer.loading import tiny_model
from liteinfer.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION
from liteinfer.request import Request, SamplingParams

PROMPT = [7, 3, 51, 20]
WRITTEN_BY = (SKY, ORANGE, GREEN, PURPLE)   # the step that computed a token: prefill, decode 1, 2, 3


@dataclass(frozen=True)
class KVShape:
    """The numbers of a model that decide how many bytes its keys and values take."""

    name: str
    layers: int
    kv_heads: int
    head_size: int
    itemsize: int       # bytes per number
    weight_bytes: int
    longest: int        # tokens of context that the model was trained for

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_size * self.itemsize

    @property
    def crossover(self) -> int:
        """The fewest tokens held whose keys and values are as many bytes as all the weights."""
        return -(-self.weight_bytes // self.bytes_per_token)


SMOLLM2 = KVShape("SmolLM2-135M, float32", 30, 3, 64, 4, 538_060_032, 8192)


@dataclass(frozen=True)
class Seen:
    """One step of a live engine. `layers` are the cache's own tensors: the next step makes new ones."""

    fed: int            # tokens computed
    copied: int         # bytes of keys and values that were held and moved
    held: int           # bytes held after the step
    layers: list[tuple[Tensor, Tensor]]   # keys and values of each layer, [1, K, S, D]

    @property
    def tokens(self) -> int:
        return self.layers[0][0].shape[2]


def watch(engine: DynamicCacheEngine, request: Request, steps: int) -> list[Seen]:
    """Run the first `steps` steps of a request and look into the cache after each; then drop the request.

    Raises:
        ValueError: the request ends within these steps; its cache is gone then.
    """
    if steps >= request.params.max_tokens:
        raise ValueError(f"{steps} steps need max_tokens above {steps}, got {request.params.max_tokens}")
    engine.add(request)
    seen = []
    for _ in range(steps):
        fed, copied = engine.counters.tokens_computed, engine.counters.kv_bytes_copied
        engine.step()
        cache = engine.cache
        assert cache is not None
        seen.append(Seen(engine.counters.tokens_computed - fed, engine.counters.kv_bytes_copied - copied,
                         kv_bytes(cache), [(layer.keys, layer.values) for layer in cache.layers]))
    engine.abort(request.request_id)
    engine.step()
    return seen


def live_cache(seen: list[Seen]) -> Figure:
    """Above: every tensor of the cache after the last step. Below: what each step kept, copied and added."""
    layers = seen[-1].layers
    figure = Figure(figsize=(9.6, 2.2 + 0.95 * len(layers) + 0.42 * len(seen)), layout="constrained")
    boxes, steps = figure.subplots(2, 1, height_ratios=[0.75 + 0.95 * len(layers), 0.7 + 0.42 * len(seen)])
    _draw_tensors(boxes, seen)
    _draw_steps(steps, seen)
    names = ["prefill", *(f"decode step {i}" for i in range(1, len(seen)))]
    handles = [Patch(color="none", label="computed by")]
    handles += [Patch(color=colour, label=name) for colour, name in zip(WRITTEN_BY, names, strict=False)]
    handles.append(Patch(facecolor="white", edgecolor=GREY, hatch="////", label="held already, copied by the step"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8.5,
                  handlelength=1.2, columnspacing=1.4)
    return figure


def _writer(seen: list[Seen], token: int) -> int:
    """The step that computed this token."""
    return next(i for i, step in enumerate(seen) if token < step.tokens)


def _draw_tensors(axes: Axes, seen: list[Seen]) -> None:
    layers, tokens = seen[-1].layers, seen[-1].tokens
    _, kv_heads, _, head_size = layers[0][0].shape
    itemsize = layers[0][0].element_size()
    gap = tokens + 2.5
    for row, pair in enumerate(layers):
        for column, (what, tensor) in enumerate(zip(("keys", "values"), pair, strict=True)):
            left, top = column * gap, row * (kv_heads + 1.3)
            axes.text(left, top - 0.15, f"layer {row} {what} {list(tensor.shape)}: {tensor.nbytes:,} bytes", fontsize=9)
            for head in range(kv_heads):
                if column == 0:
                    axes.text(left - 0.15, top + head + 0.5, f"kv head {head}", fontsize=8, ha="right", va="center")
                for token in range(tokens):
                    axes.add_patch(Rectangle((left + token, top + head), 1, 1, edgecolor="white", linewidth=1.5,
                                             facecolor=WRITTEN_BY[_writer(seen, token)]))
    bottom = len(layers) * (kv_heads + 1.3) - 1.1
    for column in range(2):
        for token in range(tokens):
            axes.text(column * gap + token + 0.5, bottom, str(token), fontsize=8, ha="center", va="top")
        axes.text(column * gap - 0.15, bottom, "token", fontsize=8, ha="right", va="top")
    axes.set_title(f"The whole cache after {len(seen)} steps: {seen[-1].held:,} bytes. One cell is one vector of "
                   f"{head_size} numbers, {head_size * itemsize} bytes.", fontsize=10, loc="left")
    _frameless(axes, (-1.5, gap + tokens + 0.1), (bottom + 0.6, -0.8))


def _draw_steps(axes: Axes, seen: list[Seen]) -> None:
    most = seen[-1].tokens
    for row, step in enumerate(seen):
        name = "prefill" if row == 0 else f"decode step {row}"
        axes.text(-0.15, row + 0.4, name, fontsize=9, ha="right", va="center")
        for token in range(step.tokens):
            new = token >= step.tokens - step.fed
            colour = WRITTEN_BY[_writer(seen, token)]
            axes.add_patch(Rectangle((token, row), 1, 0.8, linewidth=1.2, facecolor=colour if new else "white",
                                     edgecolor="white" if new else GREY, hatch=None if new else "////"))
        counted = f"computes {step.fed}, copies {step.copied:,} bytes, holds {step.held:,} bytes"
        axes.text(most + 0.3, row + 0.4, counted, fontsize=9, va="center")
    axes.set_title("Step by step: one column is one token in all layers", fontsize=10, loc="left")
    _frameless(axes, (-1.9, most + 8.2), (len(seen) + 0.1, -0.2))


def _frameless(axes: Axes, x: tuple[float, float], y: tuple[float, float]) -> None:
    axes.set_xlim(x)
    axes.set_ylim(y)
    axes.axis("off")


def copied_tokens(prompt: int, output: int) -> int:
    """Tokens whose keys and values are copied while `output` tokens are generated: what each decode step finds held."""
    return sum(range(prompt, prompt + output - 1))


def copying(shape: KVShape, prompt: int = 128) -> Figure:
    """Left: bytes of one decode step by tokens held. Right: bytes copied over a whole generation."""
    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    step, total = figure.subplots(1, 2)
    far = round(1.35 * shape.crossover, -3)
    held = [0, far]
    step.axhline(shape.weight_bytes / 1e6, color=BLUE, linewidth=2)
    step.text(0.02 * far, shape.weight_bytes / 1e6 + 12, f"weights read: {shape.weight_bytes / 1e6:,.0f} MB",
              color=BLUE, fontsize=9)
    step.plot(held, [n * shape.bytes_per_token / 1e6 for n in held], color=VERMILION, linewidth=2)
    step.text(0.25 * far, 0.2 * far * shape.bytes_per_token / 1e6, "keys, values\ncopied", color=VERMILION,
              fontsize=9, va="top")
    step.plot([shape.crossover], [shape.weight_bytes / 1e6], "o", color="black")
    step.annotate(f"equal at\n{shape.crossover:,} tokens", (shape.crossover, shape.weight_bytes / 1e6), (6, -10),
                  textcoords="offset points", fontsize=9, va="top")
    step.axvline(shape.longest, color=GREY, linestyle=":")
    step.text(shape.longest - 0.01 * far, 15, f"trained for {shape.longest:,}", color="#555555", fontsize=8.5,
              ha="right")
    step.set(xlabel="tokens held", ylabel="MB per decode step", xlim=(0, far),
             ylim=(0, 1.2 * shape.weight_bytes / 1e6))
    step.set_title("One decode step", fontsize=10)
    last = shape.longest - prompt
    outputs = [*range(1, last, 63), last]
    gigabytes = shape.bytes_per_token / 1e9
    total.plot(outputs, [copied_tokens(prompt, n) * gigabytes for n in outputs], color=VERMILION, linewidth=2)
    total.text(0.63 * last, copied_tokens(prompt, last) * gigabytes * 0.55, "copied in all", color=VERMILION,
               fontsize=9, ha="right")
    total.plot(outputs, [(prompt + n - 1) * gigabytes for n in outputs], color=GREEN, linewidth=2)
    total.text(0.98 * last, copied_tokens(prompt, last) * gigabytes * 0.025,
               f"held at the end ({(prompt + last - 1) * gigabytes:.2f} GB for {last:,} tokens)", color="#00664a",
               fontsize=9, ha="right")
    total.set(xlabel=f"output tokens after a prompt of {prompt}", ylabel="GB", xlim=(0, None), ylim=(0, None))
    total.set_title("A whole generation", fontsize=10)
    for axes in (step, total):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{shape.name}: {shape.bytes_per_token:,} bytes of keys and values per token", fontsize=10.5)
    return figure


def step_times(result: Mapping[str, Any]) -> Figure:
    """Time of each step of the first latency request, by row, from a benchmark result that still has its raw times."""
    figure = Figure(figsize=(7, 3), layout="constrained", dpi=80)
    axes = figure.subplots()
    for row, colour, marker in zip(result["rows"], (VERMILION, BLUE, GREEN), "osv", strict=False):
        trace = row["rounds"][0]["raw"]["latency"][0]
        times = [trace["added_at"], *(at for at, _ in trace["events"])]
        steps = [1000 * (b - a) for a, b in pairwise(times)]
        axes.plot(range(1, len(steps) + 1), steps, marker=marker, color=colour, label=row["name"], markersize=4)
    axes.set(xlabel="step (1 is the prefill)", ylabel="ms", ylim=(0, None))
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def pictures() -> dict[str, Figure]:
    """The stored pictures of the chapter, by file name."""
    request = Request("picture", PROMPT, SamplingParams(max_tokens=8, ignore_eos=True))
    return {"dynamic_cache.svg": live_cache(watch(DynamicCacheEngine(tiny_model()), request, 4)),
            "copying.svg": copying(SMOLLM2)}
