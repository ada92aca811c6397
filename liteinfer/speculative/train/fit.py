"""Training a head: what it should say is the target's own distribution, at every place of the target's answers."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liteinfer.loading import LoadedModel
from liteinfer.model.linear import Plain
from liteinfer.model.llama import load_llama
from liteinfer.speculative.draft_head import DraftHead, head_rows
from liteinfer.speculative.head_files import expected_shapes
from liteinfer.speculative.train.ahead import Batch, acceptance
from liteinfer.speculative.train.corpus import Example

WARMUP, DECAY = 0.05, 0.8   # of the run until the rate is full; weight of a step over the one before it
DISTANCE = 10.0             # weight of the features' distance beside the cross-entropy


@dataclass(frozen=True)
class Settings:
    """What makes a head.

    Args:
        layers, intermediate_size: of the head; by default one layer as wide as the target's.
        vocab_size: how many tokens it may guess.
        ahead: tokens that it is run on its own output in training.
        tokens_per_batch: of a training step, padding included, at most.
        learning_rate: the highest; it warms up and falls to nothing.
    """

    layers: int = 1
    intermediate_size: int | None = None
    vocab_size: int = 8192
    ahead: int = 2
    tokens_per_batch: int = 1024
    learning_rate: float = 2e-3

    def __post_init__(self) -> None:
        for name in ("layers", "vocab_size", "ahead", "tokens_per_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.intermediate_size is not None and self.intermediate_size < 1:
            raise ValueError(f"intermediate_size must be at least 1, got {self.intermediate_size}")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be above 0, got {self.learning_rate:g}")


def frequent_tokens(examples: Iterable[Example], vocab_size: int, count: int) -> Tensor:
    """The tokens the target says most often, then those the tokenizer learned first; sorted ids [count]."""
    said = Counter(token for example in examples for token in example.ids[example.prompt_len:].tolist())
    ranked = dict.fromkeys([token for token, _ in said.most_common()])
    ranked.update(dict.fromkeys(range(vocab_size)))
    return torch.tensor(sorted([*ranked][:min(count, vocab_size)]))


def new_weights(model: LoadedModel, settings: Settings, tokens: Tensor, seed: int) -> dict[str, Tensor]:
    """A head that has learned nothing: it passes the target's features on. Float32."""
    generator, hidden = torch.Generator().manual_seed(seed), model.config.hidden_size
    shapes = expected_shapes(model, settings.layers, settings.intermediate_size or model.config.intermediate_size,
                             len(tokens))
    weights = {name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.02
               for name, shape in shapes.items()}
    weights["fc.weight"][:, hidden:] = torch.eye(hidden)
    return weights | {"tokens": tokens, "norm.weight": model.weights()["model.norm.weight"].float().cpu().clone()}


class Learner:
    """A head and its optimizer.

    Args:
        weights: where it begins; their dtype is what it is trained in.
    """

    def __init__(self, model: LoadedModel, settings: Settings, weights: Mapping[str, Tensor]) -> None:
        self.settings, self.device, self.dtype = settings, model.device, weights["fc.weight"].dtype
        self.weights = {name: tensor.detach().clone().to(model.device) for name, tensor in weights.items()}
        self.learned = {name: tensor.requires_grad_() for name, tensor in self.weights.items() if name != "tokens"}
        target = copy(load_llama(model, Plain()))
        rows = head_rows(model, target, self.weights["tokens"]).to(self.dtype)
        target.embedding, target.norm = target.embedding.to(self.dtype), target.norm.to(self.dtype)
        self.head = DraftHead(target, rows, self.weights, Plain())
        self.optimizer = torch.optim.AdamW(self.learned.values(), lr=settings.learning_rate, betas=(0.9, 0.95),
                                           weight_decay=0.01)

    def step(self, examples: Sequence[Example], progress: float) -> float:
        """One step of training; the loss. `progress` in [0, 1] is how much of the run is over."""
        rate = self.settings.learning_rate * min(1.0, progress / WARMUP) * (1 + math.cos(math.pi * progress)) / 2
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self._loss(Batch(examples, self.dtype, self.device))
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.learned.values(), 1.0)
        self.optimizer.step()
        return float(loss.detach())

    def _loss(self, batch: Batch) -> Tensor:
        """Cross-entropy with the target's distribution over the head's tokens, and the distance from its features.

        Means over places, then over steps. What the target says is all that counts in the end, but 576
        features tell more of it than one distribution does: with them it is learned from fewer texts (EAGLE
        has both losses as well).
        """
        losses = list[Tensor]()
        with torch.no_grad():
            said = self.head.logits(batch.after[batch.wanted]).softmax(-1)   # [wanted rows, T], the target's
        for features, counts in batch.steps(self.head, self.settings.ahead):
            losses.append(F.cross_entropy(self.head.logits(features[counts]), said[counts[batch.wanted]])
                          + DISTANCE * F.smooth_l1_loss(features[counts], batch.after[counts]))
        weights = DECAY**torch.arange(len(losses), device=self.device)
        return (torch.stack(losses) * weights).sum() / weights.sum()

    def state(self) -> dict[str, Any]:
        """All that a later run needs to go on."""
        return {"weights": {name: tensor.detach() for name, tensor in self.weights.items()},
                "optimizer": self.optimizer.state_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`."""
        with torch.no_grad():
            for name, tensor in self.learned.items():
                tensor.copy_(state["weights"][name])
        self.optimizer.load_state_dict(dict(state["optimizer"]))

    @torch.inference_mode()
    def acceptance(self, examples: Sequence[Example], k: int) -> dict[str, float]:
        """By kind of prompt, the share that stands of drafts of k tokens begun at every place of these answers."""
        found: dict[str, list[Tensor]] = {}
        for example in examples:
            share = acceptance(self.head, Batch([example], self.dtype, self.device), k)
            found.setdefault(example.kind, []).append(share)
        return {kind: float(torch.cat(shares).mean()) for kind, shares in found.items()}


def batches(examples: Sequence[Example], tokens: int, seed: int) -> Iterator[list[Example]]:
    """Batches without end: epochs in random order, examples of like length together, `tokens` at most with padding."""
    rng = random.Random(seed)
    while True:
        order = sorted(examples, key=lambda example: len(example.ids) + rng.uniform(-16, 16))
        epoch = list[list[Example]]()
        for example in order:
            if not epoch or max(len(e.ids) for e in (*epoch[-1], example)) * (len(epoch[-1]) + 1) > tokens:
                epoch.append([])
            epoch[-1].append(example)
        rng.shuffle(epoch)
        yield from epoch
