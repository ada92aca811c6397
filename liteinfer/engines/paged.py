"""Rung 4: keys and values in pages.

Since rung 3: the cache. The engine is still one request at a time, sequence 0;
blocks are taken as the sequence grows, and all go back when it ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from liteinfer.cache.contiguous import ContiguousCache
from liteinfer.cache.paged import GatherSdpa, PagedAttention, PagedCache
from liteinfer.cache.pool_size import PoolSize, pool_size
from liteinfer.engines.base import OneAtATime
from liteinfer.loading import LoadedModel
from liteinfer.model.layout import Layout
from liteinfer.model.linear import LinearMaker, Packed
from liteinfer.model.llama import Llama, load_llama
from liteinfer.request import Counters, Request


class PagedEngine(OneAtATime):
    """One sequence at a time, in blocks of a pool.

    Args:
        num_blocks: the pool's size; by default from the memory there is (`pool_size`).
        block_size: tokens per block, a power of two.
        linear, attention: how the linear layers and the attention are computed.
    """

    def __init__(self, model: LoadedModel, max_model_len: int | None = None, num_blocks: int | None = None,
                 block_size: int = 16, linear: LinearMaker = Packed(),  # noqa: B008 - stateless
                 attention: PagedAttention = GatherSdpa()) -> None:  # noqa: B008 - stateless
        super().__init__(model, max_model_len)
        self.llama = load_llama(model, linear)
        self.pool_size = pool_size(model, block_size, num_blocks, 1, self.max_model_len)
        self.cache = paged_cache(model, self.pool_size, attention)
        self.linear_path = linear.path(model.dtype, model.device)

    def check(self, request: Request) -> None:
        """Besides the contract's: refuse a request that the whole pool could not hold."""
        super().check(request)
        check_fits(request, self.cache)

    def next_logits(self, request: Request) -> Tensor:
        self.cache.reserve(0, request.num_tokens)
        return feed(self.llama, self.cache, {0: request.token_ids}, self.counters)[0]   # [V]

    def release(self, requests: list[Request]) -> None:
        self.cache.free(0)


def paged_cache(model: LoadedModel, size: PoolSize, attention: PagedAttention) -> PagedCache:
    """A cache of this size for this model."""
    return PagedCache(model.config, size.num_blocks, size.block_size, model.dtype, model.device, attention)


def feed(llama: Llama, cache: PagedCache | ContiguousCache, sequences: Mapping[Any, list[int]],
         counters: Counters) -> Tensor:
    """One step: of each sequence's token ids what the cache has not seen; logits [B, V] after its last one."""
    device = llama.embedding.device
    held = {seq: cache.lengths[seq] for seq in sequences}
    new = [token for seq, ids in sequences.items() for token in ids[held[seq]:]]
    layout = Layout.of([(seq, held[seq], len(ids) - held[seq]) for seq, ids in sequences.items()], device)
    cache.begin(layout)
    flat = torch.tensor(new, device=device)                                  # [N]
    logits = llama(flat, layout.positions, cache, logits_at=layout.query_start_loc[1:].long() - 1)
    count_step(cache, len(new), counters)
    return logits


def count_step(cache: PagedCache | ContiguousCache, num_tokens: int, counters: Counters) -> None:
    """A pass over this many tokens, and what it held, wasted and copied."""
    counters.forward_passes += 1
    counters.tokens_computed += num_tokens
    if isinstance(cache, ContiguousCache):
        counters.kv_bytes_peak = cache.nbytes
        return
    used, block_size = cache.pool.num_used, cache.pool.block_size
    counters.blocks_peak = max(counters.blocks_peak, used)
    counters.kv_bytes_peak = max(counters.kv_bytes_peak, used * cache.block_bytes)
    counters.held_slots += used * block_size
    counters.tail_slots += cache.tail_slots
    if cache.attention.gathers:
        lengths = zip(cache.layout.context_lens, cache.layout.query_lens, strict=True)
        copied = sum(cache.pool.blocks_for(context + new) for context, new in lengths)
        counters.kv_bytes_copied += copied * cache.block_bytes


def blocks_at_most(request: Request, cache: PagedCache) -> int:
    """Blocks of a request when it ends. Its last token is never fed, so it is never stored."""
    return cache.pool.blocks_for(len(request.prompt_token_ids) + request.params.max_tokens - 1)


def check_fits(request: Request, cache: PagedCache) -> None:
    """Raises ValueError, with both sizes, for a request that the whole pool could not hold."""
    needed = blocks_at_most(request, cache)
    if needed > cache.pool.num_blocks:
        raise ValueError(f"request {request.request_id}: {len(request.prompt_token_ids)} prompt tokens + max_tokens "
                         f"{request.params.max_tokens} need {needed} KV blocks of {cache.pool.block_size} tokens, "
                         f"the pool has {cache.pool.num_blocks}")
