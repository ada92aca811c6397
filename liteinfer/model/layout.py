"""Who the tokens of a step belong to.

A step's tokens lie one after the other in a flat row of N, whoever they belong
to. The layout says where each sequence's tokens start (`query_start_loc`) and
how long each sequence is after the step (`seq_lens`); the names are vLLM's.

    two sequences: A has 5 tokens cached and adds 1, B starts with 3
    tokens            a5   b0 b1 b2
    positions          5    0  1  2
    query_start_loc    0    1        4
    seq_lens           6    3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """One step. The tuples are for loops in Python, the tensors for the device."""

    seq_ids: tuple[Any, ...]      # [B] which of the cache's sequences, by the cache's own names for them
    context_lens: tuple[int, ...]  # [B] tokens cached before this step
    query_lens: tuple[int, ...]   # [B] tokens this step adds (L)
    query_start_loc: Tensor       # [B + 1] int32
    seq_lens: Tensor              # [B] int32, context plus query (S)
    positions: Tensor             # [N] int64

    @staticmethod
    def of(sequences: Sequence[tuple[Any, int, int]], device: torch.device) -> Layout:
        """Build a layout from (seq_id, tokens cached, tokens to add) for each sequence."""
        seq_ids, context_lens, query_lens = zip(*sequences, strict=True)
        starts = torch.tensor([0, *query_lens]).cumsum(0)
        positions = torch.tensor([p for _, c, q in sequences for p in range(c, c + q)])
        seq_lens = torch.tensor([c + q for _, c, q in sequences])
        return Layout(seq_ids, context_lens, query_lens,
                      starts.int().to(device), seq_lens.int().to(device), positions.to(device))
