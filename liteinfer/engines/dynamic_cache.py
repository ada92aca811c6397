"""Rung 2: keep the keys and values. A step feeds only what the cache has not seen.

Since rung 1: the layers' keys and values stay in a transformers DynamicCache,
so a decode step computes one token. The same line serves prefill and decode:
what is not in the cache yet is the whole prompt at first, then one token.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache

from liteinfer.engines.base import OneAtATime
from liteinfer.request import Request


class DynamicCacheEngine(OneAtATime):
    """A transformers model with its own cache, which grows by concatenation."""

    cache: DynamicCache | None = None

    def next_logits(self, request: Request) -> Tensor:
        if self.cache is None:
            self.cache = DynamicCache()
        held = kv_bytes(self.cache)
        new = request.token_ids[self.cache.get_seq_length():]
        ids = torch.tensor([new], device=self.model.device)                  # [1, L]
        cache = {self.model.cache_keyword: self.cache}
        out = self.model.transformers_model()(input_ids=ids, use_cache=True, logits_to_keep=1, **cache)
        self.counters.forward_passes += 1
        self.counters.tokens_computed += len(new)
        self.counters.kv_bytes_copied += held       # torch.cat wrote all of it into new tensors
        self.counters.kv_bytes_peak = max(self.counters.kv_bytes_peak, kv_bytes(self.cache))
        return out.logits[0, -1]                                             # [V]

    def release(self, requests: list[Request]) -> None:
        self.cache = None


def kv_bytes(cache: DynamicCache) -> int:
    """Bytes of keys and values that `cache` holds, over all layers."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers if layer.is_initialized)
