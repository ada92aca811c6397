"""The block pool: every operation leaves each block free or held, and refuses what would not."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from liteinfer.cache.block_pool import BlockPool, DoubleFree, ForeignBlock, OutOfBlocks

pytestmark = pytest.mark.ch04


def test_allocating_is_all_or_nothing() -> None:
    pool = BlockPool(4, 16)
    held = pool.allocate(3)
    with pytest.raises(OutOfBlocks, match="2 KV blocks asked for, 1 of 4 are free"):
        pool.allocate(2)
    assert pool.num_free == 1 and pool.num_used == 3
    assert pool.allocate(0) == []
    assert sorted(held + pool.allocate(1)) == [0, 1, 2, 3]
    pool.check()


def test_a_shared_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(2, 4)
    first, = pool.allocate(1)
    pool.share([first])
    pool.free([first])
    assert pool.num_free == 1 and pool.ref_counts[first] == 1
    pool.free([first])
    assert pool.num_free == 2
    with pytest.raises(ValueError, match=f"block {first} is free"):
        pool.share([first])
    pool.check([])


def test_a_double_free_is_refused_whole() -> None:
    pool = BlockPool(4, 4)
    a, b = pool.allocate(2)
    pool.free([a])
    for twice in ([b, a], [b, b]):
        with pytest.raises(DoubleFree, match=r"freed \d times and has \d holders"):
            pool.free(twice)
        assert pool.ref_counts[b] == 1, "the block before the bad one was freed"
    pool.check([[b]])


@pytest.mark.parametrize("block", [-1, 4, 5, 10**9])
def test_a_foreign_block_is_refused(block: int) -> None:
    """The null block, number 4, is nobody's either."""
    pool = BlockPool(4, 4)
    held = pool.allocate(1)
    for operation in (pool.free, pool.share):
        with pytest.raises(ForeignBlock, match=f"block {block} is not one of this pool's 0 to 3"):
            operation([*held, block])
    pool.check([held])


@pytest.mark.parametrize(("num_blocks", "block_size", "named"), [
    (0, 16, "num_blocks.*0"), (-1, 16, "num_blocks.*-1"), (4, 0, "block_size.*0"), (4, 3, "block_size.*3"),
    (4, -2, "block_size.*-2"), (4, 24, "block_size.*24")])
def test_sizes_that_make_no_pool_are_refused(num_blocks: int, block_size: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        BlockPool(num_blocks, block_size)


@pytest.mark.parametrize("spoil", [
    lambda pool: pool.free_list.append(0),             # held and free
    lambda pool: pool.free_list.append(pool.free_list[0]),
    lambda pool: pool.free_list.pop(),                 # lost
    lambda pool: pool.ref_counts.__setitem__(0, 2),    # a holder that no table names
    lambda pool: pool.ref_counts.__setitem__(0, -1),
], ids=["held and free", "free twice", "lost", "unknown holder", "negative"])
def test_check_sees_every_way_to_be_wrong(spoil) -> None:
    pool = BlockPool(4, 4)
    held = pool.allocate(2)
    pool.check([held])
    spoil(pool)
    with pytest.raises(AssertionError, match="block"):
        pool.check([held])


class PoolMachine(RuleBasedStateMachine):
    """Allocate, share and free in any order; the invariant holds after each."""

    holdings = Bundle("holdings")   # lists of blocks, each one holder

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12, 4)
        self.held: list[list[int]] = []

    @rule(target=holdings, n=st.integers(0, 5))
    def allocate(self, n: int):
        free = self.pool.num_free
        if n > free:
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(n)
            assert self.pool.num_free == free
            return multiple()
        blocks = self.pool.allocate(n)
        assert not set(blocks) & {block for holding in self.held for block in holding}, "a held block was handed out"
        self.held.append(blocks)
        return blocks

    @rule(target=holdings, blocks=holdings)
    def share(self, blocks: list[int]) -> list[int]:
        self.pool.share(blocks)
        copy = list(blocks)
        self.held.append(copy)
        return copy

    @rule(blocks=consumes(holdings))
    def free(self, blocks: list[int]) -> None:
        self.pool.free(blocks)
        self.held = [holding for holding in self.held if holding is not blocks]

    @invariant()
    def holds(self) -> None:
        self.pool.check(self.held)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase


def test_10_000_random_operations_with_the_invariant_after_each() -> None:
    rng, pool = random.Random(4), BlockPool(64, 16)
    held: list[list[int]] = []
    refused = 0
    for _ in range(10_000):
        what = rng.random()
        if what < 0.45:
            try:
                held.append(pool.allocate(rng.randrange(12)))
            except OutOfBlocks:
                refused += 1
        elif what < 0.6 and held:
            held.append(list(rng.choice(held)))
            pool.share(held[-1])
        elif held:
            pool.free(held.pop(rng.randrange(len(held))))
        pool.check(held)
    assert refused > 100, "the pool was never tight"
    for blocks in held:
        pool.free(blocks)
    pool.check([])
    assert pool.num_free == 64
