"""A drafter by name: "ngram", "early-exit:N", or a draft model's name, folder or hub id."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

from liteinfer.engines.continuous import ContinuousEngine
from liteinfer.loading import load_model
from liteinfer.speculative.draft_model import DraftModelDrafter
from liteinfer.speculative.drafter import Pause, SpeculativeDrafter
from liteinfer.speculative.early_exit import EarlyExitDrafter
from liteinfer.speculative.ngram import NgramDrafter

MakeDrafter = Callable[[ContinuousEngine], SpeculativeDrafter]


def drafter(name: str, num_speculative_tokens: int = 4, pause: Pause | None = None) -> MakeDrafter:
    """What makes the drafter of this name for an engine. A draft model is loaded for the first, as its target is.

    Raises:
        ValueError: num_speculative_tokens below 1, or an early-exit without a number of layers.
    """
    k = num_speculative_tokens
    if k < 1:
        raise ValueError(f"num_speculative_tokens must be at least 1, got {k}")
    if name == "ngram":
        return partial(NgramDrafter, num_speculative_tokens=k, pause=pause)
    kind, _, layers = name.partition(":")
    if kind != "early-exit":
        load = lru_cache(partial(load_model, name))
        return lambda engine: DraftModelDrafter(
            engine, load(dtype=engine.model.dtype, device=engine.model.device), k, pause)
    if not layers.isdecimal():
        raise ValueError(f'early-exit needs a number of layers, as in "early-exit:6", got {name!r}')
    return partial(EarlyExitDrafter, layers=int(layers), num_speculative_tokens=k, pause=pause)
