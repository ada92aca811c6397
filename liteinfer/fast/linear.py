"""Linear layers by our own kernel: weights in panels, read from the first byte to the last.

Since rung 3: oneDNN's packed layers read weights slower than memory gives them at one row, and multiply slower than
the processor can at 32. A step is mostly such layers, so we write the one loop it needs ourselves (`tile` in
kernels/cpu.cpp): a panel of weights meets all rows of the step while it is near.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from liteinfer.kernels.cpu import cpu_ops
from liteinfer.model.linear import Linear, Packed


class Panels:
    """Weights with one input fused into one and laid out in panels; `Packed` where our kernels do not run."""

    name = "panels"
    copies = True

    def __call__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Linear:
        ops = cpu_ops(weights[0].dtype, weights[0].device.type)
        if ops is None:
            return Packed()(weights, biases)
        sizes = [w.shape[0] for w in weights]
        panels = ops.pack(torch.cat(list(weights)))
        bias = None if biases[0] is None else torch.cat([b for b in biases if b is not None])

        def linear(x: Tensor) -> tuple[Tensor, ...]:
            return ops.linear(x, panels, bias, sum(sizes)).split(sizes, dim=-1)

        return linear

    def path(self, dtype: torch.dtype, device: torch.device) -> str:
        return "our panels" if cpu_ops(dtype, device.type) else Packed().path(dtype, device)
