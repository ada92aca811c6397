"""From a row of logits to one token.

Greedy is the special case of temperature 0. Otherwise the logits become the
processed distribution (temperature, then top-k, then top-p, the order of
Hugging Face transformers), and one uniform number of the request's own
generator picks from it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liteinfer.request import Request, SamplingParams, TokenLogprobs


def sample(logits: Tensor, request: Request) -> int:
    """Choose the next token of `request` from its logits [V].

    Advances the request's generator by one draw, unless it is greedy.

    Raises:
        FloatingPointError: a logit is NaN, or none is finite. argmax would quietly answer.
    """
    check(logits)
    if request.params.temperature == 0:
        return int(logits.argmax())
    return pick(processed_probs(logits, request.params), uniform(request))


def check(logits: Tensor) -> None:
    """Refuse logits [V] from which no token can be chosen. Raises FloatingPointError."""
    if not logits.max().isfinite():   # the maximum of anything with a NaN is NaN
        wrong = int(logits.isnan().sum())
        raise FloatingPointError(f"{wrong} of {logits.numel()} logits are NaN" if wrong else
                                 f"the largest of {logits.numel()} logits is {float(logits.max())}")


def uniform(request: Request) -> float:
    """The next number in [0, 1) of the request's own generator."""
    return float(torch.rand((), dtype=torch.float64, generator=request.generator))


def processed_probs(logits: Tensor, params: SamplingParams) -> Tensor:
    """The distribution a token is really drawn from: [V] float64, on the CPU, sums to 1.

    >>> params = SamplingParams(temperature=1.0, top_k=2)
    >>> processed_probs(torch.tensor([0.5, 0.2, 0.3]).log(), params)
    tensor([0.6250, 0.0000, 0.3750], dtype=torch.float64)
    """
    logits = logits.cpu().double()
    if params.temperature == 0:
        return torch.zeros_like(logits).index_fill_(0, logits.argmax(), 1.0)
    # Subtracting the maximum first keeps a tiny temperature from giving inf - inf.
    scaled = (logits - logits.max()) / params.temperature                    # [V], best is 0
    probs, order = scaled.softmax(dim=0).sort(descending=True, stable=True)  # [V], [V]
    if params.top_k > 0:
        probs[params.top_k:] = 0
        probs /= probs.sum()
    if params.top_p < 1:
        before = probs.cumsum(0) - probs                                     # mass of better tokens
        keep = before < params.top_p
        keep[0] = True
        probs = torch.where(keep, probs, 0)
        probs /= probs.sum()
    return torch.empty_like(probs).scatter_(0, order, probs)


def pick(probs: Tensor, draw: float) -> int:
    """The token at which the cumulative sum of `probs` [V] first exceeds `draw` in [0, 1)."""
    cumulative = probs.cumsum(0)                                             # [V]
    token = int(torch.searchsorted(cumulative, draw * float(cumulative[-1]), right=True))
    return min(token, int(probs.nonzero()[-1]))   # rounding must not reach a token of probability 0


def logprobs(logits: Tensor, token: int, params: SamplingParams) -> tuple[TokenLogprobs, ...]:
    """What a request that asked for log-probabilities is told about `token`; empty if it did not ask.

    They are those of the model, log_softmax of the logits [V] as they came, before temperature,
    top-k and top-p.
    """
    if not params.logprobs:
        return ()
    every = logits.float().log_softmax(dim=0)                                # [V]
    best, ids = every.topk(min(params.top_logprobs, len(every)))             # [top_logprobs] each
    top = tuple(zip(ids.tolist(), best.tolist(), strict=True))
    return (TokenLogprobs(token, float(every[token]), top),)
