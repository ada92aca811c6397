"""Runners that waste little between the linear layers: fused operators on a CPU, graphs on a GPU."""

from __future__ import annotations

from torch import Tensor

from liteinfer.cache.paged import PagedCache
from liteinfer.fast.forward import FusedLlama
from liteinfer.fast.graphs import GraphRunner
from liteinfer.kernels.cpu import CpuOps, cpu_ops, in_huge_pages
from liteinfer.model.layout import Layout
from liteinfer.model.llama import Llama
from liteinfer.runner import Runner, StepOutput


class FusedRunner(Runner):
    """The plain runner's steps through `FusedLlama`."""

    def __init__(self, llama: Llama, cache: PagedCache, ops: CpuOps) -> None:
        super().__init__(llama, cache)
        self.model = FusedLlama(llama, ops)
        for pages in (cache.keys, cache.values):
            in_huge_pages(pages)

    def forward(self, ids: Tensor, layout: Layout, logits_at: Tensor) -> StepOutput:
        hidden = self.model.hidden_states(ids, layout.positions, self.cache)  # [N, E]
        return StepOutput(self.model.logits(hidden[logits_at]), hidden)


def fast_runner(llama: Llama, cache: PagedCache) -> Runner:
    """What suits the device: graphs where attention copies nothing on CUDA, fused operators where ours run on a CPU."""
    device = llama.embedding.device
    if device.type == "cuda" and not cache.attention.gathers:
        return GraphRunner(llama, cache)
    ops = cpu_ops(llama.embedding.dtype, device.type)
    return FusedRunner(llama, cache, ops) if ops else Runner(llama, cache)
