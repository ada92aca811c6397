"""Rung 6: continuous batching. Requests come and go at every step.

Since rung 5: four parts with one question each. The scheduler: who runs now? The
KV manager: who holds which blocks? The runner: what does the model say? The
drafter: which tokens does each request take? Orca (Yu et al. 2022) was the first
to schedule by the iteration; the parts are vLLM's. A later rung replaces a part
and leaves this file alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from liteinfer.cache.paged import GatherSdpa, PagedAttention, PagedCache
from liteinfer.cache.pool_size import pool_size
from liteinfer.engines.base import Engine, error_event, take
from liteinfer.engines.paged import check_fits, count_step, paged_cache
from liteinfer.kv_manager import KVManager
from liteinfer.loading import LoadedModel
from liteinfer.model.linear import LinearMaker, Packed
from liteinfer.model.llama import load_llama
from liteinfer.request import Request, TokenEvent
from liteinfer.runner import Runner, StepOutput
from liteinfer.sampling import sample
from liteinfer.scheduler import Chunk, Scheduler, SchedulerConfig, SchedulerOutput
from liteinfer.trace import StepTrace

Verdict = list[int] | Exception   # the tokens a request takes, or the fault that is its own


class Drafter(Protocol):
    """Guesses tokens before a step, and says after it which tokens are taken."""

    def propose(self, requests: Sequence[Request]) -> Mapping[str, Sequence[int]]:
        """By request id, guesses of the tokens that follow a running request's last one. None for some, or all."""

    def verify(self, chunks: Sequence[Chunk], output: StepOutput) -> list[Verdict]:
        """For each chunk that wanted logits: one token, after those of its draft that stand."""

    def free(self, request_id: str) -> None:
        """A request is over."""
        return


class NoDrafter(Drafter):
    """Guesses nothing; a request takes the token sampled from its one row of logits."""

    def __init__(self, engine: ContinuousEngine) -> None:
        """A drafter may look at the engine it is of; this one need not."""

    def propose(self, requests: Sequence[Request]) -> Mapping[str, Sequence[int]]:
        return {}

    def verify(self, chunks: Sequence[Chunk], output: StepOutput) -> list[Verdict]:
        return [self._sample(row, chunk.request) for row, chunk in zip(output.logits, chunks, strict=True)]

    def _sample(self, logits: Tensor, request: Request) -> Verdict:
        try:
            return [sample(logits, request)]
        except Exception as error:
            return error


