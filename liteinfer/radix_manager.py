"""The KV manager with a prefix cache behind it.

Since rung 6: `match` finds something. A request starts on the blocks that the
tree knows for its beginning, and computes the rest. What it computes, it
publishes as soon as a block is full and written. When it ends or is preempted,
it only lets go; its blocks stay in the tree until an allocation evicts them.
"""

from __future__ import annotations

from liteinfer.cache.paged import PagedCache
from liteinfer.cache.radix import Node, RadixTree
from liteinfer.kv_manager import KVManager
from liteinfer.request import Request


class RadixManager(KVManager):
    """Blocks by request, and by what they hold.

    A request in the pool has one lock: on the node where its published blocks end.
    """

    def __init__(self, cache: PagedCache) -> None:
        super().__init__(cache)
        self.tree = RadixTree(cache.pool)
        self.locked: dict[str, Node] = {}
        self.published: dict[str, int] = {}   # whole blocks of the request that the tree was told of

    @property
    def num_free(self) -> int:
        """Free blocks, and those that only the tree holds."""
        return self.cache.pool.num_free + self.tree.num_evictable

    def match(self, request: Request) -> int:
        """Put the longest known beginning into the request's table. Its last token is always computed anew.

        That token's logits are wanted, and logits are not cached.
        """
        found = self.tree.match(request.token_ids[:-1], request.cache_salt)
        self.tree.lock(found.node)
        self.locked[request.request_id] = found.node
        self.published[request.request_id] = len(found.blocks)
        self.cache.pool.share(found.blocks)
        self.cache.tables[request.request_id] = found.blocks
        self.cache.lengths[request.request_id] = len(found.blocks) * self.cache.pool.block_size
        return self.cache.lengths[request.request_id]

    def allocate(self, request: Request, length: int) -> bool:
        """As in the base; evicts exactly as many blocks as are missing, if there are that many."""
        missing = self.blocks_for(request, length) - self.cache.pool.num_free
        if missing > self.tree.num_evictable:
            return False
        if missing > 0:
            self.tree.evict(missing)
        return super().allocate(request, length)

    def publish(self, request: Request) -> None:
        """Tell the tree of blocks that have become full: all their keys and values are written."""
        name, size = request.request_id, self.cache.pool.block_size
        full = request.num_computed_tokens // size
        if full == self.published[name]:
            return
        node = self.tree.insert(request.token_ids[:full * size], self.cache.tables[name], request.cache_salt)
        self.tree.lock(node)
        self.tree.unlock(self.locked[name])
        self.locked[name], self.published[name] = node, full

    def free(self, request: Request) -> None:
        """The request lets go of its blocks; those in the tree stay there."""
        if node := self.locked.pop(request.request_id, None):
            self.tree.unlock(node)
            del self.published[request.request_id]
        super().free(request)

    def reset(self) -> None:
        """Forget all that no request holds."""
        self.tree.evict(self.tree.num_evictable)

    def check(self) -> None:
        """Assert that tree, tables and pool agree."""
        self.tree.check()
        self.cache.pool.check([*self.cache.tables.values(), *(node.blocks for node in self.tree.nodes())])
        held = set(self.cache.tables)
        assert held == set(self.locked) == set(self.published), "a request with blocks but without its lock"
