"""Rung 3: our own forward over our own cache.

Since rung 2: no transformers code in the step. The forward is `model/llama.py`,
the cache a plain tensor that never grows and never moves, and the linear layers
are an object passed in: plain, or packed for this machine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liteinfer.cache.contiguous import ContiguousCache
from liteinfer.engines.base import OneAtATime
from liteinfer.loading import LoadedModel
from liteinfer.model.layout import Layout
from liteinfer.model.linear import LinearMaker, Plain
from liteinfer.model.llama import load_llama
from liteinfer.request import Request


class NativeCacheEngine(OneAtATime):
    """One sequence at a time in slot 0 of a contiguous cache."""

    def __init__(self, model: LoadedModel, max_model_len: int | None = None,
                 linear: LinearMaker = Plain()) -> None:  # noqa: B008 - stateless
        super().__init__(model, max_model_len)
        self.llama = load_llama(model, linear)
        self.cache = ContiguousCache(model.config, 1, self.max_model_len, model.dtype, model.device)
        self.linear_path = linear.path(model.dtype, model.device)

    def next_logits(self, request: Request) -> Tensor:
        cached = self.cache.lengths[0]
        new = request.token_ids[cached:]
        layout = Layout.of([(0, cached, len(new))], self.model.device)
        self.cache.begin(layout)
        ids = torch.tensor(new, device=self.model.device)                    # [N]
        last = torch.tensor([len(new) - 1], device=self.model.device)
        logits = self.llama(ids, layout.positions, self.cache, logits_at=last)
        self.counters.forward_passes += 1
        self.counters.tokens_computed += len(new)
        self.counters.kv_bytes_peak = self.cache.nbytes                      # all of it, from the start
        return logits[0]                                                     # [V]

    def release(self, requests: list[Request]) -> None:
        self.cache.free(0)