class ContinuousEngine(Engine):
    """Up to `max_num_seqs` requests at a time, one forward pass a step over whatever each of them is at.

    Args:
        max_num_seqs, max_num_batched_tokens, max_prefill_chunk, watermark: see SchedulerConfig.
        num_blocks, block_size: the pool; by default from the memory there is (`pool_size`).
        linear, attention: how the linear layers and the attention are computed.
        kv_manager, drafter, runner: the parts that later chapters replace.
        trace: records every step, if given.
    """

    def __init__(self, model: LoadedModel, max_num_seqs: int = 32, max_model_len: int | None = None,
                 max_num_batched_tokens: int = 512, max_prefill_chunk: int | None = None, watermark: float = 0.01,
                 num_blocks: int | None = None, block_size: int = 16,
                 linear: LinearMaker = Packed(), attention: PagedAttention = GatherSdpa(),  # noqa: B008 - stateless
                 kv_manager: Callable[[PagedCache], KVManager] = KVManager, runner: type[Runner] = Runner,
                 drafter: Callable[[ContinuousEngine], Drafter] = NoDrafter, trace: StepTrace | None = None) -> None:
        super().__init__(model, max_model_len)
        config = SchedulerConfig(max_num_seqs, max_num_batched_tokens, max_prefill_chunk, watermark)
        self.llama = load_llama(model, linear)
        self.linear_path = linear.path(model.dtype, model.device)
        self.pool_size = pool_size(model, block_size, num_blocks, max_num_seqs, self.max_model_len)
        self.cache = paged_cache(model, self.pool_size, attention)
        self.scheduler = Scheduler(config, kv_manager(self.cache))
        self.runner = runner(self.llama, self.cache)
        self.trace, self._aborted = trace, list[TokenEvent]()
        self.drafter = drafter(self)

    def check(self, request: Request) -> None:
        """Besides the contract's: refuse a request that the whole pool could not hold."""
        super().check(request)
        check_fits(request, self.cache)

    def add(self, request: Request) -> None:
        self.check(request)
        if self._find(request.request_id):
            raise ValueError(f"request id {request.request_id!r} is already in flight")
        self.scheduler.add(request)

    def has_unfinished(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running or self._aborted)

    def abort(self, request_id: str) -> None:
        if request := self._find(request_id):
            self._end(request)
            self._aborted.append(TokenEvent(request_id, finish_reason="abort"))

    def finish(self, request_id: str, n_tokens: int) -> None:
        if request := self._find(request_id):
            self._end(request)

    @torch.inference_mode()
    def step(self) -> list[TokenEvent]:
        started_at = self.trace.clock() if self.trace else 0.0
        scheduler, counters = self.scheduler, self.counters
        plan = scheduler.schedule(self.drafter.propose(scheduler.running))
        counters.preemptions += len(plan.preempted)
        self._note_first_admissions(plan.admitted)
        events = [error_event(request, error) for request, error in plan.failed]
        if plan.chunks:
            events += self._run(plan)
            counters.batch_slots += scheduler.config.max_num_seqs
            counters.idle_slots += scheduler.config.max_num_seqs - len(plan.chunks)
        if self.trace:
            self.trace.record(started_at, plan, events, scheduler, self.cache.pool.num_used)
        aborted, self._aborted = self._aborted, []
        return aborted + events

    def _run(self, plan: SchedulerOutput) -> list[TokenEvent]:
        wanted = [chunk for chunk in plan.chunks if chunk.num_logits]
        try:
            output = self.runner.run(plan.chunks)
            verdicts = self.drafter.verify(wanted, output) if wanted else []
        except Exception as error:   # the pass itself failed, and nothing says for whom
            failed = [chunk.request for chunk in plan.chunks if self._find(chunk.request.request_id)]
            for request in failed:
                self._end(request)
            return [error_event(request, error) for request in failed]
        except BaseException:        # Ctrl-C in mid-forward: what is stored may be half written, so it is made again
            for request in reversed(self.scheduler.running):
                self.scheduler.preempt(request)
            raise
        count_step(self.cache, plan.num_tokens, self.counters)
        for chunk in plan.chunks:
            if not chunk.num_logits and chunk.request in self.scheduler.running:   # the middle of a prompt
                chunk.request.num_computed_tokens = chunk.start + chunk.num_tokens
                self.scheduler.kv.publish(chunk.request)
        each = zip(wanted, verdicts, output.logits.split([chunk.num_logits for chunk in wanted]), strict=True)
        return [self._update(chunk, verdict, logits) for chunk, verdict, logits in each
                if chunk.request in self.scheduler.running]                  # it may have been aborted meanwhile

    def _update(self, chunk: Chunk, verdict: Verdict, logits: Tensor) -> TokenEvent:
        """Give a request its tokens, or its error; logits [num_logits, V]."""
        request = chunk.request
        if isinstance(verdict, Exception):
            self._end(request)
            return error_event(request, verdict)
        event = take(request, verdict, logits, self.model.config.eos_token_ids)
        refused = len(chunk.draft) - (len(event.token_ids) - 1)
        request.num_computed_tokens = chunk.start + chunk.num_tokens - refused
        if refused:
            self.scheduler.kv.truncate(request, request.num_computed_tokens)
        self.scheduler.kv.publish(request)
        if event.finish_reason:
            self._end(request)
        return event

    def _end(self, request: Request) -> None:
        self.scheduler.remove(request)
        self.drafter.free(request.request_id)

    def _note_first_admissions(self, admitted: Sequence[Request]) -> None:
        """What was found of each prompt; a request that comes back from a preemption was noted before."""
        for request in (request for request in admitted if request.num_cached_tokens is None):
            request.num_cached_tokens = request.num_computed_tokens
            self.counters.prompt_tokens += len(request.prompt_token_ids)
            self.counters.prefix_hit_tokens += request.num_cached_tokens

    def _find(self, request_id: str) -> Request | None:
        return next((r for r in (*self.scheduler.running, *self.scheduler.waiting) if r.request_id == request_id), None)
