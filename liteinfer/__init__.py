"""liteinfer: how LLM inference works, one rung at a time."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from liteinfer.llm import LLM
    from liteinfer.logits_processors import SamplingParams
    from liteinfer.request import Completion

__all__ = ["LLM", "Completion", "SamplingParams"]

_HOME = {"LLM": "liteinfer.llm", "Completion": "liteinfer.request", "SamplingParams": "liteinfer.logits_processors"}


def __getattr__(name: str) -> Any:
    """Import torch and transformers, which takes seconds, only when something needs them: not for `--help`."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
