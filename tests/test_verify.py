"""Rejection sampling: by hand, by chi-square against the target's processed distribution, and wrong rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from liteinfer import sampling
from liteinfer.request import Request, SamplingParams
from liteinfer.sampling import pick, processed_probs, sample, uniform
from liteinfer.speculative import verify as rule
from liteinfer.speculative.verify import verify, verify_one

pytestmark = pytest.mark.ch08

V, TRIALS = 8, 50_000
TARGET = torch.tensor([1.0, 2.0, 0.5, -1.0, 1.8, 0.0, -2.0, 1.2])
OTHER = torch.tensor([2.0, 1.9, 1.0, 1.5, -1.0, 0.5, 1.0, -0.5])
SETTINGS = {"T 0.7": {"temperature": 0.7}, "T 0.7, top_p 0.5": {"temperature": 0.7, "top_p": 0.5},
            "T 0.7, top_k 3": {"temperature": 0.7, "top_k": 3}}
CASES = [(draft, "T 0.7, top_p 0.5") for draft in ("q = p", "one-hot", "q != p")]
CASES += [pytest.param(draft, settings, marks=pytest.mark.slow)
          for draft in ("q = p", "one-hot", "q != p") for settings in ("T 0.7", "T 0.7, top_k 3")]

Rule = Callable[[Tensor, int, Request, Tensor | None], int]


@pytest.fixture(autouse=True)
def processed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same few rows are processed 50,000 times over: keep what came of them."""
    kept: dict[tuple, Tensor] = {}

    def cached(logits: Tensor, params: SamplingParams) -> Tensor:
        key = (logits.numpy().tobytes(), params.temperature, params.top_k, params.top_p)
        return kept[key] if key in kept else kept.setdefault(key, processed_probs(logits, params))

    for module in (rule, sampling):
        monkeypatch.setattr(module, "processed_probs", cached)


def request(**params: object) -> Request:
    return Request("r", [0], SamplingParams(**({"seed": 11} | params)))


def trial_counts(one: Rule, draft: str, params: dict, trials: int) -> Counter:
    """Tokens that come out of `trials` single-token drafts."""
    r = request(**params)
    q = processed_probs(TARGET if draft == "q = p" else OTHER, r.params)
    guesses, counts = torch.Generator().manual_seed(5), Counter[int]()
    draws = torch.rand(trials, generator=guesses, dtype=torch.float64).tolist()
    for draw in draws:
        guess = 1 if draft == "one-hot" else pick(q, draw)
        counts[one(TARGET, guess, r, None if draft == "one-hot" else q)] += 1
    return counts


def p_value(counts: Counter, params: dict) -> float:
    """Of the counts, if they came from the target's processed distribution; 0 if a token is outside of it."""
    p = processed_probs(TARGET, request(**params).params)
    support = p.nonzero().flatten().tolist()
    if set(counts) - set(support):
        return 0.0
    trials = sum(counts.values())
    return float(chisquare([counts[t] for t in support], [trials * float(p[t]) for t in support]).pvalue)


@pytest.mark.parametrize(("draft", "settings"), CASES)
def test_d6_what_comes_out_is_the_targets_processed_distribution(draft: str, settings: str) -> None:
    params = SETTINGS[settings]
    assert p_value(trial_counts(verify_one, draft, params, TRIALS), params) > 1e-3


def greedy_acceptance(logits: Tensor, guess: int, r: Request, q: Tensor | None) -> int:
    """Keeps a drawn guess if it is the target's likeliest token, or else samples."""
    return guess if guess == int(logits.argmax()) else sample(logits, r)


def equality(logits: Tensor, guess: int, r: Request, q: Tensor | None) -> int:
    """Scores a drawn guess as if it had not been drawn: keeps it with p(guess), replaces it from the residual."""
    p = processed_probs(logits, r.params)
    return guess if uniform(r) < float(p[guess]) else pick((p - (0 if q is None else q)).clamp(min=0), uniform(r))


def top_p_on_the_drafts_side_only(logits: Tensor, guess: int, r: Request, q: Tensor | None) -> int:
    return verify_one(logits, guess, request(temperature=0.7, seed=r.generator.seed() % 2**31), q)


def top_p_on_the_targets_side_only(logits: Tensor, guess: int, r: Request, q: Tensor | None) -> int:
    """Compares with what the draft's probabilities were before top-p."""
    return verify_one(logits, guess, r, processed_probs(OTHER, SamplingParams(temperature=0.7)))


def residual_not_renormalised(logits: Tensor, guess: int, r: Request, q: Tensor | None) -> int:
    p = processed_probs(logits, r.params)
    if q is None or uniform(r) * float(q[guess]) < float(p[guess]):
        return guess
    cumulative = (p - q).clamp(min=0).cumsum(0)
    return min(int(torch.searchsorted(cumulative, uniform(r), right=True)), V - 1)


def residual_is_the_target(logits: Tensor, guess: int, r: Request, q: Tensor | None) -> int:
    p = processed_probs(logits, r.params)
    return guess if q is None or uniform(r) * float(q[guess]) < float(p[guess]) else pick(p, uniform(r))


