"""Drafts of a head trained on the target's own words.

One decoder layer reads the target's last hidden state and the token that came
of it, and says what the next hidden state will be (EAGLE, Li et al. 2024). The
target's own head makes a token of that, over its most frequent tokens alone
(FR-Spec, Zhao et al. 2025); fed back, the two give the token after.

    target   x0 x1 x2  -> f0 f1 f2, and x3 is taken
    head     (f0, x1) (f1, x2) (f2, x3)  -> g3, a guess of f3; the head of g3: x4?
             (g3, x4?)                   -> g4, and x5?
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liteinfer.cache.paged import GatherSdpa, PagedCache
from liteinfer.engines.continuous import ContinuousEngine
from liteinfer.kv_manager import KVManager
from liteinfer.loading import LoadedModel
from liteinfer.model.layout import Layout
from liteinfer.model.linear import LinearMaker, Packed
from liteinfer.model.llama import Cache, Layer, Llama
from liteinfer.model.rope import cos_sin, rotate
from liteinfer.request import Request
from liteinfer.scheduler import Chunk
from liteinfer.speculative.draft_model import draft_ahead
from liteinfer.speculative.drafter import Draft, Pause, SpeculativeDrafter
from liteinfer.speculative.listening import ListeningRunner


class DraftHead:
    """The layer, or layers, and what it borrows of the target: embedding, final norm, rows of the head.

    Args:
        target: whose hidden states it carries on.
        rows: [T, E], those of the target's head for the tokens it may guess.
        weights: fc [E, 2E], embed_norm [E], layers.N.* under transformers' names, norm [E], and `tokens`,
            the ids [T] it may guess.
        linear: how the linear layers are computed.
    """

    def __init__(self, target: Llama, rows: Tensor, weights: Mapping[str, Tensor], linear: LinearMaker) -> None:
        self.config, self.embedding, self.target_norm = target.config, target.embedding, target.norm
        self.tokens = weights["tokens"]                                      # [T]
        self.embed_norm, self.norm = weights["embed_norm.weight"], weights["norm.weight"]
        self.fc = linear([weights["fc.weight"]], [None])
        self.layers = [Layer(weights, f"layers.{i}.", linear) for i in range(num_layers(weights))]
        self.head = linear([rows], [None])
        self.inv_freq = target.inv_freq

    def features(self, hidden: Tensor) -> Tensor:
        """What the head takes of the target: its last hidden states [N, E], normed as for the target's own head."""
        return self._normed(hidden, self.target_norm)

    def __call__(self, ids: Tensor, features: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """Of tokens [N] and the features [N, E] before each of them, the features [N, E] after them."""
        heads = (-1, self.config.head_size)
        cos, sin = cos_sin(self.inv_freq, positions, features.dtype)         # [N, 1, D]
        embedded = self._normed(F.embedding(ids, self.embedding), self.embed_norm)
        x = self.fc(torch.cat((embedded, features), dim=-1))[0]              # [N, E]
        for i, layer in enumerate(self.layers):
            q, k, v = (y.unflatten(-1, heads) for y in layer.qkv(self._normed(x, layer.input_norm)))
            attended = cache.attend(i, rotate(q, cos, sin), rotate(k, cos, sin), v)   # [N, H, D]
            x = x + layer.o(attended.flatten(-2))[0]
            gate, up = layer.gate_up(self._normed(x, layer.mlp_norm))        # [N, I] each
            x = x + layer.down(F.silu(gate) * up)[0]
        return self._normed(x, self.norm)

    def logits(self, features: Tensor) -> Tensor:
        """Logits [M, T] of the tokens it may guess, of features [M, E]."""
        return self.head(features)[0]

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)


def head_rows(model: LoadedModel, target: Llama, tokens: Tensor) -> Tensor:
    """The rows [T, E] of the target's head that these tokens [T] have."""
    if model.config.tie_word_embeddings:
        return target.embedding[tokens]
    return model.weights_to_copy()["lm_head.weight"][tokens]


def num_layers(weights: Mapping[str, Any]) -> int:
    """How many decoder layers these weights are of."""
    return 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("layers."))


@dataclass
class Heard:
    """What the head knows of one request.

    Args:
        start: the first token whose features it was told. What was found in a prefix cache is not computed,
            so its features are nowhere: the head knows the text from there on only.
        end: the token after the last one.
        pieces: features [n, E] of a step each, not in the head's cache yet; the last may end in refused guesses.
        fed: how many are in it.
    """

    start: int
    end: int
    pieces: list[Tensor] = field(default_factory=list)
    fed: int = 0

    def goes_on(self, at: int) -> bool:
        """Whether a chunk that starts there follows what was heard, but for refused guesses, which are dropped."""
        if not self.end - (len(self.pieces[-1]) if self.pieces else 0) <= at <= self.end:
            return False
        if at < self.end:
            self.pieces[-1], self.end = self.pieces[-1][:at - self.end], at
        return True


