"""Promise 3: every rung says the same words as rung 1. Tiers A and B of DESIGN section 6."""

from __future__ import annotations

import json
import random

import pytest
import torch

from liteinfer.loading import LoadedModel
from liteinfer.request import Request, SamplingParams
from tests import tier_b
from tests.conftest import build, outputs, rows

N_PROMPTS = 200


def random_prompts(vocab: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """200 prompts of 1 to 40 tokens, lengths around 8, 16 and 32 often, 1 to 12 tokens to generate."""
    rng = random.Random(20)
    lengths = [rng.choice([rng.randint(1, 40), rng.choice([7, 8, 9, 15, 16, 17, 31, 32, 33])])
               for _ in range(N_PROMPTS)]
    prompts = [[rng.randrange(vocab) for _ in range(n)] for n in lengths]
    params = [SamplingParams(max_tokens=rng.randint(1, 12),
                             **({} if i % 4 else {"temperature": 0.8, "seed": i, "top_p": 0.9}))
              for i in range(N_PROMPTS)]
    return prompts, params


@pytest.fixture(scope="module")
def expected(tiny: LoadedModel) -> list[list[int]]:
    return outputs(build("nocache", tiny), *random_prompts(tiny.config.vocab_size))


def test_the_reference_is_worth_comparing_with(expected: list[list[int]]) -> None:
    """Output that is one repeated token, or the same for every prompt, would hide any fault."""
    varied = [tokens for tokens in expected if len(tokens) >= 6]
    assert sum(len(set(tokens)) >= 3 for tokens in varied) > 0.8 * len(varied)
    assert len({tuple(tokens[:3]) for tokens in varied}) > 0.8 * len(varied)


@pytest.mark.parametrize("row", rows(but_first=True))
def test_tier_a_tokens_are_identical(row: str, tiny: LoadedModel, expected: list[list[int]]) -> None:
    prompts, params = random_prompts(tiny.config.vocab_size)
    got = outputs(build(row, tiny), prompts, params)
    wrong = [i for i in range(N_PROMPTS) if got[i] != expected[i]]
    assert not wrong, f"{len(wrong)} of {N_PROMPTS} prompts differ, first prompt {wrong[0]}"


PAGED = [pytest.param("paged", {"num_blocks": 53}, marks=pytest.mark.ch04),
         pytest.param("paged-b4", {"num_blocks": 53}, marks=pytest.mark.ch05),
         pytest.param("paged-b32", {"num_blocks": 212}, marks=pytest.mark.ch05)]


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize(("row", "pool"), PAGED)
def test_tier_a_at_other_block_sizes_and_in_tight_pools(
        row: str, pool: dict, block_size: int, tiny: LoadedModel, expected: list[list[int]]) -> None:
    """The smallest pool that holds the longest request, or four of them; its invariant after each step."""
    prompts, params = random_prompts(tiny.config.vocab_size)
    blocks = -(-pool["num_blocks"] // block_size)
    engine = build(row, tiny, block_size=block_size, num_blocks=blocks)
    requests = [Request(str(i), p, s) for i, (p, s) in enumerate(zip(prompts, params, strict=True))]
    for request in requests:
        engine.add(request)
    while engine.has_unfinished():
        assert not any(event.error for event in engine.step())
        engine.cache.check()
    wrong = [i for i, request in enumerate(requests) if request.output_token_ids != expected[i]]
    assert not wrong, f"{len(wrong)} of {N_PROMPTS} prompts differ, first prompt {wrong[0]}"
    assert engine.cache.pool.num_free == blocks == engine.pool_size.num_blocks
    assert engine.counters.blocks_peak > 0.8 * blocks, "the pool was not tight"


@pytest.mark.ch05
@pytest.mark.parametrize("row", ["eager-b4", "native-eager-b4", "paged-b4", "paged-b32"])
def test_tier_a_whatever_the_order_of_a_batch(row: str, tiny: LoadedModel, expected: list[list[int]]) -> None:
    prompts, params = random_prompts(tiny.config.vocab_size)
    for seed in (1, 2):
        order = random.Random(seed).sample(range(N_PROMPTS), N_PROMPTS)[:80]
        got = outputs(build(row, tiny), [prompts[i] for i in order], [params[i] for i in order])
        assert got == [expected[i] for i in order]


@pytest.mark.parametrize("row", rows(but_first=True))
def test_tier_b_on_a_few_real_prompts(row: str, smol: LoadedModel) -> None:
    """The first 2 of the stored prompts, step by step; `make soak` runs all of them."""
    reference = tier_b.load()[:2]
    tier_b.check(reference, tier_b.generate(row, smol, reference))


@pytest.mark.slow
@pytest.mark.parametrize("row", rows(but_first=True))
def test_tier_b_on_all_real_prompts(row: str, smol: LoadedModel) -> None:
    reference = tier_b.load()
    assert len(reference) >= 20 and all(len(item["token_ids"]) == 64 for item in reference)
    tier_b.check(reference, tier_b.generate(row, smol, reference))


@pytest.mark.slow
def test_the_stored_reference_is_what_rung_1_says(smol: LoadedModel) -> None:
    stored, fresh = tier_b.load(), tier_b.make(smol)
    assert [item["prompt"] for item in stored] == [item["prompt"] for item in fresh]
    tier_b.check(stored, [item["token_ids"] for item in fresh])


@pytest.mark.ch03
def test_all_stored_tokens_in_one_pass(smol: LoadedModel) -> None:
    """Every stored prompt with its 64 tokens, fed at once: our packed forward picks the same token at each place."""
    reference, engine = tier_b.load(), build("native-packed", smol)
    got = [tier_b.teacher_forced(engine, item["prompt_token_ids"], item["token_ids"]) for item in reference]
    tier_b.check(reference, got)


def test_the_rule_of_tier_b_itself() -> None:
    def stored(gap: float) -> list[dict]:
        return [{"prompt": "p", "token_ids": [1, 2, 3], "gaps": [5.0, gap, 5.0]}] + [
            {"prompt": str(i), "token_ids": [1], "gaps": [5.0]} for i in range(19)]

    same = [[1]] * 19
    assert tier_b.check(stored(5.0), [[1, 2, 3], *same]) == 0
    assert tier_b.check(stored(5e-4), [[1, 9, 9], *same]) == 1
    with pytest.raises(AssertionError, match=r"gap 0\.5"):
        tier_b.check(stored(0.5), [[1, 9, 9], *same])
    with pytest.raises(AssertionError, match="2 of 3"):
        tier_b.check(stored(5.0)[:1], [[1, 2]])
    near = [{"prompt": str(i), "token_ids": [1], "gaps": [1e-6]} for i in range(20)]
    with pytest.raises(AssertionError, match="2 of 20 prompts"):
        tier_b.check(near, [[2], [2], *[[1]] * 18])


def test_stored_prompts_are_the_shipped_ones() -> None:
    shipped = json.loads(tier_b.PROMPTS.read_text())
    assert [item["prompt"] for item in tier_b.load()] == shipped
    assert torch.tensor([item["gaps"] for item in tier_b.load()]).min() >= 0