@pytest.mark.parametrize(("wrong", "settings"), [
    (greedy_acceptance, "T 0.7"), (equality, "T 0.7"), (top_p_on_the_drafts_side_only, "T 0.7, top_p 0.5"),
    (top_p_on_the_targets_side_only, "T 0.7, top_p 0.5"), (residual_not_renormalised, "T 0.7"),
    (residual_is_the_target, "T 0.7")])
def test_the_chi_square_sees_a_wrong_rule(wrong: Rule, settings: str) -> None:
    params = SETTINGS[settings]
    assert p_value(trial_counts(wrong, "q != p", params, 20_000), params) < 1e-6


def test_two_tokens_in_a_row_have_the_joint_distribution() -> None:
    """A draft of two; the second place is looked at only where the first guess stood."""
    rows, q_rows = torch.stack((TARGET, OTHER, TARGET))[:, :3], torch.stack((OTHER, TARGET))[:, :3]
    r = request(temperature=1.0)
    p, q = [processed_probs(row, r.params) for row in rows], [processed_probs(row, r.params) for row in q_rows]
    trials = TRIALS // 2
    draws = torch.rand(trials, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64).tolist()
    first, second, third = Counter[int](), Counter[int](), Counter[int]()
    for each in draws:
        tokens = verify(rows, [pick(q[0], each[0]), pick(q[1], each[1])], r, q)
        for counts, token in zip((first, second, third), tokens, strict=False):
            counts[token] += 1
    for counts, probs in zip((first, second, third), p, strict=True):
        n = sum(counts.values())
        assert n > 5000
        assert chisquare([counts[t] for t in range(3)], [n * float(x) for x in probs]).pvalue > 1e-3
    kept = float(torch.minimum(p[0], q[0]).sum())
    assert abs(sum(second.values()) / trials - kept) < 0.01, "a guess stands as often as min(p, q) sums to"


def test_the_example_of_the_docstring_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """p = 0.5 0.3 0.2, q = 0.2 0.7 0.1, guess 1: kept below 0.3 / 0.7, else 0 in three of four cases and 2 in one."""
    p, q, r = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.7, 0.1], dtype=torch.float64), request(temperature=1)

    def outcome(*numbers: float) -> int:
        given = iter(numbers)
        monkeypatch.setattr(rule, "uniform", lambda _: next(given))
        token = verify_one(p.log(), 1, r, q)
        assert next(given, None) is None, "every number is used"
        return token

    assert outcome(0.42) == 1 and 0.42 < 0.3 / 0.7 < 0.43
    assert [outcome(0.43, u) for u in (0.0, 0.74, 0.76, 0.99)] == [0, 0, 2, 2]


def test_greedy_draws_no_number_and_stops_at_the_first_that_differs() -> None:
    rows = torch.zeros(4, V)
    for i, best in enumerate((3, 5, 2, 6)):
        rows[i, best] = 1.0
    r = request(temperature=0)
    state = r.generator.get_state()
    assert verify(rows, [3, 5, 2], r) == [3, 5, 2, 6]
    assert verify(rows, [3, 4, 2], r) == [3, 5]
    assert verify(rows[:1], [], r) == [3]
    assert torch.equal(r.generator.get_state(), state)


def test_guesses_that_were_not_drawn_leave_a_seeded_request_its_tokens() -> None:
    """One number per token taken, the very one that sampling without a draft would have used."""
    rows = torch.randn(200, V, generator=torch.Generator().manual_seed(2))
    plain, drafted = request(temperature=1.0), request(temperature=1.0)
    want, got, lengths = [sample(row, plain) for row in rows], list[int](), list[int]()
    while len(got) < len(rows) - 4:
        guesses = want[len(got):len(got) + 3]
        if len(lengths) % 2:
            guesses[1] = (guesses[1] + 1) % V
        tokens = verify(rows[len(got):len(got) + 4], guesses, drafted)
        lengths.append(len(tokens))
        got += tokens
    assert got == want[:len(got)] and set(lengths) == {2, 4}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_is_refused_where_it_is_needed_and_only_there(temperature: float) -> None:
    rows, r = torch.zeros(3, V), request(temperature=temperature)
    rows[:, 1] = 50.0
    rows[2] = float("nan")
    q = torch.full((V,), 1 / V, dtype=torch.float64)
    assert verify(rows, [2, 1], r, [q, q]) == [1], "the guess 2 is refused, what follows is not looked at"
    with pytest.raises(FloatingPointError, match="8 of 8 logits are NaN"):
        verify(rows, [1, 1], r, [q, q])
    rows[1] = float("nan")
    with pytest.raises(FloatingPointError, match="NaN"):
        verify(rows, [1, 1], r, [q, q])


def test_rounding_that_leaves_the_residual_empty_keeps_the_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    r = request(temperature=1.0)
    p = processed_probs(TARGET, r.params)
    q = p.clone()
    q[1] += 1e-16
    monkeypatch.setattr(rule, "uniform", lambda _: 1.0)
    assert not (p - q).clamp(min=0).any() and verify_one(TARGET, 1, r, q) == 1
