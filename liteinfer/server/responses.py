"""What the server answers, as types: OpenAI's objects, and llama.cpp's `timings` beside them.

They make the OpenAPI description, and every answer is built from them. A field that is not set is left out of the
JSON; one that is set to None is null.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

Finish = Literal["stop", "length"]


class PromptTokensDetails(BaseModel):
    cached_tokens: int      # of the prompt, those whose keys and values were found in the prefix cache


class Usage(BaseModel):
    """Tokens. A prompt counts once, whatever `n` is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Timings(BaseModel):
    """Where the time went, in milliseconds, under the names of llama.cpp's server (queue_ms is ours).

    Waiting ends, and `prompt_ms` begins, with the first step that runs the request; `predicted_ms` is from the first
    token to the last, and `predicted_per_second` the rate of those after the first.
    """

    queue_ms: float
    prompt_n: int           # prompt tokens computed
    cache_n: int            # prompt tokens found stored
    prompt_ms: float
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float | None
    draft_n: int
    draft_n_accepted: int


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None   # null where the token is only a part of a character


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]


class TextLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]    # where in the choice's text each token begins


class Message(BaseModel):
    role: Literal["assistant"]
    content: str


class MessageDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChoice(BaseModel):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class ChatChunkChoice(BaseModel):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish


class TextChunkChoice(BaseModel):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: Finish | None


class Head(BaseModel):
    """What all answers begin with."""

    id: str
    created: int
    model: str


class Whole(Head):
    usage: Usage
    timings: Timings


class Chunk(Head):
    usage: Usage | None = None
    timings: Timings | None = None


class ChatCompletion(Whole):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ChatChunk(Chunk):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class TextCompletion(Whole):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class TextChunk(Chunk):
    object: Literal["text_completion"]
    choices: list[TextChunkChoice]


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class Health(BaseModel):
    status: Literal["ok", "unavailable"]
    reason: str | None      # why not
    engine: str             # the row of the ladder
    model: str
    in_flight: int
    capacity: int


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail
