"""The engine with a prefix cache: the same words, less computed, nothing shared that is not really there."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from liteinfer.engines.continuous import ContinuousEngine, NoDrafter
from liteinfer.llm import LLM
from liteinfer.loading import LoadedModel
from liteinfer.radix_manager import RadixManager
from liteinfer.request import Request, SamplingParams
from tests.conftest import build, outputs
from tests.scripted import check, drain, expected, script_engine, scripted
from tests.test_continuous import Oracle

pytestmark = pytest.mark.ch07


def radix_engine(**settings: object) -> ContinuousEngine:
    return script_engine(kv_manager=RadixManager, **({"block_size": 4, "num_blocks": 64} | settings))


def ask(engine: ContinuousEngine, name: str, prompt: list[int], max_tokens: int = 3,
        salt: str | None = None) -> Request:
    """Run one request to its end on the scripted model."""
    request = Request(name, prompt, SamplingParams(max_tokens=max_tokens), cache_salt=salt)
    engine.add(request)
    drain(engine)
    assert request.output_token_ids == expected(request)
    return request


def overlapping(rng: random.Random, n: int) -> list[list[int]]:
    """Prompts that grow out of one another."""
    prompts = [[rng.randrange(64) for _ in range(rng.randint(1, 30))]]
    while len(prompts) < n:
        old = rng.choice(prompts)
        prompts.append(old[:rng.randint(0, len(old))] + [rng.randrange(64) for _ in range(rng.randint(1, 12))])
    return prompts


# --- equality -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [
    {"block_size": 4, "num_blocks": 400}, {"block_size": 4, "num_blocks": 24, "watermark": 0.0},
    {"block_size": 1, "num_blocks": 96, "max_prefill_chunk": 3}, {"block_size": 16, "num_blocks": 12}],
    ids=["ample", "tight", "single slots", "large blocks"])
def test_tier_a_over_overlapping_prompts(settings: dict, tiny: LoadedModel) -> None:
    """With eviction and preemption where the pool is tight; every prompt also twice in the same step."""
    rng = random.Random(5)
    prompts = [p for p in overlapping(rng, 50) for _ in range(2)]
    params = [SamplingParams(max_tokens=rng.randint(1, 10), **({} if i % 3 else {"temperature": 0.8, "seed": i}))
              for i in range(len(prompts))]
    want = outputs(build("nocache", tiny), prompts, params)
    engine = build("radix", tiny, max_num_seqs=8, max_num_batched_tokens=64, **settings)
    requests = [Request(str(i), p, s) for i, (p, s) in enumerate(zip(prompts, params, strict=True))]
    for each in requests:
        engine.add(each)
    while engine.has_unfinished():
        assert not any(event.error for event in engine.step())
        engine.scheduler.kv.check()
    wrong = [i for i, each in enumerate(requests) if each.output_token_ids != want[i]]
    assert not wrong, f"{len(wrong)} of {len(requests)} differ, first {wrong[0]}"
    counters = engine.counters
    assert counters.prefix_hit_tokens > 50
    assert counters.prefix_hit_tokens == sum(each.num_cached_tokens for each in requests)
    assert counters.prompt_tokens == sum(map(len, prompts))
    if settings["num_blocks"] == 24:
        assert counters.preemptions > 0
    assert engine.cache.pool.num_used == engine.scheduler.kv.tree.num_evictable
    engine.scheduler.kv.reset()
    assert engine.cache.pool.num_used == 0


def test_a_hit_with_the_same_chunk_boundaries_is_bitwise_equal(tiny_llama: LoadedModel) -> None:
    """A prompt of 16 + 5 in chunks of 16 and 5 without a cache; then the 5 alone on what is cached."""
    prompt, seen = [(7 * i) % 64 for i in range(21)], {}
    for name, warm in (("cold", []), ("hit", [*prompt[:16], 63])):
        engine = build("radix", tiny_llama, num_blocks=16, max_num_seqs=4, max_prefill_chunk=16)
        if warm:
            outputs(engine, [warm], SamplingParams(max_tokens=1))
        rows, logits_of = [], engine.llama.logits

        def noting(hidden: torch.Tensor, rows=rows, logits_of=logits_of) -> torch.Tensor:
            rows.append(logits_of(hidden).clone())
            return rows[-1]

        engine.llama.logits = noting
        try:
            outputs(engine, [prompt], SamplingParams(max_tokens=8))
        finally:
            del engine.llama.logits
        seen[name] = [row for row in rows if len(row)]
    assert len(seen["cold"]) == len(seen["hit"]) == 8
    assert all(torch.equal(a, b) for a, b in zip(seen["cold"], seen["hit"], strict=True))


# --- the cases ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [4, 8, 16])
def test_x1_a_wholly_cached_prompt_still_computes_a_token(length: int, tiny_llama: LoadedModel) -> None:
    prompt = [(5 * i) % 64 for i in range(length)]
    want = outputs(build("nocache", tiny_llama), [prompt], SamplingParams(max_tokens=5))
    engine = build("radix", tiny_llama, block_size=4, num_blocks=32)
    assert outputs(engine, [prompt], SamplingParams(max_tokens=5)) == want
    blocks = engine.scheduler.kv.tree.match(prompt).blocks
    before = engine.cache.keys[:, blocks].clone()
    computed = engine.counters.tokens_computed
    request = Request("again", list(prompt), SamplingParams(max_tokens=5))
    engine.add(request)
    while engine.has_unfinished():
        engine.step()
    assert [request.output_token_ids] == want
    assert request.num_cached_tokens == length - 4 <= len(prompt) - 1
    assert engine.counters.tokens_computed - computed == 4 + 4
    torch.testing.assert_close(engine.cache.keys[:, blocks], before, rtol=0, atol=1e-6)


def test_x2_a_block_used_again_is_not_found_under_its_old_ids() -> None:
    engine = radix_engine(num_blocks=4)
    first = [1, 2, 3, 4, 5, 6, 7, 8]
    ask(engine, "p", first)
    for i in range(3):
        ask(engine, f"other{i}", [10 + i] * 12)
    assert ask(engine, "again", first).num_cached_tokens == 0


def test_x3_and_x7_twins_in_one_step_and_a_third_after_them() -> None:
    engine, prompt = radix_engine(num_blocks=12), [(3 * i) % 64 for i in range(9)]
    twins = [Request(name, list(prompt), SamplingParams(max_tokens=6)) for name in ("one", "two")]
    for each in twins:
        engine.add(each)
    engine.step()
    check(engine)
    assert [each.num_cached_tokens for each in twins] == [0, 0], "nothing was computed when they were admitted"
    engine.add(third := Request("third", [9] * 10, SamplingParams(max_tokens=4)))
    engine.add(late := Request("late", list(prompt), SamplingParams(max_tokens=4)))
    drain(engine)
    assert all(each.output_token_ids == expected(each) for each in (*twins, third, late))
    assert third.num_cached_tokens == 0 and late.num_cached_tokens == 8


def test_x8_a_partly_filled_block_is_not_shared() -> None:
    engine = radix_engine()
    a = Request("a", [1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=10))
    engine.add(a)
    engine.step()
    engine.add(b := Request("b", [1, 2, 3, 4, 5, 7], SamplingParams(max_tokens=3)))
    engine.step()
    shared = set(engine.cache.tables["a"]) & set(engine.cache.tables["b"])
    assert shared == {engine.cache.tables["a"][0]} and b.num_cached_tokens == 4
    drain(engine)
    assert a.output_token_ids == expected(a) and b.output_token_ids == expected(b)


def test_x10_ids_are_compared_there_is_no_hash_to_collide(tiny_llama: LoadedModel) -> None:
    class Same(int):
        """A token id whose hash is that of every other."""

        def __hash__(self) -> int:
            return 7

    engine = build("radix", tiny_llama, block_size=4, num_blocks=64)
    plain = [[1, 2, 3, 4, 5, 6], [4, 3, 2, 1, 5, 6], [1, 2, 3, 5, 5, 6]]
    prompts: list[list[int]] = [[Same(i) for i in prompt] for prompt in plain]
    want = outputs(build("nocache", tiny_llama), plain, SamplingParams(max_tokens=5))
    for prompt, tokens in zip(prompts, want, strict=True):
        assert outputs(engine, [prompt], SamplingParams(max_tokens=5)) == [tokens]
    assert engine.counters.prefix_hit_tokens == 0


def test_x11_tenants_do_not_see_each_others_prompts() -> None:
    engine, prompt = radix_engine(), list(range(16))
    cached = [ask(engine, f"r{i}", list(prompt), salt=salt).num_cached_tokens
              for i, salt in enumerate(["a", "a", "b", "b", None, None])]
    assert cached == [0, 12, 0, 12, 0, 12]


@pytest.mark.parametrize("drafter", [None, Oracle(3, 1)], ids=["plain", "always wrong drafts"])
def test_x12_the_unwritten_last_token_and_refused_drafts_are_not_published(drafter: Oracle | None) -> None:
    """4 + 4 tokens, 7 of them stored: one whole block."""
    engine = radix_engine(drafter=NoDrafter if drafter is None else lambda engine: drafter)
    first = ask(engine, "first", [1, 2, 3, 4], max_tokens=4)
    again = ask(engine, "again", [*first.token_ids, 9], max_tokens=4)
    assert again.num_cached_tokens == 4


def test_a_middle_chunk_is_found_as_soon_as_it_is_written() -> None:
    engine = radix_engine(max_prefill_chunk=8, max_num_batched_tokens=32)
    prompt = [(3 * i) % 64 for i in range(30)]
    engine.add(first := Request("first", list(prompt), SamplingParams(max_tokens=3)))
    engine.step()
    engine.add(second := Request("second", list(prompt), SamplingParams(max_tokens=3)))
    engine.step()
    assert second.num_cached_tokens == 8
    drain(engine)
    assert first.output_token_ids == expected(first) and second.output_token_ids == expected(second)


def test_eviction_comes_before_preemption() -> None:
    engine = radix_engine(num_blocks=12, watermark=0.0)
    for i in range(4):
        ask(engine, f"old{i}", [i] * 9)
    assert engine.cache.pool.num_free == 4
    requests = [Request(f"n{i}", [20 + i] * 8, SamplingParams(max_tokens=9)) for i in range(3)]   # 4 blocks each
    for each in requests:
        engine.add(each)
    drain(engine)
    assert engine.counters.preemptions == 0
    assert all(each.output_token_ids == expected(each) for each in requests)


def test_a_preempted_request_finds_its_blocks_again_and_counts_once() -> None:
    engine = radix_engine(num_blocks=7, watermark=0.0)
    requests = [Request(name, [ord(name) % 64] * 8, SamplingParams(max_tokens=12)) for name in "ab"]
    for each in requests:
        engine.add(each)
    drain(engine)
    counters = engine.counters
    assert counters.preemptions > 0
    assert all(each.output_token_ids == expected(each) for each in requests)
    assert counters.prompt_tokens == 16 and counters.prefix_hit_tokens == 0, "only first-time prompt tokens count"
    again = counters.tokens_computed - 2 * (8 + 11)
    assert 0 < again < 8 * counters.preemptions, "most of what was preempted was still there"


def test_aborted_requests_leave_only_what_was_written() -> None:
    engine, prompt = radix_engine(max_prefill_chunk=6, max_num_batched_tokens=32), [(3 * i) % 64 for i in range(20)]
    engine.add(Request("gone", list(prompt), SamplingParams(max_tokens=3)))
    engine.step()
    engine.abort("gone")
    check(engine)
    assert ask(engine, "next", prompt).num_cached_tokens == 4      # 6 computed: one whole block
    engine.runner.before = lambda chunks: engine.abort("mid")
    engine.add(Request("mid", [50] * 8, SamplingParams(max_tokens=3)))
    engine.step()
    engine.runner.before = None
    check(engine)
    assert ask(engine, "after", [50] * 8).num_cached_tokens == 0


def test_a_pass_that_fails_publishes_nothing() -> None:
    engine = radix_engine()

    def fail(chunks) -> None:
        engine.runner.before = None
        raise RuntimeError("broke")

    engine.runner.before = fail
    engine.add(Request("bad", [5] * 12, SamplingParams(max_tokens=2)))
    engine.step()
    assert ask(engine, "good", [5] * 12).num_cached_tokens == 0


def test_the_completion_says_how_much_was_cached(tiny_llama: LoadedModel) -> None:
    llm = LLM(tiny_llama, row="radix")
    prompt = [(5 * i) % 64 for i in range(40)]
    told = [llm.generate(prompt, SamplingParams(max_tokens=2))[0].num_cached_tokens for _ in range(2)]
    assert told == [0, 32]
    assert LLM(tiny_llama, row="continuous").generate(prompt)[0].num_cached_tokens == 0


# --- random traffic ---------------------------------------------------------------------------------------------------


def random_run(seed: int) -> Counter:
    rng = random.Random(seed)
    seqs = rng.randint(1, 6)
    budget = rng.randint(seqs, seqs + 16)
    oracle = Oracle(rng.randint(1, 3), rng.randint(1, 4))
    engine = radix_engine(block_size=rng.choice([1, 2, 4, 8]), num_blocks=rng.randint(8, 50), max_num_seqs=seqs,
                          max_num_batched_tokens=budget, max_prefill_chunk=rng.choice([None, rng.randint(1, budget)]),
                          watermark=rng.choice([0.0, 0.01, 0.2]),
                          drafter=rng.choice([NoDrafter, NoDrafter, lambda engine: oracle]))
    waiting = [Request(f"r{i}", prompt, SamplingParams(max_tokens=rng.randint(1, 12)),
                       cache_salt=rng.choice([None, None, "a"]))
               for i, prompt in enumerate(overlapping(rng, rng.randint(2, 10)))]
    accepted, aborted, steps = list[Request](), set[str](), 0
    while waiting or engine.has_unfinished():
        while waiting and rng.random() < 0.5:
            try:
                engine.add(waiting[0])
                accepted.append(waiting[0])
            except ValueError:
                pass
            waiting.pop(0)
        if accepted and rng.random() < 0.05:
            victim = rng.choice(accepted).request_id
            aborted |= {victim} if engine._find(victim) else set()
            engine.abort(victim)
        assert not any(event.error for event in engine.step())
        check(engine)
        steps += 1
        assert steps < 3000
    for each in accepted:
        whole = expected(each)
        assert each.output_token_ids == (whole[:len(each.output_token_ids)] if each.request_id in aborted else whole)
    engine.scheduler.kv.reset()
    assert engine.cache.pool.num_used == 0
    return Counter(hits=engine.counters.prefix_hit_tokens, preempted=engine.counters.preemptions,
                   drafted=isinstance(engine.drafter, Oracle), aborted=len(aborted))


def test_300_random_schedules_of_overlapping_prompts() -> None:
    """The scripted model looks at every slot a request attends to: was it written for these very tokens?"""
    happened = Counter()
    for seed in range(300):
        try:
            happened += random_run(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert happened["hits"] > 1000 and happened["preempted"] > 20 and happened["drafted"] > 50, happened


def test_the_scripted_model_would_see_a_block_that_is_not_the_requests_own() -> None:
    engine = radix_engine()
    engine.add(Request("a", [1, 2, 3, 4, 5], SamplingParams(max_tokens=4)))
    engine.step()
    engine.runner.written[engine.cache.tables["a"][0] * 4] = 0
    events = engine.step()
    assert "position 0 of a was overwritten" in str(events[0].error)
    assert scripted("a", 4) == expected(Request("a", [1, 2, 3, 4, 5], SamplingParams(max_tokens=1)))[0]
