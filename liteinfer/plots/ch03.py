"""Pictures of chapter 3: who a step's tokens belong to, which bytes a step reads, where its time goes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from liteinfer.cache.contiguous import ContiguousCache
from liteinfer.lineage import find
from liteinfer.loading import LoadedModel, load_model, tiny_model
from liteinfer.model.layout import Layout
from liteinfer.model.linear import Plain
from liteinfer.model.llama import load_llama
from liteinfer.plots import BLUE, GREY, ORANGE, SKY

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "course.json"
ROWS = ("eager", "native-eager", "native-packed")
MB = 1e6

# The kinds of linear layers, and how their weights' names end.
KINDS: dict[str, tuple[str, ...]] = {
    "QKV": ("q_proj.weight", "k_proj.weight", "v_proj.weight"), "attention output": ("o_proj.weight",),
    "gate and up": ("gate_proj.weight", "up_proj.weight"), "down": ("down_proj.weight",)}


def pictures() -> dict[str, Figure]:
    """The chapter's stored pictures. The third needs the committed results and is left out without them."""
    found = {"layout.svg": step_picture(*ragged_step()),
             "bytes.svg": bytes_picture(decode_bytes(load_model("smollm2-135m", "float32", "cpu"), context=160))}
    if RESULTS.is_file():
        found["time.svg"] = time_picture(json.loads(RESULTS.read_text(encoding="utf-8")))
    return found


# --- the step and the cache ------------------------------------------------------------------------------------------


def ragged_step() -> tuple[Layout, Tensor, Tensor]:
    """Run the layout's worked example on a tiny model: A has 5 tokens cached and adds 1, B starts with 3.

    Returns the second step's layout, and the keys [layers, seqs, K, S, D] before and after
    it. What was never written is NaN.
    """
    model = tiny_model("llama")
    cache = ContiguousCache(model.config, 2, 10, model.dtype, model.device)
    cache.keys.fill_(float("nan"))
    layout = Layout.of([(0, 0, 5)], model.device)
    feed(model, cache, layout, torch.arange(5))
    before = cache.keys.clone()
    layout = Layout.of([(0, 5, 1), (1, 0, 3)], model.device)
    feed(model, cache, layout, torch.arange(4))
    return layout, before, cache.keys.clone()


@torch.inference_mode()
def feed(model: LoadedModel, cache: ContiguousCache, layout: Layout, ids: Tensor) -> Tensor:
    """One step of our forward; logits [B, V] at each sequence's last token."""
    cache.begin(layout)
    return load_llama(model, Plain())(ids, layout.positions, cache, layout.query_start_loc[1:].long() - 1)


def step_picture(layout: Layout, before: Tensor, after: Tensor) -> Figure:
    """The flat row of a step's tokens, and each sequence's slots: cached before, written now, reserved."""
    figure = Figure(figsize=(7.6, 4.0), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(1, 1.15))
    _token_row(above, layout)
    _slots(below, layout, before, after)
    return figure


def _token_row(axes: Axes, layout: Layout) -> None:
    starts, positions = layout.query_start_loc.tolist(), layout.positions.tolist()
    names = [chr(ord("a") + b) for b, n in enumerate(layout.query_lens) for _ in range(n)]
    for row, (name, position) in enumerate(zip(names, positions, strict=True)):
        axes.add_patch(Rectangle((row + 0.04, 0), 0.92, 0.8, facecolor=ORANGE, edgecolor="black"))
        axes.text(row + 0.5, 0.4, f"{name}{position}", ha="center", va="center", fontsize=12)
        axes.text(row + 0.5, 0.9, str(position), ha="center", va="bottom")
    axes.text(-0.25, 0.9, "positions", ha="right", va="bottom")
    for b, start in enumerate(starts):
        end = b == len(starts) - 1
        axes.plot([start, start], [-0.35, 0.95], color="black", linewidth=1.5)
        axes.text(start, -0.42, f"{start}\n{'end' if end else f'{chr(65 + b)} starts'}", ha="center", va="top")
    axes.text(-0.25, -0.42, "query_start_loc", ha="right", va="top")
    axes.text(-0.25, 0.4, f"hidden states [{len(positions)}, E]", ha="right", va="center")
    lens = "\n".join(f"{chr(65 + b)}: L = {q}, S = {s}"
                     for b, (q, s) in enumerate(zip(layout.query_lens, layout.seq_lens.tolist(), strict=True)))
    axes.text(len(positions) + 0.6, 0.4, lens, ha="left", va="center")
    axes.set(xlim=(-3.2, 7.2), ylim=(-1.45, 1.35), title="one step: 4 tokens of 2 sequences in one flat row")
    axes.axis("off")


