"""The engine contract, and the simplest way to keep it: one request at a time.

Every rung of the ladder is an engine. Requests go in with `add`, each `step`
does one unit of work and returns what it produced, and everything above
(generate, streaming, the benchmark, the server) is a loop over `step`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from liteinfer.loading import LoadedModel
from liteinfer.request import Counters, Request, TokenEvent, TokenLogprobs
from liteinfer.sampling import logprobs, sample


class Engine(ABC):
    """The contract. One thread owns an engine; none of its methods is thread-safe.

    `max_model_len` is the most tokens (prompt plus output) a request may have.
    It defaults to what the model was trained for, but at most 8,192.
    """

    def __init__(self, model: LoadedModel, max_model_len: int | None = None) -> None:
        trained_for = model.config.max_position_embeddings
        self.model = model
        self.max_model_len = min(trained_for, 8192) if max_model_len is None else max_model_len
        if not 1 <= self.max_model_len <= trained_for:
            raise ValueError(f"max_model_len must be from 1 to the model's {trained_for}, got {max_model_len}")
        self.counters = Counters()

    def check(self, request: Request) -> None:
        """Refuse a request that could never run, before any work is done for it.

        Raises:
            ValueError: an empty prompt, a token id outside the vocabulary, or
                prompt plus max_tokens beyond max_model_len.
        """
        vocab, prompt = self.model.config.vocab_size, request.prompt_token_ids
        if request.output_token_ids:
            raise ValueError(f"request {request.request_id} has {len(request.output_token_ids)} output tokens already: "
                             "a request runs once")
        if not prompt:
            raise ValueError(f"request {request.request_id}: the prompt is empty, it needs at least 1 token")
        for token in (*prompt, *request.params.stop_token_ids):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
                raise ValueError(f"request {request.request_id}: token id {token!r} is not an integer "
                                 f"from 0 to {vocab - 1} (vocab_size {vocab})")
        wanted = len(prompt) + request.params.max_tokens
        if wanted > self.max_model_len:
            raise ValueError(f"request {request.request_id}: {len(prompt)} prompt tokens + max_tokens "
                             f"{request.params.max_tokens} = {wanted} is over max_model_len {self.max_model_len}")

    @abstractmethod
    def add(self, request: Request) -> None:
        """Queue a request. From here on the engine appends to it. Raises what `check` raises."""

    @abstractmethod
    def step(self) -> list[TokenEvent]:
        """Do one unit of work; return the events of the latest completed step, possibly none.

        Never raises for one request's fault: that request gets an error event.
        """

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Drop a request. A later step returns its one final event; an unknown id does nothing."""

    @abstractmethod
    def finish(self, request_id: str, n_tokens: int) -> None:
        """Told from above that a request ended after its first n_tokens (a stop string). No event."""

    @abstractmethod
    def has_unfinished(self) -> bool:
        """Whether a further step can return an event."""


def run(engine: Engine, requests: Iterable[Request]) -> Iterator[TokenEvent]:
    """Add all requests, then step until nothing is left. The loop every caller writes."""
    for request in requests:
        engine.add(request)
    while engine.has_unfinished():
        yield from engine.step()


class QueuedEngine(Engine):
    """Requests wait in a queue, some run, all can be dropped at any moment: what every engine here shares.

    A subclass moves requests from `waiting` to `running` in its `step`, and says
    what to drop when some are over.
    """

    def __init__(self, model: LoadedModel, max_model_len: int | None = None) -> None:
        super().__init__(model, max_model_len)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._aborted: list[TokenEvent] = []

    def release(self, requests: list[Request]) -> None:
        """Drop what is kept for these requests, which have just left `running`."""

    def add(self, request: Request) -> None:
        self.check(request)
        if any(other.request_id == request.request_id for other in (*self.running, *self.waiting)):
            raise ValueError(f"request id {request.request_id!r} is already in flight")
        self.waiting.append(request)

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running or self._aborted)

    def abort(self, request_id: str) -> None:
        if self._drop(request_id):
            self._aborted.append(TokenEvent(request_id, finish_reason="abort"))

    def finish(self, request_id: str, n_tokens: int) -> None:
        self._drop(request_id)

    def take_aborted(self) -> list[TokenEvent]:
        """The final events of the aborted. Called after the pass: an interrupted one must not lose them."""
        events, self._aborted = self._aborted, []
        return events

    def end(self, requests: list[Request]) -> None:
        """Take these out of `running`, all in one go."""
        self.running = [request for request in self.running if request not in requests]
        self.release(requests)

    def _drop(self, request_id: str) -> bool:
        for request in self.running:
            if request.request_id == request_id:
                self.end([request])
                return True
        for request in self.waiting:
            if request.request_id == request_id:
                self.waiting.remove(request)
                return True
        return False

    def _choose(self, request: Request, logits: Tensor) -> TokenEvent:
        """Sample one token of a request from its logits [V]; a fault is the request's own, and its end."""
        try:
            return take(request, [sample(logits, request)], logits[None], self.model.config.eos_token_ids)
        except Exception as error:
            return error_event(request, error)


class OneAtATime(QueuedEngine):
    """First come, first served, one request in flight: rungs 1 to 4.

    A subclass says two things: how to get the logits that follow a request's
    tokens, and what to drop when the request is over.
    """

    @abstractmethod
    def next_logits(self, request: Request) -> Tensor:
        """Logits [V] for the token after the last of `request.token_ids`."""

    def step(self) -> list[TokenEvent]:
        if not self.running and self.waiting:
            self.running.append(self.waiting.popleft())
        events = [self._advance(self.running[0])] if self.running else []
        return self.take_aborted() + events

    @torch.inference_mode()
    def _advance(self, request: Request) -> TokenEvent:
        try:
            event = self._choose(request, self.next_logits(request))
        except Exception as error:
            event = error_event(request, error)
        except BaseException:   # Ctrl-C in mid-forward: what is kept may be half written, so it is made again
            self.release([request])
            raise
        if event.finish_reason:
            self.end([request])
        return event


def take(request: Request, tokens: list[int], logits: Tensor, eos_token_ids: tuple[int, ...]) -> TokenEvent:
    """Append tokens to a request, up to the one that ends it. Row i of logits [len(tokens) or more, V] gave token i."""
    told, ended, taken = list[TokenLogprobs](), None, 0
    for token, row in zip(tokens, logits, strict=False):
        told += logprobs(row, token, request.params)
        taken += 1
        if ended := request.append(token, eos_token_ids):
            break
    return TokenEvent(request.request_id, tuple(tokens[:taken]), tuple(told), ended)


def error_event(request: Request, error: Exception) -> TokenEvent:
    """The end of a request that failed, with the reason in one line."""
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return TokenEvent(request.request_id, finish_reason="error", error=reason)
