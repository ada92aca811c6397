"""SamplingParams refuses what makes no sense; a request knows when it is over."""

from __future__ import annotations

import math

import pytest

from liteinfer.request import Request, SamplingParams

pytestmark = pytest.mark.ch01


@pytest.mark.parametrize(("setting", "value"), [
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", "5"), ("max_tokens", True),
    ("temperature", -1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "1"),
    ("top_k", -2), ("top_k", 1.5), ("top_p", 1.5), ("top_p", -0.1), ("top_p", math.nan),
    ("seed", -1), ("seed", 2**63), ("seed", 0.5), ("stop_token_ids", (-1,)), ("stop_token_ids", (1.5,)),
    ("stop", None), ("stop", 5), ("stop_token_ids", None), ("stop_token_ids", 5),
    ("logprobs", 5), ("ignore_eos", "no"), ("stop", ("",)), ("stop", (3,)),
    ("top_logprobs", -1), ("top_logprobs", 21), ("top_logprobs", 2),
])
def test_a_setting_out_of_range_is_named_with_its_value(setting: str, value: object) -> None:
    with pytest.raises(ValueError, match=setting) as caught:
        SamplingParams(**{setting: value})
    shown = value[0] if isinstance(value, tuple) else value
    assert repr(shown) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("settings", [
    {"top_k": 0}, {"top_k": -1}, {"top_k": 10**7}, {"top_p": 0}, {"top_p": 1}, {"temperature": 1e-6}, {"seed": 0},
    {"stop_token_ids": [1, 2]}, {"stop": "x"}, {"stop": ["x", "yz"]}, {"logprobs": True, "top_logprobs": 20},
])
def test_the_edges_of_the_ranges_are_allowed(settings: dict) -> None:
    SamplingParams(**settings)


def test_stop_reasons() -> None:
    """T10: a stop on the last allowed token is "stop"; ignore_eos ignores EOS and nothing else."""
    def reasons(tokens: list[int], **settings: object) -> list[str | None]:
        request = Request("r", [1], SamplingParams(**settings))
        return [request.append(token, eos_token_ids=(0, 2)) for token in tokens]

    assert reasons([5, 6, 7], max_tokens=3) == [None, None, "length"]
    assert reasons([5, 6, 2], max_tokens=3) == [None, None, "stop"]
    assert reasons([0], max_tokens=3) == ["stop"]
    assert reasons([0, 2, 0], max_tokens=3, ignore_eos=True) == [None, None, "length"]
    assert reasons([5, 9], max_tokens=3, stop_token_ids=[9], ignore_eos=True) == [None, "stop"]


def test_token_ids_are_prompt_then_output() -> None:
    request = Request("r", [1, 2])
    request.append(3, ())
    assert request.token_ids == [1, 2, 3]
    assert request.prompt_token_ids == [1, 2]
