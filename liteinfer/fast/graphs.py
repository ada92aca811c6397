"""One CUDA graph for each decode width: a step of hundreds of kernels launched as one.

On a GPU a decode step of a small model is mostly Python: some ten launches a layer, each a few microseconds on the
way, for kernels that take less. A graph records the launches once, addresses included, and replays them all with a
single call. So everything a recorded step reads has to lie at the same place in every step: the step's inputs are
copied into tensors of a fixed size first. A step of 5 sequences runs in the graph for 8; its other rows read and
write the null block, which belongs to nobody, and what comes out of them is dropped.

Graphs are recorded when a width is first needed. Steps with pieces of prompts or with drafts run without one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from liteinfer.cache.paged import PagedCache, PagedLayout
from liteinfer.model.layout import Layout
from liteinfer.model.llama import Llama
from liteinfer.runner import Runner, StepOutput
from liteinfer.scheduler import Chunk

WIDTHS = (1, 2, 4, 8, 16, 24, 32)   # beyond: multiples of the last


class Replayed(Protocol):
    """Work that was recorded, to be done again."""

    def replay(self) -> None: ...


class CudaGraph:
    """The kernels that `work` launches, recorded."""

    def __init__(self, work: Callable[[], None]) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):       # kernels are compiled and workspaces taken before anything is recorded
                work()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            work()

    def replay(self) -> None:
        self.graph.replay()


class Rerun:
    """No graph: the same work, launched again. What a machine without CUDA can test the rest with."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


class Slots:
    """A decode step of `width` rows: inputs and outputs at fixed places, and the work between them."""

    def __init__(self, llama: Llama, cache: PagedCache, width: int, record: Callable[[Callable[[], None]], Replayed]
                 ) -> None:
        device, config, pool = llama.embedding.device, llama.config, cache.pool
        self.llama, self.cache = llama, cache
        self.ids = torch.zeros(width, dtype=torch.long, device=device)       # [W]
        self.nowhere = pool.null_block * pool.block_size                     # a slot of the null block
        longest = config.max_position_embeddings
        self.layout = PagedLayout(
            tuple(range(width)), (longest - 1,) * width, (1,) * width,
            torch.arange(width + 1, dtype=torch.int32, device=device),
            torch.ones(width, dtype=torch.int32, device=device), torch.zeros_like(self.ids),
            torch.full((width, pool.blocks_for(longest)), pool.null_block, dtype=torch.int32, device=device),
            torch.full((width,), self.nowhere, dtype=torch.long, device=device))
        self.hidden = torch.empty(width, config.hidden_size, dtype=llama.embedding.dtype, device=device)
        self.logits = torch.empty(width, config.vocab_size, dtype=llama.embedding.dtype, device=device)
        self.recorded = record(self._work)

    def _work(self) -> None:
        self.cache.layout = self.layout
        self.hidden.copy_(self.llama.hidden_states(self.ids, self.layout.positions, self.cache))
        self.logits.copy_(self.llama.logits(self.hidden))

    def run(self, ids: Tensor, layout: PagedLayout) -> StepOutput:
        """A step of B <= W sequences: ids [B] on any device, the layout as the cache made it."""
        mine, rows, blocks = self.layout, len(ids), layout.block_tables.shape[1]
        self.ids[:rows].copy_(ids, non_blocking=True)
        for there, here in ((mine.positions, layout.positions), (mine.seq_lens, layout.seq_lens),
                            (mine.slot_mapping, layout.slot_mapping),
                            (mine.block_tables[:, :blocks], layout.block_tables)):
            there[:rows].copy_(here, non_blocking=True)
        mine.seq_lens[rows:], mine.slot_mapping[rows:], mine.positions[rows:] = 1, self.nowhere, 0
        mine.block_tables[rows:, 0] = self.cache.pool.null_block
        self.recorded.replay()
        return StepOutput(self.logits[:rows], self.hidden[:rows].clone())    # the next replay overwrites both


class GraphRunner(Runner):
    """The plain runner, but steps in which every sequence decodes are replayed."""

    record: Callable[[Callable[[], None]], Replayed] = CudaGraph

    def __init__(self, llama: Llama, cache: PagedCache) -> None:
        super().__init__(llama, cache)
        self.slots: dict[int, Slots] = {}

    def run(self, chunks: tuple[Chunk, ...]) -> StepOutput:
        if any(chunk.num_tokens != 1 or not chunk.num_logits for chunk in chunks):
            return super().run(chunks)
        self.cache.begin(Layout.of([(c.request.request_id, c.start, 1) for c in chunks], self.llama.embedding.device))
        layout, width = self.cache.layout, padded(len(chunks))
        if width not in self.slots:
            self.slots[width] = Slots(self.llama, self.cache, width, type(self).record)
        return self.slots[width].run(torch.tensor([chunk.token_ids[0] for chunk in chunks]), layout)


def padded(width: int, widths: Sequence[int] = WIDTHS) -> int:
    """The width of the graph that a step of so many sequences runs in.

    >>> padded(5), padded(24), padded(33)
    (8, 24, 64)
    """
    return next((each for each in widths if each >= width), -(-width // widths[-1]) * widths[-1])
