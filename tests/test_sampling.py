"""From logits to a token: M1, M2, M3 and the distribution itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from liteinfer.request import Request, SamplingParams
from liteinfer.sampling import pick, processed_probs, sample

pytestmark = pytest.mark.ch01
LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0, 0.0, 2.5, -2.0, 0.5])
V = len(LOGITS)


def draw(params: SamplingParams, logits: torch.Tensor = LOGITS) -> int:
    return sample(logits, Request("r", [0], params))


@pytest.mark.parametrize("settings", [
    {"temperature": 0}, {"temperature": 0, "top_p": 0.1}, {"temperature": 0, "top_k": 5},
    {"temperature": 0, "seed": 3}, {"temperature": 1e-6}, {"temperature": 1e-300},
    {"temperature": 1, "top_k": 1}, {"temperature": 1, "top_p": 0.0},
])
def test_m1_m3_settings_that_leave_only_the_best_token(settings: dict) -> None:
    assert draw(SamplingParams(**settings)) == 1


@pytest.mark.parametrize("top_k", [0, -1, V, V + 1, 10**7])
def test_m3_top_k_that_is_off_changes_nothing(top_k: int) -> None:
    expected = LOGITS.double().softmax(0)
    got = processed_probs(LOGITS, SamplingParams(temperature=1, top_k=top_k))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-15)


def test_top_k_and_top_p_by_hand() -> None:
    probs = torch.tensor([0.1, 0.4, 0.2, 0.3])
    by_k = processed_probs(probs.log(), SamplingParams(temperature=1, top_k=2))
    torch.testing.assert_close(by_k, torch.tensor([0, 4 / 7, 0, 3 / 7]).double(), rtol=0, atol=1e-7)
    by_p = processed_probs(probs.log(), SamplingParams(temperature=1, top_p=0.8))   # 0.4 + 0.3 < 0.8: a third
    torch.testing.assert_close(by_p, torch.tensor([0, 4 / 9, 2 / 9, 3 / 9]).double(), rtol=0, atol=1e-7)
    both = processed_probs(probs.log(), SamplingParams(temperature=1, top_k=2, top_p=0.5))  # 4/7 reaches 0.5
    torch.testing.assert_close(both, torch.tensor([0, 1, 0, 0]).double(), rtol=0, atol=1e-7)


def test_nan_logits_are_an_error_and_not_token_0() -> None:
    """B3, last clause."""
    for params in (SamplingParams(), SamplingParams(temperature=1)):
        with pytest.raises(FloatingPointError, match="1 of 8 logits are NaN"):
            draw(params, LOGITS.clone().index_fill_(0, torch.tensor([3]), float("nan")))


@pytest.mark.parametrize(("value", "named"), [("inf", "inf"), ("-inf", "-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_without_a_finite_best_are_an_error(value: str, named: str, temperature: float) -> None:
    logits = torch.full((V,), float("-inf"))
    logits[3] = float(value)
    with pytest.raises(FloatingPointError, match=f"the largest of 8 logits is {named}"):
        draw(SamplingParams(temperature=temperature), logits)


def test_infinite_negative_logits_are_never_drawn() -> None:
    logits = torch.full((V,), float("-inf"))
    logits[5] = 0.0
    assert {draw(SamplingParams(temperature=5.0, seed=s), logits) for s in range(50)} == {5}


@pytest.mark.parametrize("settings", [{}, {"top_k": 3}, {"top_p": 0.8}, {"top_k": 4, "top_p": 0.9}])
def test_draws_follow_the_processed_distribution(settings: dict) -> None:
    params = SamplingParams(temperature=0.7, seed=1, **settings)
    request, n = Request("r", [0], params), 5_000
    probs = processed_probs(LOGITS, params)
    counts = torch.bincount(torch.tensor([sample(LOGITS, request) for _ in range(n)]), minlength=V)
    assert counts[probs == 0].sum() == 0
    kept = probs > 0
    assert chisquare(counts[kept].numpy(), (probs[kept] * n).numpy()).pvalue > 1e-4


def test_m2_seeded_tokens_depend_on_nothing_but_the_request() -> None:
    logits = torch.randn(16, V, generator=torch.Generator().manual_seed(5))

    def tokens(*requests: Request) -> list[list[int]]:
        drawn: list[list[int]] = [[] for _ in requests]
        for row in logits:
            for i, request in enumerate(requests):
                drawn[i].append(sample(row, request))
        return drawn

    seeded = SamplingParams(temperature=0.8, seed=42)
    alone, = tokens(Request("a", [0], seeded))
    torch.manual_seed(999)
    torch.rand(7)   # the global generator has no say
    crowd = tokens(Request("x", [0], SamplingParams(temperature=0.8)), Request("a", [0], seeded),
                   Request("y", [0], SamplingParams()), Request("b", [0], seeded),
                   Request("z", [0], SamplingParams(temperature=0.8, seed=43)))
    assert crowd[1] == alone == crowd[3]
    assert crowd[4] != alone
    unseeded = tokens(*(Request(str(i), [0], SamplingParams(temperature=0.8)) for i in range(4)))
    assert len({tuple(t) for t in unseeded}) > 1


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20).filter(lambda p: sum(p) > 1e-6),
       st.floats(0, 1, exclude_max=True))
def test_pick_never_takes_a_token_of_probability_zero(weights: list[float], u: float) -> None:
    probs = torch.tensor(weights, dtype=torch.float64)
    probs /= probs.sum()
    token = pick(probs, u)
    assert probs[token] > 0
    assert float(probs[:token].sum()) <= u + 1e-9
