"""Who holds which blocks: what the scheduler asks before it lets a request run.

Since rung 5: blocks are asked for chunk by chunk and token by token, and "no" is
an answer. Chapter 7 puts a prefix cache behind the same few questions.
"""

from __future__ import annotations

from liteinfer.cache.block_pool import OutOfBlocks
from liteinfer.cache.paged import PagedCache
from liteinfer.request import Request


class KVManager:
    """Blocks of a paged cache, by request. The cache's sequences are named by request id."""

    def __init__(self, cache: PagedCache) -> None:
        self.cache = cache

    @property
    def num_free(self) -> int:
        """Blocks that an allocation could get."""
        return self.cache.pool.num_free

    def blocks_for(self, request: Request, length: int) -> int:
        """Blocks that the request would need besides its own to hold `length` tokens."""
        return self.cache.pool.blocks_for(length) - len(self.cache.tables.get(request.request_id, ()))

    def match(self, request: Request) -> int:
        """Tokens at the start of a waiting request whose keys and values are stored already; it holds them now."""
        return 0

    def allocate(self, request: Request, length: int) -> bool:
        """Make sure that the request's first `length` tokens have slots. If too few are free: False, nothing done."""
        try:
            self.cache.reserve(request.request_id, length)
        except OutOfBlocks:
            return False
        return True

    def publish(self, request: Request) -> None:
        """Told after a step that the keys and values of the request's computed tokens are really written."""

    def truncate(self, request: Request, length: int) -> None:
        """Forget the request's stored tokens past the first `length`: a draft that was refused."""
        self.cache.truncate(request.request_id, length)

    def free(self, request: Request) -> None:
        """Take back what the request holds. One that holds nothing may be freed too."""
        self.cache.free(request.request_id)

    def check(self) -> None:
        """Assert that pool and tables agree."""
        self.cache.check()