class DraftHeadDrafter(SpeculativeDrafter):
    """Greedy or drawn guesses of a draft head, which keeps its own pages, as many as the target has.

    Args:
        weights: of the head, in the target's dtype and on its device; see DraftHead.
        min_confidence: a draft ends where its confidence would fall below this (`draft_ahead`).
    """

    def __init__(self, engine: ContinuousEngine, weights: Mapping[str, Tensor], num_speculative_tokens: int = 4,
                 pause: Pause | None = None, min_confidence: float = 0.0,
                 linear: LinearMaker = Packed()) -> None:  # noqa: B008 - stateless
        super().__init__(engine, num_speculative_tokens, pause)
        model, pool = engine.model, engine.pool_size
        self.head = DraftHead(engine.llama, head_rows(model, engine.llama, weights["tokens"]), weights, linear)
        self.cache = PagedCache(replace(model.config, num_layers=len(self.head.layers)), pool.num_blocks,
                                pool.block_size, model.dtype, model.device, GatherSdpa())
        self.kv, self.min_confidence = KVManager(self.cache), min_confidence
        self.heard: dict[str, Heard] = {}
        self.next: dict[str, Tensor] = {}     # of each sequence, the features [m, E] that its next pass takes
        engine.runner = ListeningRunner(engine.runner, self.listen)

    def listen(self, chunk: Chunk, hidden: Tensor) -> None:
        """The target has computed a chunk: keep its hidden states [num_tokens, E]. Its draft may yet be refused."""
        name = chunk.request.request_id
        try:
            if name not in self.heard or not self.heard[name].goes_on(chunk.start):
                self._forget(name)            # it is new, or comes back from a preemption
                self.heard[name] = Heard(chunk.start, chunk.start)
            self.heard[name].pieces.append(self.head.features(hidden))
            self.heard[name].end += chunk.num_tokens
        except Exception as error:            # the pass itself went well, and is not to fail for this
            warnings.warn(f"request {name!r} is not heard: {type(error).__name__}: {error}", stacklevel=2)
            self._forget(name)

    def keep_only(self, request_ids: Collection[str]) -> None:
        for name in self.heard.keys() - request_ids:
            self._forget(name)

    def guess(self, rooms: Mapping[Request, int]) -> dict[str, Draft]:
        try:
            first = {request: request.token_ids for request, room in rooms.items() if self._catch_up(request, room)}
            drafts = draft_ahead(rooms, first, self._feed, self.min_confidence)
            for request in first:             # its own features are not the target's: what stands is fed again
                self.cache.truncate(request.request_id, self.heard[request.request_id].fed)
        except BaseException:                 # Ctrl-C too: what is half done is forgotten, and heard anew
            for request in rooms:
                self._forget(request.request_id)
            raise
        return drafts

    def _catch_up(self, request: Request, room: int) -> bool:
        """Ready what was heard of a request since its last draft. False: nothing was, or there is no room for it."""
        name, limit = request.request_id, self.engine.scheduler.config.max_num_batched_tokens
        heard = self.heard.get(name)
        if heard is None or not heard.pieces:
            return False
        new = request.num_computed_tokens - heard.start - heard.fed
        if not self.kv.allocate(request, heard.fed + new + room - 1):
            return False
        waiting = torch.cat(heard.pieces)[:new].split(limit)                 # [<= limit, E] each
        heard.pieces, heard.end, heard.fed = [], request.num_computed_tokens, heard.fed + new
        for i, piece in enumerate(waiting):
            self.next[name] = piece
            if i < len(waiting) - 1:          # of a long prompt no more at a time than the target takes
                self._feed({name: request.token_ids[:heard.start + self.cache.lengths[name] + limit + 1]})
        return True

    def _feed(self, sequences: Mapping[str, list[int]]) -> Tensor:
        """Feed what is new of each sequence, with the features before it; logits [B, V] after its last token."""
        held = {name: self.cache.lengths[name] for name in sequences}
        layout = Layout.of([(name, held[name], len(self.next[name])) for name in sequences], self.head.embedding.device)
        new = [token for name, ids in sequences.items() for token in ids[self.heard[name].start + 1 + held[name]:]]
        self.cache.begin(layout)
        features = self.head(torch.tensor(new, device=layout.positions.device),
                             torch.cat([self.next[name] for name in sequences]), layout.positions, self.cache)
        last = features[layout.query_start_loc[1:].long() - 1]               # [B, E]
        self.next.update(zip(sequences, last.split(1), strict=True))
        logits = self.head.logits(last)                                      # [B, T]
        every = logits.new_full((len(last), len(self.head.embedding)), -torch.inf)
        return every.index_copy_(1, self.head.tokens, logits)                # [B, V]

    def free(self, request_id: str) -> None:
        super().free(request_id)
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        self.heard.pop(request_id, None)
        self.next.pop(request_id, None)
        self.cache.free(request_id)
