"""Attention that reads the pages where they lie: on a CPU by the loop of kernels/cpu.cpp.

Since rung 4: the gather is gone, and with it some calls of torch for each sequence and layer: all queries of a step,
decodes and pieces of prompts, attend in one call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liteinfer.cache.paged import GatherSdpa, PagedAttention, PagedLayout
from liteinfer.kernels.cpu import cpu_ops
from liteinfer.loading import ModelConfig


class InPlace:
    """Our kernel on a CPU."""

    gathers = False

    def check(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ValueError for what the kernel does not take: another dtype or device, or a head of another size."""
        ops = cpu_ops(dtype, device.type)
        if ops is None:
            raise ValueError(f"attention in place needs float32 or float64 on a CPU, and a C++ compiler; dtype is "
                             f"{dtype}, device {device}")
        if not ops.fits(config.head_size):
            raise ValueError(f"attention in place takes heads that fill whole registers of {ops.panel // 2} numbers, "
                             f"head_size is {config.head_size}")

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, layout: PagedLayout) -> Tensor:
        ops = cpu_ops(q.dtype)
        assert ops is not None   # it was checked
        return ops.attend(q, keys, values, layout)


class FastAttention:
    """What suits device and model: `InPlace`, the Triton kernel on CUDA, or the gather where neither runs."""

    def __init__(self) -> None:
        self.inner: PagedAttention = GatherSdpa()

    @property
    def gathers(self) -> bool:
        return self.inner.gathers

    def check(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Choose. Nothing is refused."""
        try:
            inner = triton() if device.type == "cuda" else InPlace()
            inner.check(config, dtype, device)
        except ValueError:
            inner = GatherSdpa()
        self.inner = inner

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, layout: PagedLayout) -> Tensor:
        return self.inner(q, keys, values, layout)


def triton() -> PagedAttention:
    """Raises LoadError, a ValueError, where there is no Triton."""
    from liteinfer.kernels.paged_attention import TritonAttention

    return TritonAttention()
