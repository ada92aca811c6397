"""The picture of chapter 9: where a decode step's time goes, before and after, beside what the machine allows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from liteinfer.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
PARTS = (("linear", "linear layers", BLUE), ("attention", "attention", ORANGE), ("gather", "gather", VERMILION),
         ("norms", "norms, rotations", SKY), ("sampling", "sampling", GREEN), ("scheduling", "scheduling", PURPLE),
         ("between", "Python between", GREY), ("unattributed", "unattributed", "#D0D0D0"))


def pictures() -> dict[str, Figure]:
    """The chapter's stored picture; none without the committed result."""
    stored = RESULTS / "profile.json"
    return {"step.svg": step_picture(json.loads(stored.read_text(encoding="utf-8")))} if stored.is_file() else {}


def step_picture(result: Mapping[str, Any]) -> Figure:
    """A bar for each row and width, as long as the step without the profiler, cut as the profiler saw its parts."""
    widths = sorted({row["width"] for row in result["rows"]})
    figure = Figure(figsize=(8, 1.0 + 1.1 * len(widths)), layout="constrained")
    axes = figure.subplots(len(widths), 1, squeeze=False)[:, 0]
    for ax, width in zip(axes, widths, strict=True):
        rows = [row for row in result["rows"] if row["width"] == width]
        for y, row in enumerate(rows):
            left, scale = 0.0, row["step_ms"] / row["profiled_ms"]
            for part, label, colour in PARTS:
                length = row["parts_ms"][part] * scale
                ax.barh(y, length, left=left, color=colour, label=label if ax is axes[0] and not y else None)
                left += length
            ax.text(left, y, f" {row['step_ms']:,.0f} ms", va="center", fontsize=9)
        least = rows[0]["ceilings_ms"]["step"]
        ax.axvline(least, color="black", linewidth=1, linestyle="--")
        ax.set_yticks(range(len(rows)), [row["name"].removeprefix("liteinfer-") for row in rows])
        ax.set_xlim(0, 1.12 * max(row["step_ms"] for row in rows))
        ax.invert_yaxis()
        ax.set_title(f"{width} sequence{'s' if width > 1 else ''}; the dashed line is the least, {least:,.0f} ms",
                     fontsize=9, loc="left")
        ax.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("ms of a decode step")
    figure.legend(loc="outside upper center", ncols=4, fontsize=8, frameon=False)
    return figure
