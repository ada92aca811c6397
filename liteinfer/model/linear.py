"""Linear layers, plain and packed.

One decode step reads every weight once and does two operations with it: at one
row the layers run at the speed of memory, if the code lets them. `Plain` is
F.linear on each weight as it came. `Packed` fuses the weights that share an
input (Q, K and V; gate and up) into one, and on a CPU has oneDNN lay them out
in the blocks its kernels read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

Linear = Callable[[Tensor], tuple[Tensor, ...]]   # [N, in] -> one [N, out] per weight


class LinearMaker(Protocol):
    """Turns weights [out, in] that share an input, with their biases [out] or None, into a Linear."""

    name: str
    copies: bool   # whether the weights it was given may be freed afterwards

    def __call__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Linear: ...

    def path(self, dtype: torch.dtype, device: torch.device) -> str:
        """The code that will run, named for results."""


class Plain:
    """One F.linear per weight; the tensors are shared with whoever else holds them."""

    name = "plain"
    copies = False

    def __call__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Linear:
        return lambda x: tuple(F.linear(x, w, b) for w, b in zip(weights, biases, strict=True))

    def path(self, dtype: torch.dtype, device: torch.device) -> str:
        return "plain F.linear"


class Packed:
    """Weights with one input fused into one; in oneDNN's layout where that works."""

    name = "packed"
    copies = True

    def __call__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Linear:
        sizes = [w.shape[0] for w in weights]
        fused = torch.cat(list(weights))                                     # [sum of out, in], a copy
        bias = None if biases[0] is None else torch.cat([b for b in biases if b is not None])
        if onednn_works(fused.dtype, fused.device):
            packed = torch.ops.mkldnn._reorder_linear_weight(fused)          # same numbers, blocked layout

            def onednn(x: Tensor) -> tuple[Tensor, ...]:
                y = torch.ops.mkldnn._linear_pointwise(x.contiguous(), packed, bias, "none", [], "")
                return y.split(sizes, dim=-1)

            return onednn
        return lambda x: F.linear(x, fused, bias).split(sizes, dim=-1)

    def path(self, dtype: torch.dtype, device: torch.device) -> str:
        return "oneDNN packed" if onednn_works(dtype, device) else "fused F.linear"


def onednn_works(dtype: torch.dtype, device: torch.device) -> bool:
    """Try the private operators once on a small product; False where they are absent or wrong."""
    if device.type != "cpu" or dtype != torch.float32:
        return False
    x, w = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(4, 3)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(w)
        y = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return torch.allclose(y, x @ w.T)
