"""What the two sides of a reference agree on: how an adapter is built, what goes in, what comes out.

Only the standard library is imported here: the other side has an environment of its own.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """What every adapter is built from; it takes what it has a use for.

    `model` is a folder in Hugging Face form, `dtype` a name such as "float32", `max_num_seqs` the most requests in a
    step, `max_model_len` the most tokens of one, `enforce_eager`: no compilation, no CUDA graphs.
    """

    model: str
    dtype: str
    device: str
    max_num_seqs: int
    max_model_len: int
    enforce_eager: bool


@dataclass(frozen=True)
class Request:
    """Greedy, and of a forced length: all that a reference is told."""

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Event:
    """What one step gave one request; the loop reads these fields."""

    request_id: str
    token_ids: list[int]
    finish_reason: str | None = None
    error: str | None = None
