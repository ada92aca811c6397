"""The forward of rung 3 with its small operators fused: nine calls a layer where there were some twenty-five.

What is fused is what would otherwise be written to memory only to be read by the next line: a residual and the norm
after it, the rotation and the store into the pages, SiLU and the product. The linear layers and the attention are
whatever the engine was given.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from liteinfer.cache.paged import PagedCache
from liteinfer.kernels.cpu import CpuOps
from liteinfer.model.llama import Llama
from liteinfer.model.rope import cos_sin


class FusedLlama:
    """The same weights and layers as a Llama, on a CPU."""

    def __init__(self, llama: Llama, ops: CpuOps) -> None:
        self.llama, self.ops = llama, ops

    def hidden_states(self, ids: Tensor, positions: Tensor, cache: PagedCache) -> Tensor:
        """ids [N] -> the last layer's output [N, E], before the final norm. Writes this step's keys and values."""
        llama, ops, layout = self.llama, self.ops, cache.layout
        heads, eps = (len(ids), -1, llama.config.head_size), llama.config.rms_norm_eps
        cos, sin = cos_sin(llama.inv_freq, positions, llama.embedding.dtype)  # [N, 1, D]
        x, add = F.embedding(ids, llama.embedding), None                     # [N, E]
        for i, layer in enumerate(llama.layers):
            normed = ops.add_rms_norm(x, add, layer.input_norm, eps)
            q, k, v = (y.view(heads) for y in layer.qkv(normed))    # [N, H, D], [N, K, D] twice
            ops.rotate_and_store(q, k, v, cos, sin, layout.slot_mapping, cache.keys[i], cache.values[i])
            attended = cache.attention(q, cache.keys[i], cache.values[i], layout)
            normed = ops.add_rms_norm(x, layer.o(attended.flatten(-2))[0], layer.mlp_norm, eps)
            add = layer.down(ops.silu_mul(*layer.gate_up(normed)))[0]        # [N, E], added by the next norm
        return x if add is None else x.add_(add)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [M, V] of hidden states [M, E]."""
        return self.llama.logits(hidden)
