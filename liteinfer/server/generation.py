"""What lies between an engine's events and an HTTP answer: text, stop strings, token counts and times.

One answer may have several choices (`n`, or several prompts). Each is a request of the engine; all put what they
get into one queue, from which the answer is written. Text is made as events arrive and not as the client reads,
so that a stop string ends its request at once, however slow the client is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from time import perf_counter

from liteinfer.detokenizer import TextOutput
from liteinfer.llm import Delta
from liteinfer.request import FinishReason, Request, TokenEvent
from liteinfer.server.async_engine import AsyncEngine
from liteinfer.server.metrics import Metrics
from liteinfer.server.responses import PromptTokensDetails, Timings, Usage


class GenerationFailed(RuntimeError):
    """A request ended without its answer: `finish_reason` "error", or "abort" if the server is going down."""

    def __init__(self, message: str, finish_reason: FinishReason) -> None:
        super().__init__(message)
        self.finish_reason = finish_reason


class Choice:
    """One request of an answer: a receiver of its events. Times are seconds of perf_counter."""

    def __init__(self, index: int, request: Request, output: TextOutput, generation: Generation) -> None:
        self.index, self.request, self.output, self.generation = index, request, output, generation
        self.added_at = perf_counter()
        self.started_at: float | None = None     # the first step that ran it began
        self.first_at: float | None = None       # its first token was there
        self.last_at: float | None = None        # its last token so far
        self.finish_reason: FinishReason | None = None

    def started(self, at: float) -> None:
        self.started_at = at

    def take(self, event: TokenEvent, at: float) -> None:
        try:
            delta = self._delta(event, at)
        except Exception as error:               # of the tokenizer: the other receivers must get theirs all the same
            self.generation.engine.abort(self.request.request_id)
            delta = Delta(self.index, "", (), finish_reason="error", error=f"{type(error).__name__}: {error}")
        if delta.finish_reason:
            self.finish_reason = delta.finish_reason
            self.generation.metrics.finished(delta.finish_reason)
        self.generation.queue.put_nowait(delta)

    def _delta(self, event: TokenEvent, at: float) -> Delta:
        delta = Delta.of(self.index, self.output, event)
        if self.output.stopped:
            self.generation.engine.finish(self.request.request_id, self.output.n_tokens)
        if delta.token_ids:
            self.generation.metrics.tokens(len(delta.token_ids), at - (self.last_at or self.added_at),
                                           first=self.first_at is None)
            self.first_at, self.last_at = self.first_at or at, at
        return delta


class Generation:
    """The requests of one HTTP request, in flight from `submit` until all have ended, or `close`.

    Args:
        prompts: how many; `requests` are as many for each, those of a prompt beside each other.
        decode: token ids to text; none for a model without a tokenizer, whose answers have no text.
    """

    def __init__(self, engine: AsyncEngine, metrics: Metrics, requests: Sequence[Request], prompts: int,
                 decode: Callable[[Sequence[int]], str] | None) -> None:
        self.engine, self.metrics = engine, metrics
        self.queue: asyncio.Queue[Delta] = asyncio.Queue()
        self.choices = [Choice(i, request, TextOutput(decode or (lambda ids: ""), request.params.stop), self)
                        for i, request in enumerate(requests)]
        self._firsts = [choice.request for choice in self.choices[::len(requests) // prompts]]   # one for each prompt

    def submit(self) -> None:
        """Put the requests to the engine. Raises what AsyncEngine.submit raises."""
        self.engine.submit(self.choices)

    async def deltas(self) -> AsyncIterator[Delta]:
        """What the engine adds, until every choice has its finish reason. Raises GenerationFailed if one fails."""
        while not self.finished or not self.queue.empty():
            delta = await self.queue.get()
            if delta.finish_reason in ("error", "abort"):
                raise GenerationFailed(delta.error or delta.finish_reason, delta.finish_reason)
            yield delta

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason for choice in self.choices)

    def close(self) -> None:
        """Nobody wants the rest: what still runs is dropped. Called however an answer ends."""
        for choice in self.choices:
            if not choice.finish_reason:
                self.engine.abort(choice.request.request_id)
                choice.finish_reason = "abort"
                self.metrics.finished("abort")

    def usage(self) -> Usage:
        """Tokens so far. A prompt counts once, whatever `n` is."""
        prompt = sum(len(request.prompt_token_ids) for request in self._firsts)
        completion = sum(choice.output.n_tokens for choice in self.choices)
        return Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion,
                     prompt_tokens_details=PromptTokensDetails(
                         cached_tokens=sum(request.num_cached_tokens or 0 for request in self._firsts)))

    def timings(self) -> Timings:
        """Counts of all choices; times from the first of them to the last."""
        requests = [choice.request for choice in self.choices]
        cached = sum(request.num_cached_tokens or 0 for request in requests)
        prompt_n = sum(len(request.prompt_token_ids) for request in requests) - cached
        predicted_n = sum(choice.output.n_tokens for choice in self.choices)
        added = min(choice.added_at for choice in self.choices)
        first = [choice.first_at for choice in self.choices if choice.first_at is not None]
        last = [choice.last_at for choice in self.choices if choice.last_at is not None]
        started = min((choice.started_at for choice in self.choices if choice.started_at is not None), default=added)
        prompt = max(first, default=started) - started
        predicted = max(last, default=started) - min(first, default=started)
        after_first = predicted_n - len(self.choices)   # the first token of each comes out of its prompt's pass
        return Timings(
            queue_ms=(started - added) * 1e3, prompt_n=prompt_n, cache_n=cached, prompt_ms=prompt * 1e3,
            prompt_per_second=prompt_n / prompt if prompt else None, predicted_n=predicted_n,
            predicted_ms=predicted * 1e3, predicted_per_second=after_first / predicted if predicted else None,
            draft_n=sum(request.num_drafted_tokens for request in requests),
            draft_n_accepted=sum(request.num_accepted_tokens for request in requests))
