"""The radix tree, by hand and against a naive model."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from liteinfer.cache.block_pool import BlockPool, OutOfBlocks
from liteinfer.cache.radix import Node, RadixTree

pytestmark = pytest.mark.ch07


def tree_of(num_blocks: int, block_size: int) -> tuple[BlockPool, RadixTree]:
    pool = BlockPool(num_blocks, block_size)
    return pool, RadixTree(pool)


def put(tree: RadixTree, ids: list[int], salt: str | None = None) -> Node:
    """Insert as a request does that then ends: allocate, insert, let go."""
    blocks = tree.pool.allocate(len(ids) // tree.pool.block_size)
    node = tree.insert(ids, blocks, salt)
    tree.pool.free(blocks)
    tree.check()
    return node


def shape(node: Node) -> dict:
    """The tree below a node as nested dictionaries of its edges' ids."""
    return {tuple(token for block in child.key for token in block): shape(child) for child in node.children.values()}


def test_where_prompts_part_an_edge_is_split() -> None:
    pool, tree = tree_of(16, 2)
    put(tree, [1, 2, 3, 4, 5, 6])
    assert shape(tree.root) == {(1, 2, 3, 4, 5, 6): {}}
    put(tree, [1, 2, 3, 4, 7, 8])
    assert shape(tree.root) == {(1, 2, 3, 4): {(5, 6): {}, (7, 8): {}}}
    put(tree, [1, 2])
    assert shape(tree.root) == {(1, 2): {(3, 4): {(5, 6): {}, (7, 8): {}}}}
    put(tree, [9, 9, 9])             # the third id fills no block
    assert shape(tree.root)[(9, 9)] == {}
    assert pool.num_used == tree.num_evictable == 5


def test_a_match_is_whole_blocks_of_equal_ids() -> None:
    pool, tree = tree_of(16, 4)
    blocks = pool.allocate(2)
    tree.insert([1, 2, 3, 4, 5, 6, 7, 8], blocks)
    for ids, n in (([1, 2, 3], 0), ([1, 2, 3, 4], 1), ([1, 2, 3, 4, 5, 6, 7], 1), ([1, 2, 3, 4, 5, 6, 7, 8, 9], 2),
                   ([1, 2, 3, 5], 0), ([1, 2, 3, 4, 5, 6, 7, 9], 1), ([], 0)):
        assert tree.match(ids).blocks == blocks[:n], ids


def test_what_is_known_stays_and_the_callers_own_blocks_remain_its_own() -> None:
    """X3: two equal prompts computed side by side."""
    pool, tree = tree_of(8, 2)
    first, second = pool.allocate(2), pool.allocate(3)
    tree.insert([1, 2, 3, 4], first)
    tree.insert([1, 2, 3, 4, 5, 6], second)
    assert tree.match([1, 2, 3, 4, 5, 6]).blocks == [*first, second[2]]
    assert [pool.ref_counts[block] for block in (*first, *second)] == [2, 2, 1, 1, 2]


def test_x4_a_locked_path_survives_and_goes_when_it_is_unlocked() -> None:
    pool, tree = tree_of(8, 2)
    put(tree, [1, 2])
    put(tree, [1, 2, 3, 4])
    found = tree.match([1, 2, 3, 4])
    tree.lock(found.node)
    tree.lock(found.node)
    assert tree.evict(99) == 0 and len(tree.match([1, 2, 3, 4]).blocks) == 2
    tree.unlock(found.node)
    assert tree.evict(99) == 0
    tree.unlock(found.node)
    tree.check()
    with pytest.raises(ValueError, match="not locked"):
        tree.unlock(found.node)
    assert tree.evict(99) == 2 and pool.num_free == 8 and not tree.root.children


def test_eviction_takes_the_least_recently_used_leaf_from_its_end_and_counts_exactly() -> None:
    pool, tree = tree_of(16, 1)
    put(tree, [1, 2, 3, 4, 5])
    put(tree, [1, 2, 6, 7])
    put(tree, [8, 9])
    tree.match([1, 2, 3, 4, 5])      # the oldest is now the newest
    assert tree.evict(1) == 1
    tree.check()
    assert shape(tree.root) == {(1, 2): {(3, 4, 5): {}, (6,): {}}, (8, 9): {}}
    assert tree.evict(3) == 3
    assert shape(tree.root) == {(1, 2): {(3, 4, 5): {}}}
    assert tree.evict(4) == 4, "a node becomes a leaf when its last child has gone"
    assert shape(tree.root) == {(1,): {}}
    assert tree.evict(5) == 1 and pool.num_free == 16
    tree.check()


def test_x6_a_split_keeps_totals_and_locks() -> None:
    pool, tree = tree_of(16, 1)
    put(tree, [1, 2, 3, 4, 5, 6, 7, 8])
    whole = tree.match([1, 2, 3, 4, 5, 6, 7, 8]).node
    tree.lock(whole)
    put(tree, [1, 2, 3, 4, 9, 10, 11, 12])
    assert tree.num_evictable == 4 and pool.num_used == 12
    assert tree.evict(99) == 4
    tree.unlock(whole)
    tree.check()
    assert tree.num_evictable == 8 and tree.evict(99) == 8 and pool.num_free == 16


def test_x11_a_salt_separates_and_cannot_be_written_into_ids() -> None:
    _, tree = tree_of(16, 2)
    ids = [1, 2, 3, 4]
    put(tree, ids, "a")
    assert len(tree.match(ids, "a").blocks) == 2
    assert not tree.match(ids, "b").blocks and not tree.match(ids).blocks and not tree.match(ids, "").blocks
    put(tree, ids)
    assert len(tree.match(ids).blocks) == 2 and not tree.match(ids, "b").blocks
    first, second = tree._keys([2345, 1], "org_1")[0], tree._keys([1, 7], "org_12345")[0]
    assert first != second


@pytest.mark.parametrize("spoil", [
    lambda tree: setattr(tree, "num_evictable", 0),
    lambda tree: next(tree.nodes()).blocks.append(9),
    lambda tree: setattr(next(tree.nodes()), "lock_count", 1),
    lambda tree: tree.pool.free(next(tree.nodes()).blocks[:1]),
    lambda tree: tree.pool.share(next(tree.nodes()).blocks[:1]),
    lambda tree: setattr(list(tree.nodes())[-1], "lock_count", 1),
    lambda tree: setattr(list(tree.nodes())[-1], "last_use", 10**6),
], ids=["count", "blocks", "lock", "freed", "held but unlocked", "half a lock", "older above"])
def test_check_sees_what_is_wrong(spoil) -> None:
    _, tree = tree_of(16, 2)
    put(tree, [1, 2, 3, 4])
    put(tree, [1, 2, 5, 6])
    tree.check()
    spoil(tree)
    with pytest.raises(AssertionError):
        tree.check()


class Naive:
    """The same cache as a set of known beginnings, each with its locks and its last use."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.known: dict[tuple, int] = {}        # beginning -> last use
        self.locks: Counter = Counter()
        self.now = 0

    def prefixes(self, ids: list[int], salt) -> list[tuple]:
        return [(salt, *ids[:n]) for n in range(self.size, len(ids) + 1, self.size)]

    def match(self, ids: list[int], salt) -> list[tuple]:
        self.now += 1
        found = []
        for prefix in self.prefixes(ids, salt):
            if prefix not in self.known:
                break
            self.known[prefix] = self.now
            found.append(prefix)
        return found

    def insert(self, ids: list[int], salt) -> None:
        self.match(ids, salt)
        for prefix in self.prefixes(ids, salt):
            self.known.setdefault(prefix, self.now)

    def locked(self, prefix: tuple) -> bool:
        return any(n and other[:len(prefix)] == prefix for other, n in self.locks.items())


def test_10_000_random_operations_against_a_naive_model() -> None:
    rng = random.Random(7)
    for size, steps in ((1, 4000), (2, 4000), (4, 2000)):
        pool, tree = tree_of(60, size)
        naive, held = Naive(size), list[tuple[Node, tuple, list[int]]]()
        evictions = hits = 0
        for _ in range(steps):
            ids = [i for _ in range(rng.randrange(9)) for i in [rng.choice([0, 0, 0, 1, 1, 2])] * size]
            ids += [3] * rng.randrange(size)         # the beginning of a block
            salt = rng.choice([None, None, None, "a"])
            what = rng.random()
            if what < 0.35:
                try:
                    blocks = pool.allocate(len(ids) // size)
                except OutOfBlocks:
                    continue
                tree.insert(ids, blocks, salt)
                pool.free(blocks)
                naive.insert(ids, salt)
            elif what < 0.6:
                found, know = tree.match(ids, salt), naive.match(ids, salt)
                assert len(found.blocks) == len(know)
                hits += len(know)
            elif what < 0.75:
                found, know = tree.match(ids, salt), naive.match(ids, salt)
                if know:
                    tree.lock(found.node)
                    naive.locks[know[-1]] += 1
                    held.append((found.node, know[-1], found.blocks))
            elif what < 0.88 and held:
                node, prefix, blocks = held.pop(rng.randrange(len(held)))
                assert tree.match(list(prefix[1:]), prefix[0]).blocks == blocks, "a locked match moved"
                naive.match(list(prefix[1:]), prefix[0])
                tree.unlock(node)
                naive.locks[prefix] -= 1
            else:
                n, free = rng.randrange(1, 12), pool.num_free
                evictable = [p for p in naive.known if not naive.locked(p)]
                gone = tree.evict(n)
                assert gone == min(n, len(evictable)) == pool.num_free - free
                evictions += gone
                left = {p for p in naive.known if len(tree.match(list(p[1:]), p[0]).blocks) * size == len(p) - 1}
                lost = set(naive.known) - left
                assert len(lost) == gone and not any(naive.locked(p) for p in lost)
                # Least recently used leaves first: nothing that stayed and could have gone was used before what went.
                for p in lost:
                    assert not any(q in evictable and naive.known[q] < naive.known[p] and not any(
                        r != q and r[:len(q)] == q for r in naive.known) for q in left), "a younger leaf went first"
                naive.known = {p: naive.known[p] for p in left}
                for p in sorted(left, key=repr):     # the look-ups above were uses too: now the same for both
                    naive.match(list(p[1:]), p[0])
                    tree.match(list(p[1:]), p[0])
            tree.check()
            assert tree.num_evictable == sum(not naive.locked(p) for p in naive.known)
            assert pool.num_used == len(naive.known)
        assert evictions > 100 and hits > 300
