"""What goes into an engine and what comes out of it.

An engine never sees text. A request is prompt token ids and sampling
parameters; what comes back is a stream of events, each carrying the token ids
that one step added to one request.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Literal

import torch

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class SamplingParams:
    """How to choose a request's tokens, and when to stop.

    Args:
        max_tokens: the most tokens to generate, at least 1.
        temperature: 0 takes the most likely token (greedy); higher is flatter.
        top_k: sample among the k most likely tokens; 0 or -1 turns it off, and
            so does a k of at least the vocabulary.
        top_p: sample among the fewest tokens whose probabilities reach top_p
            (Holtzman et al. 2020), never fewer than one. 1 turns it off.
        seed: makes a sampled request repeatable; None draws a fresh seed.
        stop_token_ids: ids that end the request, like the model's own EOS.
        ignore_eos: go on past the model's EOS (stop_token_ids still stop).
        stop: texts that end the request; the output's text ends before the first of them.
        logprobs: report the log-probability of each token, of the model's own distribution.
        top_logprobs: report that many of the likeliest tokens beside it, at most 20.

    Raises:
        ValueError: a setting is out of range; the message names it and its value.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        for name in ("stop_token_ids", "stop"):
            value = getattr(self, name)
            _require(isinstance(value, (str, list, tuple)), f"{name} must be a list, got {value!r}")
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        for name in ("ignore_eos", "logprobs"):
            value = getattr(self, name)
            _require(isinstance(value, bool), f"{name} must be True or False, got {value!r}")
        _require(_is_int(self.max_tokens) and self.max_tokens >= 1,
                 f"max_tokens must be an integer of at least 1, got {self.max_tokens!r}")
        _require(_is_number(self.temperature) and self.temperature >= 0,
                 f"temperature must be a number of at least 0, got {self.temperature!r}")
        _require(_is_int(self.top_k) and self.top_k >= -1,
                 f"top_k must be -1 (off), 0 (off) or a positive integer, got {self.top_k!r}")
        _require(_is_number(self.top_p) and 0 <= self.top_p <= 1,
                 f"top_p must be a number from 0 to 1, got {self.top_p!r}")
        _require(self.seed is None or (_is_int(self.seed) and 0 <= self.seed < 2**63),
                 f"seed must be None or an integer from 0 to 2**63 - 1, got {self.seed!r}")
        _require(all(_is_int(i) and i >= 0 for i in self.stop_token_ids),
                 f"stop_token_ids must be integers of at least 0, got {self.stop_token_ids!r}")
        _require(all(isinstance(text, str) and text for text in self.stop),
                 f"stop must be non-empty strings, got {self.stop!r}")
        _require(_is_int(self.top_logprobs) and 0 <= self.top_logprobs <= 20,
                 f"top_logprobs must be an integer from 0 to 20, got {self.top_logprobs!r}")
        _require(self.logprobs or not self.top_logprobs,
                 f"top_logprobs {self.top_logprobs!r} needs logprobs=True")


@dataclass(eq=False)
class Request:
    """One sequence on its way through an engine: the prompt, and what came so far.

    The engine that holds a request appends to `output_token_ids`; everybody
    else only reads. The random generator belongs to the request, so that its
    sampled tokens depend on its seed and its logits and on no neighbour.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    output_token_ids: list[int] = field(default_factory=list)
    cache_salt: str | None = None   # a prefix cache shares only between requests with the same one
    num_computed_tokens: int = 0    # kept by a scheduler: of token_ids, those whose keys and values are stored
    num_cached_tokens: int | None = None   # of the prompt, those found stored when it was first admitted
    num_drafted_tokens: int = 0     # guesses that were checked in a pass
    num_accepted_tokens: int = 0    # those of them that stood
    generator: torch.Generator = field(init=False, default_factory=torch.Generator, repr=False)

    def __post_init__(self) -> None:
        if self.params.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(self.params.seed)

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids

    def tokens(self, start: int, stop: int) -> list[int]:
        """token_ids[start:stop], without joining all of prompt and output first."""
        prompt = len(self.prompt_token_ids)
        return self.prompt_token_ids[start:stop] + self.output_token_ids[max(0, start - prompt):max(0, stop - prompt)]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def append(self, token_id: int, eos_token_ids: tuple[int, ...]) -> FinishReason | None:
        """Take one new token and say whether it was the last, and why.

        A stop token is kept in the output (its text is not shown later). A stop
        on the very last allowed token counts as "stop", not "length".
        """
        self.output_token_ids.append(token_id)
        if token_id in self.params.stop_token_ids:
            return "stop"
        if token_id in eos_token_ids and not self.params.ignore_eos:
            return "stop"
        if len(self.output_token_ids) >= self.params.max_tokens:
            return "length"
        return None


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probability of one chosen token, and the likeliest tokens with theirs, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class TokenEvent:
    """What one step did for one request: new tokens, or the end, or both.

    `logprobs` has one entry per token if the request asked for them, and is empty otherwise.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclass
class Completion:
    """A finished request. `error` says in one line why, if finish_reason is "error"."""

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_cached_tokens: int = 0   # prompt tokens whose keys and values were found in a prefix cache
    num_drafted_tokens: int = 0   # guesses that were checked, and
    num_accepted_tokens: int = 0  # those of them that stood


@dataclass
class Counters:
    """What an engine did, in numbers that are the same on every machine."""

    forward_passes: int = 0   # calls of the model
    tokens_computed: int = 0  # tokens fed through the layers, over all passes, padding included
    kv_bytes_copied: int = 0  # bytes of keys and values already held and moved again
    kv_bytes_peak: int = 0    # the most bytes of keys and values held at once
    blocks_peak: int = 0      # the most KV blocks held at once
    held_slots: int = 0       # token slots of the KV blocks held, summed over passes
    tail_slots: int = 0       # those of them in which no token is stored: the ends of last blocks
    batch_slots: int = 0      # places in the batch, summed over passes
    idle_slots: int = 0       # those of them that no request took
    prompt_tokens: int = 0    # of requests, when they were first admitted
    prefix_hit_tokens: int = 0  # those of them whose keys and values were found stored
    drafted_tokens: int = 0   # guesses that were checked in a pass
    accepted_tokens: int = 0  # those of them that stood
    preemptions: int = 0      # times a running request lost its blocks and had to be computed again


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
