"""Which drafted tokens stand, and the one that comes after them.

Since rung 7: a step may feed a request several tokens that are only guessed, and
its logits say for each place what the model would have said there. Rejection
sampling (Leviathan et al. 2023; Chen et al. 2023) keeps a guess x, drawn from q,
with probability min(1, p(x) / q(x)); the first that is refused is replaced by a
draw from what q gave too little, max(0, p - q). What comes out is distributed as
p, whatever q was. p and q are processed distributions: after temperature, top-k
and top-p.

    p = 0.5 0.3 0.2   q = 0.2 0.7 0.1   the guess is token 1
    kept with probability 0.3 / 0.7; else a draw from 0.3 0 0.1, that is 0.75 0 0.25
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from liteinfer.request import Request
from liteinfer.sampling import check, pick, processed_probs, sample, uniform


def verify(logits: Tensor, draft: Sequence[int], request: Request, draft_probs: Sequence[Tensor] = ()) -> list[int]:
    """The tokens a request takes: those of its draft that stand, and one more.

    Greedy is the special case of a p that is 1 at the largest logit: no number is drawn.

    Args:
        logits: [k + 1, V], the target's after the request's last token and after each of the draft's k.
        draft: k token ids.
        draft_probs: for each of them the processed distribution [V] it was drawn from, float64 on the
            CPU. Without it the draft was not drawn: q is 1 at the guess.

    Raises:
        FloatingPointError: a row of logits that is needed is NaN, or has no finite number.
    """
    taken: list[int] = []
    for i, guess in enumerate(draft):
        taken.append(verify_one(logits[i], guess, request, draft_probs[i] if draft_probs else None))
        if taken[-1] != guess:
            return taken
    return [*taken, sample(logits[len(draft)], request)]


def verify_one(logits: Tensor, guess: int, request: Request, q: Tensor | None) -> int:
    """`guess` if it stands against the target's logits [V], else the token that replaces it. q is [V], or None."""
    if q is None or request.params.temperature == 0:
        return sample(logits, request)   # to keep x with probability p(x), draw from p and see whether it is x
    check(logits)
    p = processed_probs(logits, request.params)                              # [V]
    residual = (p - q).clamp(min=0)                                          # [V]
    if uniform(request) * float(q[guess]) < float(p[guess]) or not residual.any():   # rounding may leave p = q nothing
        return guess
    return pick(residual, uniform(request))
