"""Rung 1: no cache. Every step feeds the whole sequence again.

Slow, and impossible to get wrong, which is why every later rung is compared
with this one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liteinfer.engines.base import OneAtATime
from liteinfer.request import Request


class NoCacheEngine(OneAtATime):
    """A transformers model, run from the first token at every step."""

    def next_logits(self, request: Request) -> Tensor:
        ids = torch.tensor([request.token_ids], device=self.model.device)    # [1, S]
        out = self.model.transformers_model()(input_ids=ids, use_cache=False, logits_to_keep=1)
        self.counters.forward_passes += 1
        self.counters.tokens_computed += ids.numel()
        return out.logits[0, -1]                                             # [V]
