"""A loaded model and its engine thread behind both endpoints: a checked body becomes a generation in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

from liteinfer import logits_processors
from liteinfer.engines.base import Engine
from liteinfer.loading import LoadedModel
from liteinfer.request import Request
from liteinfer.server.async_engine import AsyncEngine
from liteinfer.server.errors import ApiError
from liteinfer.server.generation import Generation
from liteinfer.server.metrics import Metrics
from liteinfer.server.protocol import Ask, ChatAsk, CompletionAsk

T = TypeVar("T")
COMPLETION_TOKENS = 16   # OpenAI's max_tokens of a text completion that names none


class Service:
    """What the routes need.

    Args:
        engine: over `model`; from `AsyncEngine.start` on, its thread's alone.
        row: the name of the engine's row, told by /health.
        model_name: what clients call the model.
        max_num_waiting: see AsyncEngine.
    """

    def __init__(self, model: LoadedModel, engine: Engine, row: str, model_name: str | None = None,
                 max_num_waiting: int = 256) -> None:
        self.model, self.row, self.model_name = model, row, model_name or model.name
        self.engine = AsyncEngine(engine, width(engine), max_num_waiting)
        self.context = context_length(engine)
        self.metrics = Metrics(engine)
        # Encoding a long prompt takes longer than a step may wait for its turn. One thread: a tokenizer is not
        # made for several at a time.
        self._tokenizer_thread, self._encoding = ThreadPoolExecutor(1, "tokenizer"), 0

    def close(self) -> None:
        """End both threads."""
        self.engine.stop()
        self._tokenizer_thread.shutdown(wait=False)

    async def chat(self, ask: ChatAsk) -> Generation:
        """Submit a conversation. Raises ApiError, QueueFull or Unavailable."""
        self.know(ask.model)
        ids = await self._encode(self.model.encode_chat, [[message.plain() for message in ask.messages]], "messages")
        return self._submit(ask, ids, "messages", self.context)

    async def complete(self, ask: CompletionAsk) -> Generation:
        """Submit one or several prompts. Raises ApiError, QueueFull or Unavailable."""
        self.know(ask.model)
        prompts = ask.prompts()
        ids = [list(prompt) for prompt in prompts if not isinstance(prompt, str)] or await self._encode(
            self.model.encode, prompts, "prompt")
        return self._submit(ask, ids, "prompt", COMPLETION_TOKENS)

    def know(self, name: str) -> None:
        """Raises ApiError, a 404, for any model but ours."""
        if name != self.model_name:
            raise ApiError(404, f"there is no model {name!r} here; there is {self.model_name!r}", "model",
                           "model_not_found")

    def token_text(self, token: int) -> str:
        """A token by itself, special ones included; its number where the model has no tokenizer."""
        return (f"token_id:{token}" if self.model.tokenizer is None
                else self.model.decode([token], skip_special_tokens=False))

    async def _encode(self, encode: Callable[[Any], list[int]], prompts: Sequence[Any], field: str) -> list[list[int]]:
        self.engine.check_room(self._encoding + 1)     # its queue is bounded too, and no work is done in vain
        self._encoding += 1
        try:
            work = partial(_each, encode, prompts)
            return await asyncio.get_running_loop().run_in_executor(self._tokenizer_thread, work)
        except ValueError as error:
            raise ApiError(400, str(error), field) from None
        finally:
            self._encoding -= 1

    def _submit(self, ask: Ask, prompts: list[list[int]], field: str, default_tokens: int) -> Generation:
        n = ask.n or 1
        if n * len(prompts) > self.engine.capacity:
            raise ApiError(400, f"{len(prompts)} prompts, n {n}: {n * len(prompts)} requests are over the "
                                f"{self.engine.capacity} that may run and wait", "n" if n > 1 else field)
        for ids in prompts:
            self._check_prompt(ids, field)
        self._check_token_ids(ask)
        requests = [Request(uuid4().hex, ids, ask.params(self.context - len(ids), default_tokens, i),
                            cache_salt=ask.cache_salt) for ids in prompts for i in range(n)]
        try:
            for request in requests[::n]:
                logits_processors.check(self.engine.engine, self.row, request.params)
        except ValueError as error:
            raise ApiError(400, str(error), str(error).split()[0]) from None
        generation = Generation(self.engine, self.metrics, requests, len(prompts),
                                None if self.model.tokenizer is None else self.model.decode)
        try:
            generation.submit()
        except ValueError as error:   # "request <id>: ..."; the id is ours and says nothing to a client
            message = str(error).partition(": ")[2] or str(error)
            raise ApiError(400, message, field if "token id" in message else "max_tokens") from None
        return generation

    def _check_prompt(self, ids: list[int], field: str) -> None:
        if not ids:
            raise ApiError(400, "the prompt is empty, it needs at least 1 token", field)
        if len(ids) >= self.context:
            raise ApiError(400, f"the prompt has {len(ids)} tokens, which leaves no room for one more in the "
                                f"{self.context} of max_model_len or of the KV pool", field, "context_length_exceeded")

    def _check_token_ids(self, ask: Ask) -> None:
        vocab = self.model.config.vocab_size
        if self.model.tokenizer is None and ask.stop:
            raise ApiError(400, f"stop strings need a tokenizer, and {self.model_name} has none", "stop")
        for token in ask.stop_token_ids or ():
            if token >= vocab:
                raise ApiError(400, f"stop_token_ids: {token} is not below vocab_size {vocab}", "stop_token_ids")


def width(engine: Any) -> int:
    """How many requests the engine runs at a time."""
    config = getattr(getattr(engine, "scheduler", engine), "config", None)
    return int(getattr(config, "max_num_seqs", getattr(engine, "max_num_seqs", 1)))


def context_length(engine: Any) -> int:
    """The most tokens, prompt and output, of a request: max_model_len, or what the whole KV pool can hold.

    The last token is never fed, so it needs no slot.
    """
    size = getattr(engine, "pool_size", None)
    return int(engine.max_model_len if size is None else
               min(engine.max_model_len, size.num_blocks * size.block_size + 1))


def _each(encode: Callable[[Any], list[int]], prompts: Sequence[Any]) -> list[list[int]]:
    return [encode(prompt) for prompt in prompts]
