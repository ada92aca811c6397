"""Fixed-size blocks of token slots, handed out and taken back.

A pool knows numbers, not tensors: block 3 of a pool of 16-token blocks is the
slots 48 to 63 of whatever lies behind it. A block may have several holders;
it is free again when the last has let go. One more block, the null block, is
nobody's: padded entries of block tables point at it (vLLM has one too).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


class OutOfBlocks(RuntimeError):
    """More blocks were asked for than are free. Nothing was handed out."""


class DoubleFree(RuntimeError):
    """A block was freed that has no holder."""


class ForeignBlock(ValueError):
    """A block id that this pool does not hand out."""


class BlockPool:
    """Blocks 0 .. num_blocks - 1 of `block_size` tokens each.

    >>> pool = BlockPool(num_blocks=4, block_size=16)
    >>> held = pool.allocate(3)
    >>> pool.share(held[:1])
    >>> pool.free(held)              # block held[0] keeps its other holder
    >>> pool.num_free
    3
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        if block_size < 1 or block_size & (block_size - 1):
            raise ValueError(f"block_size must be a power of two from 1, got {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.null_block = num_blocks                  # one past the last: storage has a place for it
        self.ref_counts = [0] * num_blocks            # holders of each block
        self.free_list = list(range(num_blocks))[::-1]  # taken from and returned to the end: last freed, first reused

    @property
    def num_free(self) -> int:
        return len(self.free_list)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold this many tokens."""
        return -(-tokens // self.block_size)

    def allocate(self, n: int) -> list[int]:
        """n blocks, each with one holder: all of them, or OutOfBlocks and none."""
        if n > self.num_free:
            raise OutOfBlocks(f"{n} KV blocks asked for, {self.num_free} of {self.num_blocks} are free")
        blocks = [self.free_list.pop() for _ in range(n)]
        for block in blocks:
            self.ref_counts[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """One more holder for each block. Raises ForeignBlock, or ValueError for a block that is free."""
        self._own(blocks)
        for block in blocks:
            if not self.ref_counts[block]:
                raise ValueError(f"block {block} is free: only a block that somebody holds can be shared")
        for block in blocks:
            self.ref_counts[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """One holder less for each block; all of them, or an error and none.

        Raises:
            DoubleFree: a block has fewer holders than times it is freed here.
            ForeignBlock: an id that is not this pool's, the null block included.
        """
        self._own(blocks)
        for block, times in Counter(blocks).items():
            if self.ref_counts[block] < times:
                raise DoubleFree(f"block {block} is freed {times} times and has {self.ref_counts[block]} holders")
        for block in reversed(blocks):                # so that a table comes back in its own order
            self.ref_counts[block] -= 1
            if not self.ref_counts[block]:
                self.free_list.append(block)

    def check(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Assert the invariant: every block is free or held, never both.

        With `tables`, all the holders there are: each block has as many as tables name it.
        """
        assert len(set(self.free_list)) == len(self.free_list), "a block is in the free list twice"
        free = set(self.free_list)
        for block, holders in enumerate(self.ref_counts):
            assert holders >= 0, f"block {block} has {holders} holders"
            assert (holders == 0) == (block in free), f"block {block} has {holders} holders; free: {block in free}"
        if tables is not None:
            named = Counter(block for table in tables for block in table)
            held = {block: holders for block, holders in enumerate(self.ref_counts) if holders}
            assert named == held, f"holders by block {held}, named by tables {dict(named)}"

    def _own(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if not 0 <= block < self.num_blocks:
                raise ForeignBlock(f"block {block} is not one of this pool's 0 to {self.num_blocks - 1}")
