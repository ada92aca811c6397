"""What a client may ask for, field by field, and how it becomes requests of the engine.

Strict: "5" is no integer, true is no number, and a field that is unknown or unsupported is refused by its name
rather than ignored. null is the same as leaving a field out, everywhere.

    max_tokens   at least 1 (0 and -1 are refused). Left out: chat may go on to the end of max_model_len, a text
                 completion has OpenAI's 16.
    temperature  1 if left out, as OpenAI's; 0 is greedy.
    seed         choice i of n has seed + i.
    top_k, stop_token_ids, ignore_eos, min_p, min_tokens, repetition_penalty   as vLLM's.
    cache_salt   cached prefixes are shared only between requests with the same one. Without it they are shared by
                 all, and TTFT and cached_tokens tell a client whether somebody sent the same beginning before.
    user         taken and of no effect: OpenAI's label for the end user. Nothing here keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from liteinfer import SamplingParams
from liteinfer.server.errors import ApiError


def unicode(text: str) -> str:
    """JSON can spell half of a surrogate pair, which no tokenizer takes. Raises ValueError."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError("not valid Unicode: a lone surrogate")
    return text


Text = Annotated[str, AfterValidator(unicode)]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
StopText = Annotated[Text, Field(min_length=1, max_length=256)]
MOST_SEEDS, MOST_INT = 2**63, 2**31 - 1
SAMPLING = ("temperature", "top_k", "top_p", "seed", "stop_token_ids", "ignore_eos", "min_p", "min_tokens",
            "repetition_penalty", "presence_penalty", "frequency_penalty")   # names that SamplingParams shares


class Body(BaseModel):
    """A JSON object of known fields, in which null is the same as nothing."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def without_nulls(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


class StreamOptions(Body):
    include_usage: bool | None = None


class Part(Body):
    type: Literal["text"]
    text: Text


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[Part]

    def plain(self) -> dict[str, str]:
        """As a chat template takes it. OpenAI's "developer" is what "system" was before."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class Ask(Body):
    """What both endpoints have in common."""

    model: Text
    max_tokens: int | None = Field(None, ge=1, le=MOST_INT)
    n: int | None = Field(None, ge=1, le=128)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MOST_INT)
    min_p: float | None = Field(None, ge=0, le=1)
    min_tokens: int | None = Field(None, ge=0, le=MOST_INT)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=300)
    seed: int | None = Field(None, ge=0, lt=MOST_SEEDS)
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    ignore_eos: bool | None = None
    cache_salt: Text | None = Field(None, min_length=1, max_length=256)
    user: Text | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def limit(self) -> int | None:
        """The most tokens of a choice; None if that is left to us."""
        return self.max_tokens

    def logprobs_asked(self) -> dict[str, Any]:
        """`logprobs` and `top_logprobs` of SamplingParams; each endpoint spells them in its own way."""
        raise NotImplementedError

    def params(self, room: int, default_tokens: int, index: int) -> SamplingParams:
        """For choice `index` of n.

        Args:
            room: tokens that fit behind the prompt.
            default_tokens: what max_tokens is if it is left out, or the room if that is less.

        Raises:
            ApiError: 400, naming the field.
        """
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is for stream: true only", "stream_options")
        given = {name: value for name in SAMPLING if (value := getattr(self, name)) is not None}
        given.setdefault("temperature", 1.0)
        if self.seed is not None:
            given["seed"] = (self.seed + index) % MOST_SEEDS
        if self.logit_bias:
            given["logit_bias"] = biases(self.logit_bias)
        if self.stop is not None:
            given["stop"] = [self.stop] if isinstance(self.stop, str) else self.stop
        given["max_tokens"] = self.limit or max(1, min(room, default_tokens))
        try:
            return SamplingParams(**given, **self.logprobs_asked())
        except ValueError as error:
            raise ApiError(400, str(error), str(error).split()[0]) from None


class ChatAsk(Ask):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=MOST_INT)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def limit(self) -> int | None:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ApiError(400, f"max_tokens {self.max_tokens} and max_completion_tokens {self.max_completion_tokens} "
                                "are two names of one limit: give one", "max_completion_tokens")
        return self.max_completion_tokens or self.max_tokens

    def logprobs_asked(self) -> dict[str, Any]:
        return {"logprobs": bool(self.logprobs), "top_logprobs": self.top_logprobs or 0}


class CompletionAsk(Ask):
    """Body of POST /v1/completions. `echo` true is not supported."""

    prompt: Text | TokenIds | Annotated[list[Text] | list[TokenIds], Field(min_length=1)]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: Literal[False] | None = None

    def prompts(self) -> Sequence[str | list[int]]:
        """One prompt is a list of one."""
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return cast(Sequence[str | list[int]], [self.prompt] if one else self.prompt)

    def logprobs_asked(self) -> dict[str, Any]:
        return {"logprobs": self.logprobs is not None, "top_logprobs": self.logprobs or 0}


def biases(logit_bias: dict[str, float]) -> dict[int, float]:
    """Token id -> bias; JSON has only text for keys. Raises ApiError for a key that is no token id."""
    wrong = next((key for key in logit_bias if not (key.isascii() and key.isdecimal() and len(key) < 10)), None)
    if wrong is not None:
        raise ApiError(400, f"logit_bias: {wrong!r} is no token id", "logit_bias")
    return {int(key): bias for key, bias in logit_bias.items()}
