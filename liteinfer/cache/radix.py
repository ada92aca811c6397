"""A radix tree over token ids: which blocks hold the keys and values of which beginnings.

Since rung 6: blocks outlive their request. The tree is one more holder of a
block, so a block that no request holds any more stays where it is until the
memory is needed. An edge is a run of whole blocks: the ids they were computed
for, and where they lie. What two prompts share is one path; where they part,
an edge is split (RadixAttention, Zheng et al. 2024).

    block_size 2, after [1 2 3 4 5 6] and [1 2 3 4 7 8]

    root -- 1 2 | 3 4 --+-- 5 6
                        +-- 7 8

A hit compares token ids, block by block. There is no hash that could collide.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from liteinfer.cache.block_pool import BlockPool

BlockKey = tuple[object, ...]   # the token ids of a block; in a first block, the salt comes before them


@dataclass(eq=False)
class Node:
    """An edge from `parent` and what hangs below it. The root has no key."""

    key: list[BlockKey]
    blocks: list[int]                # one for each entry of the key
    parent: Node | None
    children: dict[BlockKey, Node] = field(default_factory=dict)   # by the first entry of their keys
    lock_count: int = 0              # locks on this node or below
    last_use: int = 0


@dataclass(frozen=True)
class MatchResult:
    """The longest known beginning of some ids.

    `blocks` are safe to read until the next eviction; `lock(node)` keeps them. `node` is where the match ends.
    """

    blocks: list[int]
    node: Node


class RadixTree:
    """Shared beginnings of sequences, in blocks of a pool. Not thread-safe."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.root = Node([], [], None)
        self.num_evictable = 0           # blocks in nodes that nobody has locked
        self._clock = count(1)

    def match(self, ids: Sequence[int], salt: str | None = None) -> MatchResult:
        """Find the most whole blocks of `ids` that the tree has, under this salt only.

        Counts as a use of all it finds. Where the match ends inside an edge, the edge is split.
        """
        return self._match(self._keys(ids, salt), next(self._clock))

    def insert(self, ids: Sequence[int], blocks: Sequence[int], salt: str | None = None) -> Node:
        """Make the whole blocks of `ids` findable; `blocks` hold them. Returns the node where they end.

        The tree becomes a holder of those blocks that were not known yet. For a beginning that is known
        the blocks already here stay, and the caller's own remain the caller's.
        """
        keys, now = self._keys(ids, salt), next(self._clock)
        found = self._match(keys, now)
        known = len(found.blocks)
        if known == len(keys):
            return found.node
        node = Node(keys[known:], list(blocks[known:len(keys)]), found.node, last_use=now)
        self.pool.share(node.blocks)
        found.node.children[node.key[0]] = node
        self.num_evictable += len(node.blocks)
        return node

    def lock(self, node: Node) -> None:
        """Keep the node and all above it from eviction, until as many unlocks."""
        for each in self._path(node):
            if each.lock_count == 0:
                self.num_evictable -= len(each.blocks)
            each.lock_count += 1

    def unlock(self, node: Node) -> None:
        """Take one lock back. Raises ValueError if the node has none."""
        if node.parent is not None and node.lock_count == 0:
            raise ValueError("the node is not locked")
        for each in self._path(node):
            each.lock_count -= 1
            if each.lock_count == 0:
                self.num_evictable += len(each.blocks)

    def evict(self, n: int) -> int:
        """Let go of n blocks, or of all that are not locked if those are fewer; returns how many.

        From the end of the leaf that has not been used for longest; a node becomes a leaf when it has
        no more children. Never from the middle: what hangs below could not be found any more.
        """
        leaves = [(node.last_use, id(node), node) for node in self.nodes() if not node.children and not node.lock_count]
        heapq.heapify(leaves)
        left = n
        while left and leaves:
            *_, leaf = heapq.heappop(leaves)
            gone = leaf.blocks[-left:]
            self.pool.free(gone)
            self.num_evictable -= len(gone)
            left -= len(gone)
            first, parent = leaf.key[0], leaf.parent
            del leaf.key[-len(gone):], leaf.blocks[-len(gone):]
            if not leaf.blocks and parent is not None:
                del parent.children[first]
                if parent is not self.root and not parent.children and not parent.lock_count:
                    heapq.heappush(leaves, (parent.last_use, id(parent), parent))
        return n - left

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, each after its parent."""
        waiting = list(self.root.children.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    def check(self) -> None:
        """Assert that tree and pool agree; which locks and holders belong to whom is their owners' to know."""
        seen: set[int] = set()
        evictable = 0
        for node in self.nodes():
            parent, blocks = node.parent, set(node.blocks)
            assert node.blocks and len(node.key) == len(node.blocks), "a node without blocks, or without their ids"
            assert parent is not None and parent.children[node.key[0]] is node, "a node its parent does not know"
            assert len(blocks) == len(node.blocks) and not blocks & seen, "a block has two places in the tree"
            assert parent is self.root or parent.last_use >= node.last_use, "used more recently than its beginning"
            assert node.lock_count >= sum(child.lock_count for child in node.children.values()), "a lock stops half way"
            assert all(self.pool.ref_counts[block] for block in blocks), "a block of the tree is free"
            if not node.lock_count:
                evictable += len(blocks)
                assert all(self.pool.ref_counts[block] == 1 for block in blocks), "a block in use is not locked"
            seen |= blocks
        assert evictable == self.num_evictable, f"{evictable} blocks are evictable, {self.num_evictable} counted"

    def _match(self, keys: list[BlockKey], now: int) -> MatchResult:
        node, blocks = self.root, list[int]()
        while len(blocks) < len(keys) and (child := node.children.get(keys[len(blocks)])):
            same = common(child.key, keys[len(blocks):])
            node = child if same == len(child.key) else self._split(child, same)
            node.last_use = now
            blocks += node.blocks
        return MatchResult(blocks, node)

    def _split(self, node: Node, n: int) -> Node:
        """Cut an edge after n blocks. The node keeps the rest, so that locks on it still end where they did."""
        parent = node.parent
        assert parent is not None
        upper = Node(node.key[:n], node.blocks[:n], parent, {node.key[n]: node}, node.lock_count, node.last_use)
        parent.children[upper.key[0]] = upper
        node.key, node.blocks, node.parent = node.key[n:], node.blocks[n:], upper
        return upper

    def _keys(self, ids: Sequence[int], salt: str | None) -> list[BlockKey]:
        size = self.pool.block_size
        keys: list[BlockKey] = [tuple(ids[i:i + size]) for i in range(0, len(ids) - size + 1, size)]
        if keys and salt is not None:
            keys[0] = (salt, *keys[0])
        return keys

    def _path(self, node: Node) -> Iterator[Node]:
        """The node and all above it, without the root."""
        while node.parent is not None:
            yield node
            node = node.parent


def common(a: Sequence[BlockKey], b: Sequence[BlockKey]) -> int:
    """How many entries two keys have in common at their beginnings."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
