"""How much an output repeats itself: where drafts from the text itself win, and say little of real use."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_STRETCH = 32   # tokens
LEAST_REPEATS = 3
LEAST_COVERED = 24     # tokens
GRAM = 4               # tokens


def falls_into_a_loop(ids: Sequence[int]) -> bool:
    """Whether the output ends in a stretch of at most 32 tokens, said at least 3 times, over at least 24 tokens.

    The last of the repeats may be cut by the end, if 3 whole ones are there. An output that stopped by
    itself ends in its EOS, so it fell into no loop: it came out of one, if it was in one.

    >>> falls_into_a_loop([1, 2, 3] + [7, 8] * 12), falls_into_a_loop([7, 8] * 12 + [0])
    (True, False)
    """
    for stretch in range(1, min(LONGEST_STRETCH, len(ids) // LEAST_REPEATS) + 1):
        covered = stretch
        while covered < len(ids) and ids[-covered - 1] == ids[-covered - 1 + stretch]:
            covered += 1
        if covered >= max(LEAST_REPEATS * stretch, LEAST_COVERED):
            return True
    return False


def repetition_share(ids: Sequence[int]) -> float:
    """The share of an output's 4-grams that occurred in it before; 0 for one that has none.

    >>> repetition_share([1, 2, 3, 4, 1, 2, 3, 4])   # of 1234 2341 3412 4123 1234 the last
    0.2
    """
    grams = [tuple(ids[i:i + GRAM]) for i in range(len(ids) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
