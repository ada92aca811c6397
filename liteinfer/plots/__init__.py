"""Pictures of the chapters, one module per chapter, and what they share."""

from __future__ import annotations

import io

import matplotlib
from matplotlib.figure import Figure

# Okabe and Ito's colours, which people with any colour vision can tell apart.
BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE, GREY = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#7F7F7F")


def svg(figure: Figure) -> bytes:
    """A figure as SVG, the same bytes every time: no date, no random ids, text as text."""
    with matplotlib.rc_context({"svg.hashsalt": "liteinfer", "svg.fonttype": "none"}):
        out = io.BytesIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None}, facecolor="white")
    return out.getvalue()
