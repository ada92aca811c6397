"""A generation as the JSON of a chat or text completion, whole or as server-sent events.

Both endpoints and both forms are written from the same deltas by the same two functions, `whole` and `stream`; what
differs between chat and text is how a choice looks.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import accumulate
from typing import Any, ClassVar, cast
from uuid import uuid4

from pydantic import BaseModel

from liteinfer.request import TokenLogprobs
from liteinfer.server import responses as r
from liteinfer.server.errors import error_body, error_of
from liteinfer.server.generation import Generation, GenerationFailed

TokenText = Callable[[int], str]


class Answer(ABC):
    """How an endpoint writes choices. One object for each answer: its id, and its time."""

    prefix: ClassVar[str]
    chunk_type: ClassVar[type[BaseModel]]
    whole_type: ClassVar[type[BaseModel]]
    chunk_name: ClassVar[str]
    whole_name: ClassVar[str]

    def __init__(self, model: str, token_text: TokenText) -> None:
        self.token_text = token_text
        self.head: dict[str, Any] = {"id": f"{self.prefix}-{uuid4().hex}", "created": int(time.time()), "model": model}

    def opening(self, index: int) -> BaseModel | None:
        """What a stream says of a choice before its first piece, if anything."""
        return None

    @abstractmethod
    def piece(self, index: int, text: str, told: Sequence[TokenLogprobs]) -> BaseModel:
        """A choice of a chunk: what came, and what was told of its tokens."""

    @abstractmethod
    def ending(self, index: int, reason: r.Finish) -> BaseModel:
        """A choice of a chunk: the end."""

    @abstractmethod
    def choice(self, index: int, text: str, told: Sequence[TokenLogprobs], reason: r.Finish) -> BaseModel:
        """A choice of a whole answer."""


class ChatAnswer(Answer):
    """Choices are messages of the assistant."""

    prefix, chunk_type, whole_type = "chatcmpl", r.ChatChunk, r.ChatCompletion
    chunk_name, whole_name = "chat.completion.chunk", "chat.completion"

    def opening(self, index: int) -> BaseModel:
        return r.ChatChunkChoice(index=index, delta=r.MessageDelta(role="assistant", content=""), finish_reason=None)

    def piece(self, index: int, text: str, told: Sequence[TokenLogprobs]) -> BaseModel:
        more: dict[str, Any] = {"logprobs": self._logprobs(told)} if told else {}
        return r.ChatChunkChoice(index=index, delta=r.MessageDelta(content=text), finish_reason=None, **more)

    def ending(self, index: int, reason: r.Finish) -> BaseModel:
        return r.ChatChunkChoice(index=index, delta=r.MessageDelta(), finish_reason=reason)

    def choice(self, index: int, text: str, told: Sequence[TokenLogprobs], reason: r.Finish) -> BaseModel:
        return r.ChatChoice(index=index, message=r.Message(role="assistant", content=text), finish_reason=reason,
                            logprobs=self._logprobs(told) if told else None)

    def _logprobs(self, told: Sequence[TokenLogprobs]) -> r.ChatLogprobs:
        return r.ChatLogprobs(content=[
            r.TokenLogprob(**self._one(one.token_id, one.logprob), top_logprobs=[
                r.TopLogprob(**self._one(token, logprob)) for token, logprob in one.top]) for one in told])

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.token_text(token)
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


class TextAnswer(Answer):
    """Choices are plain text."""

    prefix, chunk_type, whole_type = "cmpl", r.TextChunk, r.TextCompletion
    chunk_name = whole_name = "text_completion"

    def __init__(self, model: str, token_text: TokenText) -> None:
        super().__init__(model, token_text)
        self._offsets: dict[int, int] = {}   # by choice, where the text of its next token begins

    def piece(self, index: int, text: str, told: Sequence[TokenLogprobs]) -> BaseModel:
        more: dict[str, Any] = {"logprobs": self._logprobs(index, told)} if told else {}
        return r.TextChunkChoice(index=index, text=text, finish_reason=None, **more)

    def ending(self, index: int, reason: r.Finish) -> BaseModel:
        return r.TextChunkChoice(index=index, text="", finish_reason=reason)

    def choice(self, index: int, text: str, told: Sequence[TokenLogprobs], reason: r.Finish) -> BaseModel:
        return r.TextChoice(index=index, text=text, finish_reason=reason,
                            logprobs=self._logprobs(index, told) if told else None)

    def _logprobs(self, index: int, told: Sequence[TokenLogprobs]) -> r.TextLogprobs:
        tokens = [self.token_text(one.token_id) for one in told]
        *offsets, self._offsets[index] = accumulate(map(len, tokens), initial=self._offsets.get(index, 0))
        # Two tokens may have one text (halves of characters): the likelier keeps the place.
        tops = [{self.token_text(token): logprob for token, logprob in reversed(one.top)} for one in told]
        return r.TextLogprobs(tokens=tokens, token_logprobs=[one.logprob for one in told], text_offset=offsets,
                              top_logprobs=tops if any(tops) else None)


async def whole(answer: Answer, generation: Generation) -> BaseModel:
    """The answer when it is complete. Raises GenerationFailed."""
    texts, told = [""] * len(generation.choices), [list[TokenLogprobs]() for _ in generation.choices]
    async for delta in generation.deltas():
        texts[delta.index] += delta.text
        told[delta.index] += delta.logprobs
    choices = [answer.choice(i, texts[i], told[i], cast(r.Finish, choice.finish_reason))
               for i, choice in enumerate(generation.choices)]
    return answer.whole_type(**answer.head, object=answer.whole_name, choices=choices,
                             usage=generation.usage(), timings=generation.timings())


async def stream(answer: Answer, generation: Generation, include_usage: bool) -> AsyncIterator[bytes]:
    """The same as server-sent events: a role, pieces, each choice's finish reason, [DONE]; or an error and no [DONE].

    With include_usage a last chunk without choices brings the usage, and it is null in those before.
    """
    def event(choices: list[BaseModel], **more: Any) -> bytes:
        usage = {"usage": None} if include_usage else {}
        return _event(answer.chunk_type(**answer.head, object=answer.chunk_name, choices=choices, **(usage | more)))

    try:
        for choice in generation.choices:
            if opening := answer.opening(choice.index):
                yield event([opening])
        ended = 0
        async for delta in generation.deltas():
            if delta.text or delta.logprobs:
                yield event([answer.piece(delta.index, delta.text, delta.logprobs)])
            if delta.finish_reason:
                ended += 1
                last = {"timings": generation.timings()} if ended == len(generation.choices) else {}
                yield event([answer.ending(delta.index, cast(r.Finish, delta.finish_reason))], **last)
        if include_usage:
            yield event([], usage=generation.usage())
        yield b"data: [DONE]\n\n"
    except GenerationFailed as failed:
        yield _event(error_body(error_of(failed)))


def _event(body: BaseModel) -> bytes:
    return b"data: " + body.model_dump_json(exclude_unset=True).encode() + b"\n\n"
