"""Rung 5: B requests at a time, in step with one another.

Since rung 4: a step feeds one token of each of B sequences, and so reads the
weights once for B tokens. All B are admitted together; the next batch starts
when the last of them has ended. transformers' cache is a rectangle, so its
batch is padded on the left; ours take sequences of any length as they are.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor
from transformers import DynamicCache

from liteinfer.cache.contiguous import ContiguousCache
from liteinfer.cache.paged import GatherSdpa, PagedAttention, PagedCache
from liteinfer.cache.pool_size import pool_size
from liteinfer.engines.base import QueuedEngine, error_event
from liteinfer.engines.dynamic_cache import kv_bytes
from liteinfer.engines.paged import blocks_at_most, check_fits, feed, paged_cache
from liteinfer.loading import LoadedModel
from liteinfer.model.linear import LinearMaker, Packed, Plain
from liteinfer.model.llama import load_llama
from liteinfer.request import Request, TokenEvent


class StaticBatch(QueuedEngine):
    """Up to `max_num_seqs` requests at a time. Each has a slot 0 .. max_num_seqs - 1 until it ends."""

    def __init__(self, model: LoadedModel, max_num_seqs: int = 4, max_model_len: int | None = None) -> None:
        super().__init__(model, max_model_len)
        if isinstance(max_num_seqs, bool) or not isinstance(max_num_seqs, int) or max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be an integer of at least 1, got {max_num_seqs!r}")
        self.max_num_seqs = max_num_seqs
        self.slots: dict[str, int] = {}   # by request id

    @abstractmethod
    def next_logits(self, requests: list[Request]) -> Tensor:
        """Logits [B, V] for the token after the last of each request's `token_ids`: one forward pass."""

    def fits(self, batch: list[Request]) -> bool:
        """Whether these can run together to their ends."""
        return True

    def make_room(self, request: Request) -> None:
        """Before each pass, for each request. What is raised here is that request's own error."""

    def step(self) -> list[TokenEvent]:
        if not self.running:
            self._admit()
        events = self._advance() if self.running else []
        return self.take_aborted() + events

    def _admit(self) -> None:
        """The longest head of the queue that fits; a request that would not fit alone was refused by `check`."""
        while self.waiting and len(self.running) < self.max_num_seqs and self.fits([*self.running, self.waiting[0]]):
            self.running.append(self.waiting.popleft())
        self.slots = {request.request_id: slot for slot, request in enumerate(self.running)}

    @torch.inference_mode()
    def _advance(self) -> list[TokenEvent]:
        events: list[TokenEvent] = []
        able = [request for request in self.running if self._has_room(request, events)]
        try:
            if able:
                logits = self.next_logits(able)                              # [B, V]
                events += [self._choose(request, row) for request, row in zip(able, logits, strict=True)]
        except Exception as error:   # the pass itself failed, and nothing says for whom
            events = [error_event(request, error) for request in self.running]
        except BaseException:        # Ctrl-C in mid-forward: what is kept may be half written, so it is made again
            self.release(self.running)
            raise
        self.counters.batch_slots += self.max_num_seqs
        self.counters.idle_slots += self.max_num_seqs - len(able)
        over = {event.request_id for event in events if event.finish_reason}
        self.end([request for request in self.running if request.request_id in over])
        return events

    def _has_room(self, request: Request, events: list[TokenEvent]) -> bool:
        try:
            self.make_room(request)
        except Exception as error:
            events.append(error_event(request, error))
            return False
        return True


class DynamicStaticBatch(StaticBatch):
    """transformers' model and DynamicCache: a rectangle, padded on the left."""

    cache: DynamicCache | None = None
    rows: list[Request]            # whose row of the cache is whose
    mask: Tensor                   # [B, S] 1 where a real token is

    def next_logits(self, requests: list[Request]) -> Tensor:
        if self.cache is None:
            self.cache, self.rows = DynamicCache(), requests
            ids, self.mask = pad_left([request.token_ids for request in requests], self.model.device)   # [B, L]
        else:
            ids = torch.tensor([[request.token_ids[-1]] for request in requests], device=self.model.device)
            self.mask = torch.cat((self.mask, torch.ones_like(ids)), dim=1)
        held, positions = kv_bytes(self.cache), positions_of(self.mask)[:, -ids.shape[1]:]
        out = self.model.transformers_model()(
            input_ids=ids, attention_mask=self.mask, position_ids=positions, use_cache=True, logits_to_keep=1,
            **{self.model.cache_keyword: self.cache})
        self.counters.forward_passes += 1
        self.counters.tokens_computed += ids.numel()
        self.counters.kv_bytes_copied += held
        self.counters.kv_bytes_peak = max(self.counters.kv_bytes_peak, kv_bytes(self.cache))
        return out.logits[:, -1]                                             # [B, V]

    def release(self, requests: list[Request]) -> None:
        """Cut their rows out of the rectangle: what is left is copied into a smaller one."""
        if self.cache is None or not requests:
            return
        kept = [row for row, request in enumerate(self.rows) if request not in requests]
        if not kept:
            self.cache = None
            return
        index = torch.tensor(kept, device=self.model.device)
        self.rows, self.mask = [self.rows[row] for row in kept], self.mask[index]
        self.cache.batch_select_indices(index)
        self.counters.kv_bytes_copied += kv_bytes(self.cache)