def _slots(axes: Axes, layout: Layout, before: Tensor, after: Tensor) -> None:
    looks = {"cached before": SKY, "written by this step": ORANGE, "reserved, never read": "white"}
    held, holds = (~keys.isnan().any(dim=(0, 2, 4)) for keys in (before, after))            # [seqs, S] each
    _, seqs, _, size, _ = after.shape
    for b in range(seqs):
        y = seqs - 1 - b
        for s in range(size):
            what = "cached before" if held[b, s] else "written by this step" if holds[b, s] else "reserved, never read"
            axes.add_patch(Rectangle((s + 0.04, y), 0.92, 0.8, facecolor=looks[what], edgecolor="black"))
            if holds[b, s]:
                axes.text(s + 0.5, y + 0.4, f"{chr(97 + b)}{s}", ha="center", va="center", fontsize=12)
        axes.text(-0.25, y + 0.4, f"sequence {chr(65 + b)}", ha="right", va="center")
    handles = [Rectangle((0, 0), 1, 1, facecolor=colour, edgecolor="black") for colour in looks.values()]
    axes.legend(handles, list(looks), loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=3, frameon=False)
    axes.set(xlim=(-2.2, size + 0.3), ylim=(-0.1, seqs + 0.1),
             title=f"the keys of a layer: {size} slots a sequence, allocated once, nothing moves")
    axes.axis("off")


# --- the bytes -------------------------------------------------------------------------------------------------------


def decode_bytes(model: LoadedModel, context: int) -> dict[str, int]:
    """Bytes that a decode step must read, by kind, counted on the loaded tensors.

    The step's token is the last of `context`; keys and values are counted on a cache of that size.
    """
    config, weights = model.config, model.weights()
    found = {kind: sum(w.nbytes for name, w in weights.items() if name.endswith(ends)) for kind, ends in KINDS.items()}
    embedding = weights["model.embed_tokens.weight"]
    found["head"] = (embedding if config.tie_word_embeddings else weights["lm_head.weight"]).nbytes
    found["norms, biases"] = sum(w.nbytes for name, w in weights.items() if name.endswith(("norm.weight", ".bias")))
    found["embedding row"] = embedding[0].nbytes
    found[f"keys and values of {context} tokens"] = ContiguousCache(config, 1, context, model.dtype,
                                                                    model.device).nbytes
    return found


def bytes_picture(found: Mapping[str, int]) -> Figure:
    """Bars of bytes by kind, and their share of the step."""
    figure = Figure(figsize=(7.6, 3.3), layout="constrained")
    axes, total = figure.subplots(), sum(found.values())
    colours = [BLUE if kind in KINDS or kind == "head" else ORANGE if kind.startswith("keys") else GREY
               for kind in found]
    bars = axes.barh(list(found), [n / MB for n in found.values()], color=colours)
    axes.bar_label(bars, [f"{n / MB:.1f} MB, {n / total:.1%}" if n > 1e5 else f"{n:,} bytes" for n in found.values()],
                   padding=4)
    axes.invert_yaxis()
    axes.set(xlabel=f"MB read by one decode step ({total / MB:.1f} MB in all)",
             xlim=(0, max(found.values()) / MB * 1.3))
    axes.spines[["top", "right"]].set_visible(False)
    return figure


# --- the time --------------------------------------------------------------------------------------------------------


def time_picture(result: Mapping[str, Any]) -> Figure:
    """A decode step of each row: its linear layers, all the rest, and what reading its bytes must take."""
    rows = {row["name"]: row for row in result["rows"]}
    shown = {name: rows[find(name).name]["ceiling"] for name in ROWS if find(name).name in rows}
    figure = Figure(figsize=(7.6, 2.7), layout="constrained")
    axes, names = figure.subplots(), list(shown)
    linear = [ceiling["linear_ms"] for ceiling in shown.values()]
    rest = [ceiling["rest_ms"] for ceiling in shown.values()]
    whole = [ceiling["measured_itl_ms"] for ceiling in shown.values()]
    axes.barh(names, linear, color=BLUE, label="linear layers")
    for y, ms in enumerate(linear):   # at the bar's end, where the dashed line does not cross it
        axes.text(ms - max(whole) * 0.01, y, f"{ms:.1f}", va="center", ha="right", color="white")
    axes.barh(names, rest, left=linear, color=ORANGE, label="everything else")
    for y, (ms, other) in enumerate(zip(whole, rest, strict=True)):
        axes.text(ms + max(whole) * 0.01, y, f"+ {other:.1f} = {ms:.1f} ms", va="center")
    limit = max(ceiling["itl_ms"] for ceiling in shown.values())
    axes.axvline(limit, color="black", linestyle="--", label=f"reading the bytes once: {limit:.1f} ms")
    axes.invert_yaxis()
    axes.set(xlabel="ms of one decode step", xlim=(0, max(whole) * 1.25))
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    return figure


def kinds_picture(plain: Mapping[str, float], packed: Mapping[str, float], limit: Mapping[str, float]) -> Figure:
    """Milliseconds of each kind of linear layer at one row, plain and packed, and the time of reading its bytes."""
    figure = Figure(figsize=(7.6, 3.0), layout="constrained")
    axes, places = figure.subplots(), range(len(plain))
    axes.bar([x - 0.2 for x in places], list(plain.values()), 0.38, color=ORANGE, label="plain")
    axes.bar([x + 0.2 for x in places], list(packed.values()), 0.38, color=BLUE, label="packed")
    for x, ms in zip(places, limit.values(), strict=True):
        axes.hlines(ms, x - 0.42, x + 0.42, color="black", linestyle="--",
                    label="" if x else "reading the bytes once")
    axes.set_xticks(list(places), list(plain))
    axes.set(ylabel="ms per step, all layers")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure
