"""Settings that change a request's logits before its token is chosen, over any rung's drafter.

Since rung 1: SamplingParams only ever chose among the model's logits. What clients
also send changes those first, in this order, which is vLLM's:

    min_tokens           what would end the request: -inf, until it has so many tokens
    logit_bias           l + bias
    repetition_penalty   l / r, or l * r if l < 0, of each token in prompt or output (CTRL, Keskar et al. 2019)
    frequency_penalty    l - f * (times it is in the output)      } OpenAI's formula
    presence_penalty     l - p, if it is in the output at all     }
    min_p                -inf, if its probability is below min_p times the best one's (Nguyen et al. 2024)

    logits 2 1 -1, prompt token 2, output 0 0, r 2, f 0.5, p 0.25    2/2 - 2 * 0.5 - 0.25 = -0.25,  1,  -1 * 2 = -2

All follow from the request's tokens and from no state of their own. So nothing can lie on another
request's row, and a request that was preempted goes on as if nothing had happened.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from liteinfer import request as rung_1
from liteinfer.engines.base import Engine
from liteinfer.engines.continuous import ContinuousEngine, Drafter, Verdict
from liteinfer.request import Request
from liteinfer.runner import StepOutput
from liteinfer.scheduler import Chunk

OFF: Mapping[str, object] = {"min_p": 0, "min_tokens": 0, "repetition_penalty": 1, "presence_penalty": 0,
                             "frequency_penalty": 0, "logit_bias": {}}


@dataclass(frozen=True)
class SamplingParams(rung_1.SamplingParams):
    """Those of chapter 1, and what changes the logits: for rows that run continuously. The module says how.

    A request that uses any of them is not speculated. Its log-probabilities are still those of the model.

    Args:
        min_p: from 0 to 1; leaves the tokens at least min_p times as likely as the best one at this
            temperature, among which top_k and top_p choose. 0 turns it off.
        min_tokens: from 0 to max_tokens; before so many others neither the model's EOS (unless ignore_eos) nor
            one of stop_token_ids is chosen. A stop string still ends the request.
        repetition_penalty: above 0; over 1 makes the tokens of prompt and output less likely, below 1 more.
        presence_penalty: from -2 to 2, taken from the logit of each token in the output.
        frequency_penalty: from -2 to 2, taken once for each time that the token is in the output.
        logit_bias: token id -> what is added to its logit, from -100 to 100.

    Raises:
        ValueError: a setting is out of range; the message names it and its value.
    """

    min_p: float = 0.0
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(_is_number(self.min_p, 0, 1), f"min_p must be a number from 0 to 1, got {self.min_p!r}")
        _require(_is_id(self.min_tokens), f"min_tokens must be an integer of at least 0, got {self.min_tokens!r}")
        _require(self.min_tokens <= self.max_tokens,
                 f"min_tokens {self.min_tokens} is over max_tokens {self.max_tokens}")
        _require(_is_number(self.repetition_penalty, math.ulp(0)),
                 f"repetition_penalty must be a number above 0, got {self.repetition_penalty!r}")
        for name in ("presence_penalty", "frequency_penalty"):
            _require(_is_number(getattr(self, name), -2, 2),
                     f"{name} must be a number from -2 to 2, got {getattr(self, name)!r}")
        _require(isinstance(self.logit_bias, Mapping), f"logit_bias must be a mapping, got {self.logit_bias!r}")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        for token, bias in self.logit_bias.items():
            _require(_is_id(token) and _is_number(bias, -100, 100),
                     "logit_bias must have token ids of at least 0 and biases from -100 to 100, "
                     f"got {token!r}: {bias!r}")

    @cached_property
    def in_use(self) -> tuple[str, ...]:
        """The names of the settings that change logits, without those that are off."""
        return tuple(name for name, off in OFF.items() if getattr(self, name) != off)


def in_use(params: rung_1.SamplingParams) -> tuple[str, ...]:
    """The names of the settings that change logits; none in chapter 1's params."""
    return params.in_use if isinstance(params, SamplingParams) else ()


