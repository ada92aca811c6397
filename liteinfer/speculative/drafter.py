"""What all drafters share: who gets a draft and how long it may be, and the check of what came of it.

The engine of rung 6 has a place for a drafter; a subclass here only says how to
guess. A step then feeds a decoding request its last token and up to k guesses,
k + 1 tokens in one pass, and takes from 1 to k + 1 of them.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from liteinfer.engines.continuous import ContinuousEngine, Drafter, Verdict
from liteinfer.request import Request
from liteinfer.runner import StepOutput
from liteinfer.scheduler import Chunk
from liteinfer.speculative.verify import verify


@dataclass
class Draft:
    """Guessed tokens, and for each the distribution [V] it was drawn from; none if they were not drawn."""

    token_ids: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)
    confidence: float = 1.0   # see draft_ahead


@dataclass(frozen=True)
class Pause:
    """When a request's drafts have shown that they do not pay, it gets no more.

    A draft of k tokens makes a pass 1 + k * cost times as long, and brings k * accepted / drafted
    tokens besides its one. So it pays while accepted / drafted is above cost, whatever k is.

    Args:
        cost: of one drafted token, drafting and checking, as a share of a pass without drafts.
        after: drafted tokens before the first look.
    """

    cost: float
    after: int = 16

    def __post_init__(self) -> None:
        if self.cost < 0 or self.after < 1:
            raise ValueError(f"a pause needs cost >= 0 and after >= 1, got cost {self.cost} and after {self.after}")

    def __call__(self, accepted: int, drafted: int) -> bool:
        return drafted >= self.after and accepted < self.cost * drafted


class SpeculativeDrafter(Drafter):
    """Guesses for every request that has one token to feed; rejection sampling for all.

    Args:
        engine: whose requests these are.
        num_speculative_tokens: k, the most tokens of a draft.
        pause: ends the drafts of a request for which they do not pay; never, unless given.
    """

    def __init__(self, engine: ContinuousEngine, num_speculative_tokens: int = 4, pause: Pause | None = None) -> None:
        if isinstance(num_speculative_tokens, bool) or num_speculative_tokens < 1:
            raise ValueError(f"num_speculative_tokens must be at least 1, got {num_speculative_tokens!r}")
        self.engine, self.k, self.pause = engine, num_speculative_tokens, pause
        self.drafts: dict[str, Draft] = {}    # of the step that is being made

    @abstractmethod
    def guess(self, rooms: Mapping[Request, int]) -> dict[str, Draft]:
        """By request id, a draft of at most so many tokens for each of these requests; none for some, or all."""

    def keep_only(self, request_ids: Collection[str]) -> None:
        """Give back the memory held for any other request: it was preempted, and what it held is for those who run."""
        return

    def propose(self, requests: Sequence[Request]) -> Mapping[str, Sequence[int]]:
        self.keep_only({request.request_id for request in requests})
        rooms = {request: room for request in requests if (room := self.room(request)) > 0}
        try:
            self.drafts = self.guess(rooms) if rooms else {}
        except Exception as error:            # a guess is a hint: without one the step goes on
            warnings.warn(f"no drafts in this step: {type(error).__name__}: {error}", stacklevel=2)
            self.drafts = {}
            for request in rooms:
                self.free(request.request_id)
        return {name: self.up_to_an_end(request) for request in rooms if (name := request.request_id) in self.drafts}

    def room(self, request: Request) -> int:
        """The most tokens that a draft may have: all of them could be taken, and one more."""
        decodes = request.num_tokens - request.num_computed_tokens == 1
        if not decodes or (self.pause and self.pause(request.num_accepted_tokens, request.num_drafted_tokens)):
            return 0
        return min(self.k, request.params.max_tokens - len(request.output_token_ids) - 1)

    def up_to_an_end(self, request: Request) -> list[int]:
        """The request's draft, cut after a token that would end it: what follows could never be taken."""
        draft, params = self.drafts[request.request_id].token_ids, request.params
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self.engine.model.config.eos_token_ids)}
        return draft[:next((i for i, token in enumerate(draft, 1) if token in ends), None)]

    def verify(self, chunks: Sequence[Chunk], output: StepOutput) -> list[Verdict]:
        rows = output.logits.split([chunk.num_logits for chunk in chunks])   # [num_logits, V] each
        return [self._verify(chunk, logits) for chunk, logits in zip(chunks, rows, strict=True)]

    def _verify(self, chunk: Chunk, logits: Tensor) -> Verdict:
        request = chunk.request
        draft = self.drafts.get(request.request_id, Draft())                 # dropped if it was aborted meanwhile
        try:
            tokens = verify(logits, chunk.draft, request, draft.probs)
        except Exception as error:
            return error
        drafted, accepted, counters = len(chunk.draft), len(tokens) - 1, self.engine.counters
        request.num_drafted_tokens += drafted
        request.num_accepted_tokens += accepted
        counters.drafted_tokens += drafted
        counters.accepted_tokens += accepted
        return tokens

    def free(self, request_id: str) -> None:
        self.drafts.pop(request_id, None)
