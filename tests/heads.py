"""Draft heads for tiny models: one that knows nothing, and one that was trained for a few seconds."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from liteinfer.cache.paged import GatherSdpa, PagedCache
from liteinfer.loading import LoadedModel
from liteinfer.model.layout import Layout
from liteinfer.model.linear import Plain
from liteinfer.model.llama import load_llama
from liteinfer.plots import ch08
from liteinfer.speculative.train.fit import Settings, new_weights


def random_head(model: LoadedModel, layers: int = 1, vocab_size: int = 48, scale: float = 0.2,
                dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """A head with noise on all of its weights, so that none of them is without effect."""
    weights = new_weights(model, Settings(layers=layers), torch.arange(vocab_size), seed=0)
    generator = torch.Generator().manual_seed(1)
    return {name: tensor if name == "tokens" else
            (tensor + scale * torch.randn(tensor.shape, generator=generator)).to(dtype or model.dtype)
            for name, tensor in weights.items()}


def features(model: LoadedModel, ids: list[int]) -> Tensor:
    """The target's normed last hidden states [N, E] of these tokens, from one pass over them."""
    llama = load_llama(model, Plain())
    cache = PagedCache(model.config, 16, 16, model.dtype, model.device, GatherSdpa())
    cache.reserve(0, len(ids))
    layout = Layout.of([(0, 0, len(ids))], model.device)
    cache.begin(layout)
    with torch.inference_mode():
        hidden = llama.hidden_states(torch.tensor(ids), layout.positions, cache)
        return torch.nn.functional.rms_norm(hidden, llama.norm.shape, llama.norm, model.config.rms_norm_eps)


@cache
def trained(model: LoadedModel) -> tuple[dict[str, Tensor], list[list[int]]]:
    """A head that knows by heart what this model says to some prompts, and the prompts."""
    return ch08.by_heart(model)
