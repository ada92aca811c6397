"""The head several tokens ahead of what is known, for whole sequences at once: for training and for evaluation.

While it drafts, a head reads the target's features up to some place and its own
after that. Step j of 0, 1, ... here has every row i read its own features of the
last j tokens, as if the target's ended j tokens before it, so that all the drafts
that could begin anywhere in a text are run in as many passes as a draft is long
(EAGLE-3, Li et al. 2025, trains so).

    row i of step 0 sees keys of step 0 up to i
    row i of step 2 sees keys of step 0 up to i - 2, the key of step 1 at i - 1, its own
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from liteinfer.speculative.draft_head import DraftHead
from liteinfer.speculative.train.corpus import Example


class Ahead:
    """The keys and values of all steps so far, by layer: a cache for the head's forward."""

    def __init__(self, batch: int, length: int, layers: int) -> None:
        self.shape = batch, length
        self.keys: list[list[Tensor]] = [[] for _ in range(layers)]          # [B, K, L, D] of each step
        self.values: list[list[Tensor]] = [[] for _ in range(layers)]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k, v [B * L, K, D] of this step; return the attention output [B * L, H, D] of q [B * L, H, D]."""
        q, k, v = (x.unflatten(0, self.shape).transpose(1, 2) for x in (q, k, v))
        keys, values, groups = self.keys[layer], self.values[layer], q.shape[1] // k.shape[1]
        keys.append(k.repeat_interleave(groups, 1))                          # [B, H, L, D]
        values.append(v.repeat_interleave(groups, 1))
        j, length = len(keys) - 1, q.shape[2]
        known = torch.ones(length, length, dtype=torch.bool, device=q.device).tril(-j)
        known[:, 0] |= ~known.any(1)          # rows before the first draft of j tokens: they count nowhere
        scores = [(q @ keys[0].transpose(2, 3)).masked_fill(~known, -torch.inf)]          # [B, H, L, L]
        scores += [(q * later(keys[s], j - s)).sum(-1, keepdim=True) for s in range(1, j + 1)]   # [B, H, L, 1] each
        weights = (torch.cat(scores, -1) * q.shape[3]**-0.5).softmax(-1)
        out = weights[..., :length] @ values[0]
        for s in range(1, j + 1):
            out = out + weights[..., length + s - 1, None] * later(values[s], j - s)
        return out.transpose(1, 2).flatten(0, 1)


def later(x: Tensor, by: int) -> Tensor:
    """Rows [..., L, D] moved down by so many places."""
    return F.pad(x, (0, 0, by, 0))[..., :x.shape[-2], :]


class Batch:
    """Examples side by side, padded at their ends. Row i is that of token i + 1, whose answer is token i + 2.

    Args:
        dtype: of the features [B, L, E] before the row's token, `before`, and after it, `after`.
    """

    def __init__(self, examples: Sequence[Example], dtype: torch.dtype, device: torch.device) -> None:
        ids = torch.nn.utils.rnn.pad_sequence([example.ids for example in examples], batch_first=True).to(device)
        features = torch.nn.utils.rnn.pad_sequence(
            [example.features for example in examples], batch_first=True).to(device, dtype)
        self.tokens, self.answers = ids[:, 1:-1], ids[:, 2:]                 # [B, L]
        self.before, self.after = features[:, :-1], features[:, 1:]          # [B, L, E]
        row = torch.arange(self.tokens.shape[1])
        self.wanted = torch.stack([(row >= example.prompt_len - 2) & (row < len(example.ids) - 2)
                                   for example in examples]).to(device)      # [B, L] whose answer the target gave

    def steps(self, head: DraftHead, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each step, the head's features [B, L, E], and the rows [B, L] that count."""
        batch, length = self.tokens.shape
        positions = torch.arange(length, device=self.tokens.device).repeat(batch)
        cache, features = Ahead(batch, length, len(head.layers)), self.before
        for j in range(count):
            features = head(self.tokens.flatten(), features.flatten(0, 1), positions, cache).unflatten(0, (batch, -1))
            counts = self.wanted.clone()
            counts[:, :j] = False
            yield features, counts
            features = later(features, 1)


def acceptance(head: DraftHead, batch: Batch, k: int) -> Tensor:
    """Of drafts of k tokens begun at every place of the answers, the share [places] that stands: 0, 1/k, ... 1.

    Only places from which k more tokens follow count.
    """
    right = list[Tensor]()
    starts = batch.wanted.clone()
    for j, (features, _) in enumerate(batch.steps(head, k)):
        guess = head.tokens[head.logits(features).argmax(-1)]                # [B, L]
        hit = (guess == batch.answers) & batch.wanted
        right.append(F.pad(hit[:, j:], (0, j)))                              # by where the draft began
        starts &= F.pad(batch.wanted[:, j:], (0, j))
    return torch.stack(right).long().cumprod(0).sum(0)[starts] / k