def check(engine: Engine, row: str, params: rung_1.SamplingParams) -> None:
    """Refuse what an engine, that of this row, cannot honour of `params`; beside `Engine.check`, before any work.

    Raises:
        ValueError: a setting that changes logits where nobody does it, or a logit_bias beyond the vocabulary.
    """
    names = in_use(params)
    if names and not isinstance(getattr(engine, "drafter", None), LogitsProcessors):
        raise ValueError(f"{names[0]} {getattr(params, names[0])!r} needs a row that runs continuously, as "
                         f"liteinfer-radix does, and {row} does not")
    if isinstance(params, SamplingParams):
        vocab, highest = engine.model.config.vocab_size, max(params.logit_bias, default=0)
        _require(highest < vocab, f"logit_bias must have token ids from 0 to {vocab - 1} (vocab_size {vocab}), "
                                  f"got {highest}")


def processed(logits: Tensor, request: Request, eos_token_ids: Sequence[int]) -> Tensor:
    """A request's logits [V] as its settings change them. What is given stays as it is, and may be what is returned.

    Raises:
        ValueError: min_tokens leaves no token that could be chosen.
    """
    params = request.params
    if not isinstance(params, SamplingParams):
        return logits
    if len(request.output_token_ids) < params.min_tokens:
        ends = [*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)]
        logits = logits.index_fill(0, _ids(ends, logits), -torch.inf)
        _require(not logits.isneginf().all(), f"min_tokens {params.min_tokens}: every token left would be an end")
    if params.logit_bias:
        bias = logits.new_tensor(list(params.logit_bias.values()))
        logits = logits.index_add(0, _ids(list(params.logit_bias), logits), bias)
    if params.repetition_penalty != 1:
        ids, r = _ids(request.token_ids, logits), params.repetition_penalty
        seen = logits[ids]
        logits = logits.index_put((ids,), torch.where(seen < 0, seen * r, seen / r))
    if params.presence_penalty or params.frequency_penalty:
        times = _ids(request.output_token_ids, logits).bincount(minlength=len(logits)).to(logits.dtype)      # [V]
        logits = logits - params.frequency_penalty * times - params.presence_penalty * (times > 0)
    if params.min_p:     # p >= min_p * best is l / T >= l_best / T + ln min_p
        least = logits.max() + params.temperature * math.log(params.min_p)
        logits = logits.masked_fill(logits < least, -torch.inf)
    return logits


class LogitsProcessors(Drafter):
    """Another drafter, to which the logits of requests that ask for it come changed. Only the others get drafts.

    Args:
        engine: whose requests these are.
        inner: proposes and verifies.
    """

    def __init__(self, engine: ContinuousEngine, inner: Drafter) -> None:
        self.engine, self.inner = engine, inner

    @classmethod
    def over(cls, make: Callable[[ContinuousEngine], Drafter]) -> Callable[[ContinuousEngine], Drafter]:
        """What makes these over the drafter that `make` makes."""
        return lambda engine: cls(engine, make(engine))

    def propose(self, requests: Sequence[Request]) -> Mapping[str, Sequence[int]]:
        return self.inner.propose([request for request in requests if not in_use(request.params)])

    def verify(self, chunks: Sequence[Chunk], output: StepOutput) -> list[Verdict]:
        places = list(_first_rows(chunks))
        if not places:
            return self.inner.verify(chunks, output)
        # float32 at least: a penalty is finer than bfloat16. The model's own logits are still to be reported.
        logits = output.logits.to(torch.promote_types(output.logits.dtype, torch.float32), copy=True)   # [M, V]
        eos, faults = self.engine.model.config.eos_token_ids, dict[int, Exception]()
        for i, row in places:
            try:
                logits[row] = processed(logits[row], chunks[i].request, eos)
            except Exception as error:     # its own, and nobody else's
                faults[i] = error
        verdicts = self.inner.verify(chunks, replace(output, logits=logits))
        return [faults.get(i, verdict) for i, verdict in enumerate(verdicts)]

    def free(self, request_id: str) -> None:
        self.inner.free(request_id)


def _first_rows(chunks: Sequence[Chunk]) -> Iterator[tuple[int, int]]:
    """The place in `chunks`, and in their logits, of each request that changes its logits: it has one row, no draft."""
    row = 0
    for i, chunk in enumerate(chunks):
        if in_use(chunk.request.params):
            yield i, row
        row += chunk.num_logits


def _ids(ids: Sequence[int], logits: Tensor) -> Tensor:
    return torch.tensor(ids, dtype=torch.long, device=logits.device)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: object, low: float, high: float = sys.float_info.max) -> bool:
    """Whether it is a finite number of this range."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
