"""What keys and values take in memory: a slot of 2,048 tokens each, or blocks as a stream grows.

Everything here is read off live caches, which are grown as an engine grows them
(`reserve`, `begin`) without a forward: nobody looks at the keys and values, and
pages that are never written cost the machine nothing. No clock is involved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.codehash import kind_hash
from benchmarks.result_file import Result, head
from benchmarks.workloads import Shape
from liteinfer.cache.block_pool import OutOfBlocks
from liteinfer.cache.contiguous import ContiguousCache
from liteinfer.cache.paged import GatherSdpa, PagedCache
from liteinfer.loading import LoadedModel, ModelConfig
from liteinfer.model.layout import Layout

MAX_MODEL_LEN = 2048                       # tokens a contiguous slot is made for
OUTPUTS = (48, 256, 1024)                  # output lengths of the table, besides the reader's own
BLOCK_SIZES = tuple(2**i for i in range(9))   # 1 to 256
WIDTH = 32                                 # sequences side by side in the mixed-length workload


@dataclass(frozen=True)
class Memory:
    """One model's caches, and how the streams in them look.

    Args:
        isl: tokens of each stream's prompt.
        budget_bytes: what all streams together may take.
    """

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    isl: int = 1
    block_size: int = 16
    budget_bytes: int = 2**30

    def __post_init__(self) -> None:
        if self.isl < 1:
            raise ValueError(f"isl must be at least 1, got {self.isl}")
        if self.budget_bytes < self.block_bytes:
            raise ValueError(f"a budget of {self.budget_bytes:,} bytes holds no block: {self.block_size} tokens take "
                             f"{self.block_bytes:,}")

    @property
    def block_bytes(self) -> int:
        return self.paged(1, self.block_size).block_bytes

    def paged(self, num_blocks: int, block_size: int) -> PagedCache:
        try:
            return PagedCache(self.config, num_blocks, block_size, self.dtype, self.device, GatherSdpa())
        except RuntimeError as error:      # torch could not have the pages
            raise ValueError(f"{num_blocks:,} blocks of {block_size} tokens cannot be allocated on this machine: "
                             f"{str(error).splitlines()[0]}") from None

    def contiguous(self, streams: int) -> ContiguousCache:
        return ContiguousCache(self.config, streams, MAX_MODEL_LEN, self.dtype, self.device)

    def length(self, output: int) -> Result:
        """One line of the table: streams of this many output tokens.

        Raises:
            ValueError: no output, or more tokens than a contiguous slot has.
        """
        if output < 1:
            raise ValueError(f"osl must be at least 1, got {output}")
        stored = self.isl + output - 1     # the last token is never fed, so it is never stored
        if stored > MAX_MODEL_LEN:
            raise ValueError(f"isl {self.isl} + osl {output} stores {stored} tokens, a contiguous slot has "
                             f"{MAX_MODEL_LEN}")
        contiguous, blocks, paged = self.contiguous(1).nbytes, *self.grown(stored)
        return {"output": output, "stored": stored, "blocks": blocks, "contiguous_bytes": contiguous,
                "paged_bytes": paged, "saved": 1 - paged / contiguous,
                "streams_contiguous": self.budget_bytes // contiguous, "streams_paged": self.admitted(stored)}

    def grown(self, stored: int) -> tuple[int, int]:
        """Blocks, and their bytes, that a stream holds once it has grown to `stored` tokens, one by one."""
        cache = self.paged(-(-stored // self.block_size), self.block_size)
        for length in range(self.isl, stored + 1):
            grow(cache, {0: length})
        blocks = len(cache.tables[0])
        assert blocks == cache.pool.num_used == -(-stored // self.block_size)
        return blocks, blocks * cache.block_bytes

    def admitted(self, stored: int) -> int:
        """How many streams of this length a pool of the budget takes before it refuses one."""
        cache = self.paged(self.budget_bytes // self.block_bytes, self.block_size)
        for stream in range(cache.pool.num_blocks + 1):
            try:
                grow(cache, {stream: stored})
            except OutOfBlocks:
                return stream
        raise AssertionError("a pool gave more blocks than it has")

    def waste(self, shape: Shape, prompts: int, block_size: int) -> Result:
        """Slots held, and those of them in which no token is stored, over the decoding of a whole workload.

        Counted as the engine counts them: once a pass, over all sequences in it, when the pass has
        stored its tokens. The first `prompts` of the shape run in static batches of 32 whose finished
        rows give their blocks back at once; a sequence is never held up, so other batches would give
        the same sums. `waste_at_end` is the share at the one moment before each sequence ends.
        """
        longest = -(-(shape.isl + max(shape.output)) // block_size)
        cache = self.paged(WIDTH * longest, block_size)
        outputs = dict(enumerate(map(shape.output_length, range(prompts))))
        held = tail = held_at_end = tail_at_end = 0
        for first in range(0, prompts, WIDTH):
            batch = {seq: outputs[seq] for seq in range(first, min(first + WIDTH, prompts))}
            for step in range(1, max(batch.values()) + 1):
                grow(cache, {seq: shape.isl + step - 1 for seq in batch})
                held, tail = held + cache.pool.num_used * block_size, tail + cache.tail_slots
                for seq in [seq for seq, output in batch.items() if output == step]:
                    slots = len(cache.tables[seq]) * block_size
                    held_at_end, tail_at_end = held_at_end + slots, tail_at_end + slots - cache.lengths[seq]
                    cache.free(seq)
                    del batch[seq]
        assert cache.pool.num_used == 0
        return {"block_size": block_size, "held_slots": held, "tail_slots": tail, "waste": tail / held,
                "waste_at_end": tail_at_end / held_at_end}


def grow(cache: PagedCache, lengths: Mapping[int, int]) -> None:
    """One step without its forward: every sequence gets blocks for, and then stores, this many tokens in all."""
    for seq, length in lengths.items():
        cache.reserve(seq, length)
    cache.begin(Layout.of([(seq, cache.lengths[seq], length - cache.lengths[seq]) for seq, length in lengths.items()],
                          cache.keys.device))


def measure(model: LoadedModel, machine: Mapping[str, Any], shape: Shape, memory: Memory,
            outputs: Sequence[int] = ()) -> Result:
    """The result JSON: the usual output lengths that fit and the reader's own `outputs`, and the waste of a shape."""
    usual = {output for output in OUTPUTS if memory.isl + output - 1 <= MAX_MODEL_LEN}
    prompts = shape.prompts_at(WIDTH)
    return {**head(model, machine, "kv_memory"), "isl": memory.isl, "block_size": memory.block_size,
            "max_model_len": MAX_MODEL_LEN, "budget_bytes": memory.budget_bytes,
            "lengths": [memory.length(output) for output in sorted({*outputs, *usual}) or OUTPUTS],
            "waste": {"shape": shape.name, "prompts": prompts, "isl": shape.isl, "osl": str(shape.osl),
                      "by_block_size": [memory.waste(shape, prompts, size) for size in BLOCK_SIZES]},
            "code_hash": kind_hash("kv_memory")}
