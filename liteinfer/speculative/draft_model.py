"""Drafts of a second, smaller model, which keeps its own pages.

Its cache follows the request's tokens, not the target's cache. Before it guesses,
whatever it was fed that is no longer in the request is rewound, and whatever it
was not fed is caught up: after a refused draft, a prefix hit, a preemption, or
rounds without drafts it is all the same to it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from torch import Tensor

from liteinfer.cache.block_pool import OutOfBlocks
from liteinfer.cache.paged import GatherSdpa
from liteinfer.cache.pool_size import pool_size
from liteinfer.engines.continuous import ContinuousEngine
from liteinfer.engines.paged import feed, paged_cache
from liteinfer.loading import LoadedModel
from liteinfer.model.linear import LinearMaker, Packed
from liteinfer.model.llama import load_llama
from liteinfer.request import Counters, Request
from liteinfer.sampling import pick, processed_probs, uniform
from liteinfer.speculative.drafter import Draft, Pause, SpeculativeDrafter


def draft_ahead(rooms: Mapping[Request, int], first: Mapping[Request, list[int]],
                feed: Callable[[dict[str, list[int]]], Tensor], least: float = 0.0) -> dict[str, Draft]:
    """Feed, guess, feed the guesses: one pass for each token of the longest draft, all requests together.

    Args:
        rooms: the most tokens of each request's draft.
        first: what the first pass is to have fed of each request; one that it does not bring to its
            last token gets no draft in this step.
        feed: feeds what is new of each sequence, and returns the logits [B, V] after its last token.
        least: a draft ends before the guess with which its confidence would fall below this.
    """
    drafts, ahead = dict[Request, Draft](), dict(first)
    while ahead:
        logits = feed({request.request_id: ids for request, ids in ahead.items()})   # [B, V]
        longer = dict[Request, list[int]]()
        for (request, ids), row in zip(ahead.items(), logits, strict=True):
            draft = drafts.setdefault(request, Draft())
            if len(ids) >= request.num_tokens and row.max().isfinite() and confident(row, draft, least):
                choose(row, request, draft)
                if len(draft.token_ids) < rooms[request]:
                    longer[request] = request.token_ids + draft.token_ids
        ahead = longer
    return {request.request_id: draft for request, draft in drafts.items() if draft.token_ids}


def confident(logits: Tensor, draft: Draft, least: float) -> bool:
    """Whether one more guess from a draft model's logits [V] is worth its while.

    A draft's confidence is the product of the largest probabilities at each of its tokens: about the
    chance that all of it stands. It is asked before the guess is drawn. To drop a drawn guess for
    what it is would favour the others, and the target's distribution would not come out.
    """
    if least > 0:
        draft.confidence *= float(logits.softmax(dim=0).max())
    return draft.confidence >= least


def choose(logits: Tensor, request: Request, draft: Draft) -> None:
    """Add a guess from a draft model's logits [V] to a draft.

    It is drawn from them as the target's tokens are from its own, unless the request is greedy or has
    a seed. A seed promises the same tokens whatever is drafted: then the guess is the likeliest token,
    and checking it takes one number of the request's generator, as sampling without a draft does.
    """
    if request.params.temperature == 0 or request.params.seed is not None:
        draft.token_ids.append(int(logits.argmax()))
        return
    probs = processed_probs(logits, request.params)                          # [V]
    draft.token_ids.append(pick(probs, uniform(request)))
    draft.probs.append(probs)


class DraftModelDrafter(SpeculativeDrafter):
    """Greedy or drawn guesses of another model with the same vocabulary.

    Args:
        model: the draft model.
        num_blocks: its pool; by default from the memory there is. A request it has no blocks for gets no draft.
        linear: how its linear layers are computed.

    Raises:
        ValueError: its vocabulary is not the target's.
    """

    def __init__(self, engine: ContinuousEngine, model: LoadedModel, num_speculative_tokens: int = 4,
                 pause: Pause | None = None, num_blocks: int | None = None,
                 linear: LinearMaker = Packed()) -> None:  # noqa: B008 - stateless
        super().__init__(engine, num_speculative_tokens, pause)
        check_vocabulary(model, engine.model)
        self.max_model_len = min(engine.max_model_len, model.config.max_position_embeddings)
        size = pool_size(model, engine.pool_size.block_size, num_blocks, engine.scheduler.config.max_num_seqs,
                         self.max_model_len)
        self.llama, self.cache = load_llama(model, linear), paged_cache(model, size, GatherSdpa())
        self.counters = Counters()
        self.fed: dict[str, list[int]] = {}   # by request id, the tokens whose keys and values are stored

    def keep_only(self, request_ids: Collection[str]) -> None:
        for request_id in self.fed.keys() - request_ids:
            self.free(request_id)

    def guess(self, rooms: Mapping[Request, int]) -> dict[str, Draft]:
        return draft_ahead(rooms, self._catch_up(rooms), self._feed)

    def _catch_up(self, rooms: Mapping[Request, int]) -> dict[Request, list[int]]:
        """What to feed of each request first: all it has, but over all of them no more new tokens than a step may have.

        So nobody waits for a long prompt of another; it is caught up with over several steps.
        """
        budget, first = self.engine.scheduler.config.max_num_batched_tokens, dict[Request, list[int]]()
        for request, room in rooms.items():
            ids, held = request.token_ids, self._rewind(request)
            until = min(len(ids), held + budget)
            fits = len(ids) + room - 1 <= self.max_model_len and self._reserve(request.request_id, until + room - 1)
            if fits and until > held:
                first[request] = ids[:until]
                budget -= until - held
        return first

    def _rewind(self, request: Request) -> int:
        """Forget what was fed and is not the request's, its last token included; the number of tokens left."""
        fed, ids = self.fed.setdefault(request.request_id, []), request.token_ids
        same = min(len(fed), len(ids) - 1)
        while fed[:same] != ids[:same]:
            same -= 1
        if request.request_id in self.cache.lengths:
            self.cache.truncate(request.request_id, same)
        del fed[same:]
        return same

    def _reserve(self, request_id: str, length: int) -> bool:
        try:
            self.cache.reserve(request_id, length)
        except OutOfBlocks:
            return False
        return True

    def _feed(self, sequences: Mapping[str, list[int]]) -> Tensor:
        """Feed what is new of each sequence; logits [B, V] after its last token."""
        logits = feed(self.llama, self.cache, sequences, self.counters)
        self.fed.update((request_id, list(ids)) for request_id, ids in sequences.items())
        return logits

    def free(self, request_id: str) -> None:
        super().free(request_id)
        self.fed.pop(request_id, None)
        self.cache.free(request_id)


def check_vocabulary(draft: LoadedModel, target: LoadedModel) -> None:
    """Raises ValueError unless a token id means the same to both models."""
    sizes = draft.config.vocab_size, target.config.vocab_size
    if sizes[0] != sizes[1]:
        raise ValueError(f"draft model {draft.name} has vocab_size {sizes[0]:,}, target {target.name} {sizes[1]:,}: "
                         "a draft must speak the target's tokens")
    if draft.tokenizer and target.tokenizer and draft.tokenizer.get_vocab() != target.tokenizer.get_vocab():
        raise ValueError(f"draft model {draft.name} and target {target.name} have {sizes[0]:,} tokens each, "
                         "but not the same ones")
