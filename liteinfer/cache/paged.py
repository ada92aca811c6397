"""Keys and values in pages: blocks from a pool, and a table per sequence that says which.

Since rung 3: a sequence no longer owns `max_model_len` rows from the start. It
gets a block of `block_size` slots when it grows into one. Its block table lists
them in order, so that token t of a sequence lies in slot
`table[t // block_size] * block_size + t % block_size`. PagedAttention (Kwon et
al. 2023) is the idea; the names are vLLM's.

    block_size 4, sequence A holds 6 tokens in blocks 7 and 2, B starts with 3 in block 5
    block_tables    7 2     (A)         slot_mapping of A's token 6:  2 * 4 + 2 = 10
                    5 null  (B)         slot_mapping of B's tokens:   20 21 22
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from liteinfer.cache.block_pool import BlockPool
from liteinfer.cache.contiguous import sdpa
from liteinfer.loading import ModelConfig
from liteinfer.model.layout import Layout

SeqId = Hashable   # a sequence is named as its owner likes: a slot's number, a request's id


@dataclass(frozen=True)
class PagedLayout(Layout):
    """A step's layout, and where in the pages its tokens are."""

    block_tables: Tensor          # [B, longest table] int32, padded with the null block
    slot_mapping: Tensor          # [N] int64, where each token of the step is written


class PagedAttention(Protocol):
    """How queries attend over pages: a constructor argument of the cache."""

    gathers: bool                 # whether it copies keys and values together first

    def check(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Refuse what it cannot do, before anything is allocated. Raises ValueError."""

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, layout: PagedLayout) -> Tensor:
        """q [N, H, D] over pages [num_blocks + 1, block_size, K, D] -> [N, H, D]."""


class GatherSdpa:
    """Copy a sequence's blocks into one tensor, then attend as in rung 3."""

    gathers = True

    def check(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        """torch does everything."""

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, layout: PagedLayout) -> Tensor:
        out, row = torch.empty_like(q), 0
        for table, context, new in zip(layout.block_tables, layout.context_lens, layout.query_lens, strict=True):
            k, v = gather(keys, table, context + new), gather(values, table, context + new)
            out[row:row + new] = sdpa(q[row:row + new], k, v)
            row += new
        return out


def gather(pages: Tensor, table: Tensor, length: int) -> Tensor:
    """The first `length` tokens of a sequence [K, S, D], copied out of pages [blocks, block_size, K, D]."""
    blocks = table[:-(-length // pages.shape[1])]                            # [blocks of this sequence]
    return pages.index_select(0, blocks).flatten(0, 1)[:length].transpose(0, 1)


class PagedCache:
    """Pages for all layers, and the block tables of the sequences in them.

    A step is `reserve` for each sequence that grows, `begin(layout)` once, then
    `attend` for every layer.
    """

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype,
                 device: torch.device, attention: PagedAttention) -> None:
        attention.check(config, dtype, device)
        self.pool = BlockPool(num_blocks, block_size)
        shape = (config.num_layers, num_blocks + 1, block_size, config.num_kv_heads, config.head_size)
        self.keys = torch.empty(shape, dtype=dtype, device=device)           # [layers, blocks, block_size, K, D]
        self.values = torch.empty_like(self.keys)
        self.attention = attention
        self.tables: dict[SeqId, list[int]] = {}
        self.lengths: dict[SeqId, int] = {}                                   # tokens stored per sequence
        self.layout: PagedLayout

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: keys and values of all layers."""
        return 2 * self.keys[:, 0].nbytes

    @property
    def tail_slots(self) -> int:
        """Slots of held blocks in which no token is stored: what paging still wastes."""
        return sum(len(table) * self.pool.block_size - self.lengths[seq] for seq, table in self.tables.items())

    def reserve(self, seq: SeqId, length: int) -> None:
        """Make sure that `length` tokens of a sequence have slots; new blocks come from the pool.

        Raises:
            OutOfBlocks: there are too few; the sequence is as it was.
        """
        table = self.tables.get(seq, [])
        table = table + self.pool.allocate(max(0, self.pool.blocks_for(length) - len(table)))
        self.tables[seq] = table
        self.lengths.setdefault(seq, 0)

    def begin(self, layout: Layout) -> None:
        """Take up a step whose sequences have their blocks. Raises ValueError if it does not follow what is stored."""
        for seq, context, new in zip(layout.seq_ids, layout.context_lens, layout.query_lens, strict=True):
            if context != self.lengths.get(seq, 0):
                raise ValueError(f"sequence {seq} holds {self.lengths.get(seq, 0)} tokens, the step says {context}")
            held = len(self.tables.get(seq, ())) * self.pool.block_size
            if context + new > held:
                raise ValueError(f"sequence {seq} needs {context + new} slots, {held} are reserved")
        for seq, context, new in zip(layout.seq_ids, layout.context_lens, layout.query_lens, strict=True):
            self.lengths[seq] = context + new
        tables = [self.tables[seq] for seq in layout.seq_ids]
        width, null = max(map(len, tables)), self.pool.null_block
        block_tables = torch.tensor([table + [null] * (width - len(table)) for table in tables], dtype=torch.int32)
        slots = torch.tensor(slot_mapping(tables, layout, self.pool.block_size))
        self.layout = PagedLayout(layout.seq_ids, layout.context_lens, layout.query_lens, layout.query_start_loc,
                                  layout.seq_lens, layout.positions, block_tables.to(self.keys.device),
                                  slots.to(self.keys.device))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k, v [N, K, D]; return the attention output [N, H, D] of q [N, H, D]."""
        keys, values = self.keys[layer], self.values[layer]                  # [blocks, block_size, K, D]
        keys.flatten(0, 1).index_copy_(0, self.layout.slot_mapping, k)
        values.flatten(0, 1).index_copy_(0, self.layout.slot_mapping, v)
        return self.attention(q, keys, values, self.layout)

    def truncate(self, seq: SeqId, n: int) -> None:
        """Forget all but the first n tokens of a sequence; blocks past them go back."""
        held = self.lengths.get(seq, 0)
        if not 0 <= n <= held:
            raise ValueError(f"cannot truncate sequence {seq} to {n} tokens, it holds {held}")
        table, keep = self.tables.get(seq, []), self.pool.blocks_for(n)
        self.pool.free(table[keep:])
        del table[keep:]
        self.lengths[seq] = n

    def free(self, seq: SeqId) -> None:
        """Forget a sequence and give its blocks back; an unknown one holds none."""
        self.pool.free(self.tables.pop(seq, []))
        self.lengths.pop(seq, None)

    def check(self) -> None:
        """Assert that pool, tables and lengths agree."""
        self.pool.check(self.tables.values())
        for seq, table in self.tables.items():
            assert self.lengths[seq] <= len(table) * self.pool.block_size, f"sequence {seq} has tokens without slots"


def slot_mapping(tables: Iterable[list[int]], layout: Layout, block_size: int) -> list[int]:
    """The slot [N] of each token of a step."""
    return [table[t // block_size] * block_size + t % block_size
            for table, context, new in zip(tables, layout.context_lens, layout.query_lens, strict=True)
            for t in range(context, context + new)]
