"""A drafter by name, alone or as "A+B": B guesses where A has nothing to say.

    ngram           what followed in prompt or output
    draft-head      the head that comes with liteinfer for the target
    early-exit:N    the target's first N layers
    anything else   the folder of a trained head, or a draft model's name, folder or hub id
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

from torch import Tensor

from liteinfer.engines.continuous import ContinuousEngine
from liteinfer.loading import LoadedModel, load_model
from liteinfer.speculative.draft_head import DraftHeadDrafter
from liteinfer.speculative.draft_model import DraftModelDrafter
from liteinfer.speculative.drafter import Pause, SpeculativeDrafter
from liteinfer.speculative.early_exit import EarlyExitDrafter
from liteinfer.speculative.fallback import FallbackDrafter
from liteinfer.speculative.head_files import is_head, load_head, shipped_head
from liteinfer.speculative.ngram import NgramDrafter

MakeDrafter = Callable[[ContinuousEngine], SpeculativeDrafter]
SHIPPED = "ngram+draft-head"   # of the row liteinfer-speculative, unless another is named
BEFORE_A_HEAD = 3              # tokens that must match before n-grams are trusted more than what comes after the +
MIN_CONFIDENCE = 0.3           # of a head's draft; below it, a guess costs more than it brings


def drafter(name: str, num_speculative_tokens: int = 4, pause: Pause | None = None) -> MakeDrafter:
    """What makes the drafter of this name for an engine. A draft model is loaded for the first, as its target is.

    Raises:
        ValueError: num_speculative_tokens below 1, or an early-exit without a number of layers.
    """
    k = num_speculative_tokens
    if k < 1:
        raise ValueError(f"num_speculative_tokens must be at least 1, got {k}")
    first, plus, then = name.partition("+")
    if plus and not Path(name).expanduser().exists():
        leading = (partial(NgramDrafter, num_speculative_tokens=k, prompt_lookup_min=BEFORE_A_HEAD) if first == "ngram"
                   else drafter(first, k))
        return partial(FallbackDrafter, first=leading, then=drafter(then, k), num_speculative_tokens=k, pause=pause)
    if name == "ngram":
        return partial(NgramDrafter, num_speculative_tokens=k, pause=pause)
    if name == "draft-head" or is_head(name):
        return lambda engine: DraftHeadDrafter(engine, head_weights(name, engine.model), k, pause, MIN_CONFIDENCE)
    kind, _, layers = name.partition(":")
    if kind != "early-exit":
        load = lru_cache(partial(load_model, name))
        return lambda engine: DraftModelDrafter(
            engine, load(dtype=engine.model.dtype, device=engine.model.device), k, pause)
    if not layers.isdecimal():
        raise ValueError(f'early-exit needs a number of layers, as in "early-exit:6", got {name!r}')
    return partial(EarlyExitDrafter, layers=int(layers), num_speculative_tokens=k, pause=pause)


def shipped(engine: ContinuousEngine) -> SpeculativeDrafter:
    """The drafter of the row liteinfer-speculative. Raises ValueError if no head comes with the engine's model."""
    return drafter(SHIPPED)(engine)


def head_weights(name: str, model: LoadedModel) -> dict[str, Tensor]:
    """The weights of "draft-head", or of the head in a folder, read once for a target. Raises as `load_head`."""
    folder = shipped_head(model) if name == "draft-head" else Path(name).expanduser()
    return model.once(f"draft-head {folder.resolve()}", lambda: load_head(folder, model))