def pad_left(sequences: list[list[int]], device: torch.device, extra: int = 0) -> tuple[Tensor, Tensor]:
    """A rectangle [B, L] of token ids, and its mask: 1 where a real token is, known from lengths alone.

    Whatever stands in the padding is masked; it is never looked at to find out that it is padding, since
    a real token may have the same id. `extra` more columns of padding change nothing.

    >>> ids, mask = pad_left([[5, 6, 7], [8]], torch.device("cpu"))
    >>> ids.tolist(), mask.tolist()
    ([[5, 6, 7], [0, 0, 8]], [[1, 1, 1], [0, 0, 1]])
    """
    width = max(map(len, sequences)) + extra
    ids = [[0] * (width - len(sequence)) + sequence for sequence in sequences]
    mask = [[0] * (width - len(sequence)) + [1] * len(sequence) for sequence in sequences]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def positions_of(mask: Tensor) -> Tensor:
    """Positions [B, S] that count real tokens only: the first real one is at 0, wherever it stands."""
    return (mask.cumsum(dim=1) - 1).clamp(min=0)


class RaggedStaticBatch(StaticBatch):
    """Our forward over a cache of ours: sequences of any length side by side, nothing padded."""

    cache: ContiguousCache | PagedCache

    def __init__(self, model: LoadedModel, max_num_seqs: int, max_model_len: int | None, linear: LinearMaker) -> None:
        super().__init__(model, max_num_seqs, max_model_len)
        self.llama = load_llama(model, linear)
        self.linear_path = linear.path(model.dtype, model.device)

    def next_logits(self, requests: list[Request]) -> Tensor:
        sequences = {self.slots[request.request_id]: request.token_ids for request in requests}
        return feed(self.llama, self.cache, sequences, self.counters)        # [B, V]

    def release(self, requests: list[Request]) -> None:
        for request in requests:
            self.cache.free(self.slots[request.request_id])


class NativeStaticBatch(RaggedStaticBatch):
    """The contiguous cache: `max_model_len` rows are kept for every slot, taken or not."""

    def __init__(self, model: LoadedModel, max_num_seqs: int = 4, max_model_len: int | None = None,
                 linear: LinearMaker = Plain()) -> None:  # noqa: B008 - stateless
        super().__init__(model, max_num_seqs, max_model_len, linear)
        self.cache = ContiguousCache(model.config, max_num_seqs, self.max_model_len, model.dtype, model.device)


class PagedStaticBatch(RaggedStaticBatch):
    """Pages. A batch is as many requests as the pool surely holds to their ends."""

    cache: PagedCache

    def __init__(self, model: LoadedModel, max_num_seqs: int = 4, max_model_len: int | None = None,
                 num_blocks: int | None = None, block_size: int = 16,
                 linear: LinearMaker = Packed(),  # noqa: B008 - stateless
                 attention: PagedAttention = GatherSdpa()) -> None:  # noqa: B008 - stateless
        super().__init__(model, max_num_seqs, max_model_len, linear)
        self.pool_size = pool_size(model, block_size, num_blocks, max_num_seqs, self.max_model_len)
        self.cache = paged_cache(model, self.pool_size, attention)

    def check(self, request: Request) -> None:
        """Besides the contract's: refuse a request that the whole pool could not hold."""
        super().check(request)
        check_fits(request, self.cache)

    def fits(self, batch: list[Request]) -> bool:
        return sum(blocks_at_most(request, self.cache) for request in batch) <= self.cache.pool.num_blocks

    def make_room(self, request: Request) -> None:
        """Raises OutOfBlocks: only if somebody else holds blocks of this pool."""
        self.cache.reserve(self.slots[request.request_id], request.num_tokens)
