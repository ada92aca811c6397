"""Who runs in the next step, and how many tokens of each.

Since rung 5: no batch is ever formed or waited for. A request has some tokens
(prompt and output) and `num_computed_tokens` of them in the cache; a step lets it
catch up by as many as there is budget for. A prompt catches up by many, a
decoding request by the one token it has just been given, and nothing here has
to know which is which (the idea is vLLM V1's scheduler).

    budget 8, A has 5 of 6 tokens computed, B 4 of 12, C waits with 3
    this step     A 1, B 7                      (nothing is left for C)
    the next      A 1, B 1, C 3
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from liteinfer.cache.block_pool import OutOfBlocks
from liteinfer.kv_manager import KVManager
from liteinfer.request import Request


@dataclass(frozen=True)
class SchedulerConfig:
    """The scheduler's limits.

    Args:
        max_num_seqs: the most requests that run at a time.
        max_num_batched_tokens: the most tokens of a step, over all requests.
        max_prefill_chunk: the most tokens of one request in a step; the whole budget unless given.
        watermark: the share of all blocks that an admission must leave free, so that those who run
            have room to grow and the newcomer is not thrown out at once.

    Raises:
        ValueError: a limit below 1, or two that contradict each other; both are named.
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_prefill_chunk: int | None = None
    watermark: float = 0.01

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_prefill_chunk"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(f"max_num_seqs {self.max_num_seqs} is over max_num_batched_tokens "
                             f"{self.max_num_batched_tokens}: a step could not give every request a token")
        if self.max_prefill_chunk is not None and self.max_prefill_chunk > self.max_num_batched_tokens:
            raise ValueError(f"max_prefill_chunk {self.max_prefill_chunk} is over max_num_batched_tokens "
                             f"{self.max_num_batched_tokens}")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark must be a share from 0 to below 1, got {self.watermark!r}")


@dataclass(frozen=True)
class Chunk:
    """A request's part of a step: `num_tokens` from `start` on, the last of which may be a draft's."""

    request: Request
    start: int                       # tokens computed before
    num_tokens: int                  # drafted ones included
    draft: tuple[int, ...] = ()
    num_logits: int = 0              # rows of logits wanted: none in the middle of a prompt

    @property
    def token_ids(self) -> list[int]:
        """The ids [num_tokens] that the step feeds."""
        own = self.num_tokens - len(self.draft)
        return [*self.request.tokens(self.start, self.start + own), *self.draft]


@dataclass(frozen=True)
class SchedulerOutput:
    """Exactly what a step will run, one-token chunks first; and who did not make it, and why."""

    chunks: tuple[Chunk, ...]
    admitted: tuple[Request, ...] = ()
    preempted: tuple[Request, ...] = ()
    failed: tuple[tuple[Request, Exception], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)


@dataclass
class Scheduler:
    """First come, first served. `running` is in order of arrival, and all of it came before all of `waiting`."""

    config: SchedulerConfig
    kv: KVManager
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def schedule(self, drafts: Mapping[str, Sequence[int]] | None = None) -> SchedulerOutput:
        """Decide the next step and give everybody in it their blocks.

        Those who run come first, the oldest before the others, and each gets at least one token. If
        blocks run out, the youngest are preempted: they lose their blocks, go back to the head of the
        queue, and compute it all again later. Waiting requests are admitted with what is left.

        A draft takes what budget and blocks are left, and is cut short to that. It is cut from its end:
        whether a guess is checked must not depend on what the guess is, or the checked ones are no fair sample.

        Args:
            drafts: by request id, tokens guessed to follow its last one, to be checked in the same step.
        """
        budget, chunks, preempted = self.config.max_num_batched_tokens, list[Chunk](), list[Request]()
        for place, request in enumerate(list(self.running)):
            if request in preempted:
                continue
            others = len(self.running) - place - 1                           # keep a token for each of them
            chunk = self._chunk(request, budget - others, (drafts or {}).get(request.request_id, ()))
            while chunk.draft and not self.kv.allocate(request, chunk.start + chunk.num_tokens):
                chunk = self._chunk(request, budget - others, chunk.draft[:-1])
            if self._make_room(request, chunk.start + chunk.num_tokens, preempted):
                chunks.append(chunk)
                budget -= chunk.num_tokens
        admitted, failed = ([], []) if preempted else self._admit(budget, chunks)
        chunks.sort(key=lambda chunk: chunk.num_tokens > 1)                  # stable: decodes first
        return SchedulerOutput(tuple(chunks), tuple(admitted), tuple(preempted), tuple(failed))

    def remove(self, request: Request) -> None:
        """A request is over, wherever it is: its blocks go back."""
        (self.running if request in self.running else self.waiting).remove(request)
        self.kv.free(request)

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks; it will be computed again from its first token."""
        self.running.remove(request)
        self.kv.free(request)
        request.num_computed_tokens = 0
        self.waiting.appendleft(request)

    def _chunk(self, request: Request, budget: int, draft: Sequence[int] = ()) -> Chunk:
        start, missing = request.num_computed_tokens, request.num_tokens - request.num_computed_tokens
        own = min(missing, budget, self.config.max_prefill_chunk or budget)
        draft = tuple(draft)[:budget - own] if own == missing else ()
        return Chunk(request, start, own + len(draft), draft, num_logits=1 + len(draft) if own == missing else 0)

    def _make_room(self, request: Request, length: int, preempted: list[Request]) -> bool:
        """Preempt from the young end until the request has its blocks; False if it had to go itself."""
        while not self.kv.allocate(request, length):
            victim = self.running[-1]
            self.preempt(victim)
            preempted.append(victim)
            if victim is request:
                return False
        return True

    def _admit(self, budget: int, chunks: list[Chunk]) -> tuple[list[Request], list[tuple[Request, Exception]]]:
        admitted, failed = list[Request](), list[tuple[Request, Exception]]()
        while self.waiting and budget and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            request.num_computed_tokens = self.kv.match(request)
            needed = self.kv.blocks_for(request, request.num_tokens)
            spare = int(self.config.watermark * self.kv.cache.pool.num_blocks) if self.running else 0
            if needed + spare > self.kv.num_free:
                self.kv.free(request)                                        # what it matched
                request.num_computed_tokens = 0
                if self.running:
                    break
                self.waiting.popleft()    # nobody is left who could give blocks back
                failed.append((request, OutOfBlocks(f"{needed} KV blocks needed, {self.kv.num_free} of "
                                                    f"{self.kv.cache.pool.num_blocks} are free and nothing runs")))
                continue
            chunk = self._chunk(request, budget)
            self.kv.allocate(request, chunk.start + chunk.num_tokens)
            self.running.append(self.waiting.popleft())
            admitted.append(request)
            chunks.append(chunk)
            budget -= chunk.num_tokens
        return admitted, failed
