"""Keys and values as plain tensors, allocated once.

Since rung 2: DynamicCache makes a new, longer tensor at every step and copies
all it holds into it. Here each sequence owns `max_model_len` rows from the
start, and a step writes only its own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from liteinfer.loading import ModelConfig
from liteinfer.model.layout import Layout

# q [L, H, D] and all keys and values [K, S, D] of one sequence -> [L, H, D]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of a sequence's last L tokens over all its S tokens.

    Query row i may see keys 0 .. S - L + i. torch's own is_causal aligns its
    triangle at the top left, so it is right only when L == S; in between, the
    mask is built here.
    """
    new, total = q.shape[0], k.shape[1]
    mask = None
    if 1 < new < total:
        mask = torch.ones(new, total, dtype=torch.bool, device=q.device).tril(total - new)
    out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k[None], v[None], attn_mask=mask,
                                         is_causal=new > 1 and new == total, enable_gqa=True)
    return out[0].transpose(0, 1)                                            # [L, H, D]


class ContiguousCache:
    """`max_num_seqs` sequences of at most `max_model_len` tokens.

    A step is `begin(layout)` once, then `attend` for every layer.
    """

    def __init__(self, config: ModelConfig, max_num_seqs: int, max_model_len: int, dtype: torch.dtype,
                 device: torch.device, attention: Attention = sdpa) -> None:
        shape = (config.num_layers, max_num_seqs, config.num_kv_heads, max_model_len, config.head_size)
        self.keys = torch.empty(shape, dtype=dtype, device=device)           # [layers, seqs, K, S, D]
        self.values = torch.empty_like(self.keys)
        self.lengths = [0] * max_num_seqs                                    # tokens stored per sequence
        self.attention = attention
        self.layout: Layout

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def begin(self, layout: Layout) -> None:
        """Take up a step. Raises ValueError if it does not follow what is stored, or does not fit."""
        capacity = self.keys.shape[3]
        for seq, context, new in zip(layout.seq_ids, layout.context_lens, layout.query_lens, strict=True):
            if context != self.lengths[seq]:
                raise ValueError(f"sequence {seq} holds {self.lengths[seq]} tokens, the step says {context}")
            if context + new > capacity:
                raise ValueError(f"sequence {seq} needs {context + new} tokens, the cache holds {capacity}")
        for seq, context, new in zip(layout.seq_ids, layout.context_lens, layout.query_lens, strict=True):
            self.lengths[seq] = context + new
        self.layout = layout

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k, v [N, K, D]; return the attention output [N, H, D] of q [N, H, D]."""
        out = torch.empty_like(q)
        row = 0
        for seq, start, new in zip(self.layout.seq_ids, self.layout.context_lens, self.layout.query_lens, strict=True):
            rows, end = slice(row, row + new), start + new
            keys, values = self.keys[layer, seq], self.values[layer, seq]    # [K, S, D]
            keys[:, start:end] = k[rows].transpose(0, 1)
            values[:, start:end] = v[rows].transpose(0, 1)
            out[rows] = self.attention(q[rows], keys[:, :end], values[:, :end])
            row += new
        return out

    def truncate(self, seq: int, n: int) -> None:
        """Forget all but the first n tokens of a sequence."""
        if not 0 <= n <= self.lengths[seq]:
            raise ValueError(f"cannot truncate sequence {seq} to {n} tokens, it holds {self.lengths[seq]}")
        self.lengths[seq] = n

    def free(self, seq: int) -> None:
        """Forget a sequence."""
        self.lengths[seq] = 0
