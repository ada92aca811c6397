"""One forward pass over whatever the scheduler put together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from liteinfer.cache.paged import PagedCache
from liteinfer.model.layout import Layout
from liteinfer.model.llama import Llama
from liteinfer.scheduler import Chunk


@dataclass(frozen=True)
class StepOutput:
    """What the model said."""

    logits: Tensor           # [M, V], num_logits rows of each chunk, in the order of the chunks
    hidden_states: Tensor    # [N, E] of every token of the step, before the final norm


class Runner:
    """Prefill chunks and decodes side by side in one ragged pass; logits only where a token is wanted."""

    def __init__(self, llama: Llama, cache: PagedCache) -> None:
        self.llama = llama
        self.cache = cache

    def run(self, chunks: tuple[Chunk, ...]) -> StepOutput:
        """Compute the chunks' tokens and store their keys and values."""
        device = self.llama.embedding.device
        layout = Layout.of([(c.request.request_id, c.start, c.num_tokens) for c in chunks], device)
        self.cache.begin(layout)
        ids = torch.tensor([token for chunk in chunks for token in chunk.token_ids], device=device)   # [N]
        rows, end = list[int](), 0
        for chunk in chunks:
            end += chunk.num_tokens
            rows += range(end - chunk.num_logits, end)
        return self.forward(ids, layout, torch.tensor(rows, dtype=torch.long, device=device))

    def forward(self, ids: Tensor, layout: Layout, logits_at: Tensor) -> StepOutput:
        """ids [N], logits at rows [M]."""
        hidden = self.llama.hidden_states(ids, layout.positions, self.cache)  # [N, E]
        return StepOutput(self.llama.logits(hidden[logits_at]), hidden)
