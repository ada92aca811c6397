"""The scheduler on the scripted model: who runs, who waits, who is thrown out and comes back."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from liteinfer.request import SamplingParams
from liteinfer.scheduler import SchedulerConfig
from tests.scripted import RandomRunner, check, drain, expected, request, script_engine

pytestmark = pytest.mark.ch06


@pytest.mark.parametrize(("settings", "words"), [
    ({"max_num_seqs": 0}, ["max_num_seqs", "0"]),
    ({"max_num_batched_tokens": 0}, ["max_num_batched_tokens", "0"]),
    ({"max_prefill_chunk": 0}, ["max_prefill_chunk", "0"]),
    ({"max_num_seqs": True}, ["max_num_seqs", "True"]),
    ({"max_num_batched_tokens": 8.0}, ["max_num_batched_tokens", "8.0"]),
    ({"max_num_batched_tokens": 32, "max_prefill_chunk": 33}, ["max_prefill_chunk 33", "max_num_batched_tokens 32"]),
    ({"max_num_seqs": 33, "max_num_batched_tokens": 32}, ["max_num_seqs 33", "max_num_batched_tokens 32"]),
    ({"watermark": 1.0}, ["watermark", "1.0"]),
    ({"watermark": -0.1}, ["watermark", "-0.1"]),
])
def test_s13_settings_that_contradict_each_other_are_refused_at_construction(settings: dict, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        SchedulerConfig(**settings)
    assert all(word in str(caught.value) for word in words), caught.value
    with pytest.raises(ValueError):
        script_engine(**settings)


def test_s13_a_block_size_of_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"block_size.*0"):
        script_engine(block_size=0)


def test_s1_what_can_never_fit_is_refused_and_the_next_one_runs() -> None:
    """4 x 8 slots. By the documented rule, prompt + max_tokens - 1 must fit: the last token is never stored."""
    engine = script_engine(block_size=4, num_blocks=8, max_model_len=128)
    both = r"40 prompt tokens \+ max_tokens 5 need 11 KV blocks of 4 tokens, the pool has 8"
    with pytest.raises(ValueError, match=both):
        engine.add(request("long", 40, 5))
    with pytest.raises(ValueError, match=r"20 prompt tokens \+ max_tokens 40 need 15 KV blocks"):
        engine.add(request("grows", 20, 40))
    small = request("small", 5, 5)
    engine.add(small)
    engine.add(exact := request("exact", 20, 13))
    drain(engine)
    assert small.output_token_ids == expected(small) and exact.output_token_ids == expected(exact)


@pytest.mark.parametrize("prompt", [15, 16, 17, 33])
def test_s2_a_prompt_longer_than_the_budget_is_split(prompt: int) -> None:
    engine = script_engine(max_num_batched_tokens=16, max_num_seqs=4)
    engine.add(r := request("r", prompt, 3))
    drain(engine)
    assert r.output_token_ids == expected(r)
    assert engine.counters.forward_passes == -(-prompt // 16) + 2
    assert engine.counters.tokens_computed == prompt + 2


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "seed": 7}], ids=["greedy", "seeded"])
def test_s3_the_middle_of_a_prompt_is_not_sampled(params: dict) -> None:
    outputs = []
    for chunk in (1, 3, 4, 10, 16):
        engine = script_engine(RandomRunner, max_prefill_chunk=chunk)
        engine.add(r := request("r", 10, 6, **params))
        first = 0
        while not r.output_token_ids:
            engine.step()
            first += 1
        assert first == -(-10 // chunk), "the first token comes with the last chunk, not before"
        drain(engine)
        outputs.append(r.output_token_ids)
    assert outputs[0] == outputs[1] == outputs[2] == outputs[3] == outputs[4] and len(outputs[0]) == 6


def test_s4_nothing_is_lost_or_doubled_by_a_preemption() -> None:
    engine = script_engine(block_size=4, num_blocks=6)
    requests = [request(name, 8, 10) for name in "ab"]
    for r in requests:
        engine.add(r)
    events = drain(engine)
    assert engine.counters.preemptions >= 1
    for r in requests:
        assert r.output_token_ids == expected(r)
        assert [t for e in events if e.request_id == r.request_id for t in e.token_ids] == expected(r)


def test_s7_two_half_prefilled_prompts_that_need_each_others_blocks() -> None:
    engine = script_engine(block_size=4, num_blocks=8, max_prefill_chunk=8, max_num_batched_tokens=32)
    requests = [request(name, 20, 2) for name in "ab"]
    for r in requests:
        engine.add(r)
    drain(engine, limit=40)
    assert all(r.output_token_ids == expected(r) for r in requests)


def test_s11_a_chunk_that_finds_the_pool_full_costs_nobody_their_request() -> None:
    """Two decoding requests take the last blocks when a prompt of 16 has come half way."""
    engine = script_engine(block_size=4, num_blocks=12, max_prefill_chunk=4, max_num_batched_tokens=16, watermark=0.0)
    requests = [request("a", 14, 11), request("b", 14, 11)]
    for r in requests:
        engine.add(r)
    for _ in range(4):
        engine.step()
    engine.add(late := request("late", 16, 2))
    events = drain(engine)
    assert engine.counters.preemptions >= 1
    assert not any(e.error for e in events)
    assert all(r.output_token_ids == expected(r) for r in (*requests, late))


def test_s12_a_decoding_request_gets_a_token_at_every_step_of_a_long_prefill() -> None:
    engine = script_engine(max_prefill_chunk=16, max_num_batched_tokens=17, max_num_seqs=2)
    engine.add(decoding := request("decoding", 3, 40))
    engine.step()
    engine.add(long := request("long", 200, 2))
    steps = 0
    while not long.output_token_ids:
        events = {e.request_id: e for e in engine.step()}
        assert len(events["decoding"].token_ids) == 1
        steps += 1
    assert steps == -(-200 // 16)
    drain(engine)
    assert decoding.output_token_ids == expected(decoding)


def test_s12_also_when_the_long_prompt_came_first() -> None:
    """The older request takes the budget first, but never the last token of a younger one that runs."""
    engine = script_engine(max_prefill_chunk=4, max_num_batched_tokens=8, max_num_seqs=4)
    engine.add(long := request("long", 60, 2))
    engine.add(young := request("young", 4, 30))
    engine.add(second := request("second", 4, 30))
    while not long.output_token_ids:
        before = [len(r.output_token_ids) for r in (young, second)]
        started = [r in engine.scheduler.running and bool(r.output_token_ids) for r in (young, second)]
        engine.step()
        after = [len(r.output_token_ids) for r in (young, second)]
        assert all(a == b + 1 for a, b, s in zip(after, before, started, strict=True) if s)
    assert young.output_token_ids, "it ran beside the long prefill"


def test_s12_drafts_leave_every_younger_request_its_token() -> None:
    engine = script_engine(max_num_batched_tokens=5, max_num_seqs=3)
    for name in "abc":
        engine.add(request(name, 1, 30))
    engine.step()
    plan = engine.scheduler.schedule({"a": range(8), "b": range(8)})
    assert {c.request.request_id: (c.num_tokens, c.draft) for c in plan.chunks} == {
        "a": (3, (0, 1)), "b": (1, ()), "c": (1, ())}


def test_first_come_first_served_and_one_budget() -> None:
    """The docstring's example: budget 8; A decodes, B catches up, C waits for what is left."""
    engine = script_engine(max_num_batched_tokens=8, max_num_seqs=3, block_size=4, num_blocks=16)
    a, b, c = request("a", 5, 4), request("b", 11, 4), request("c", 3, 4)
    engine.add(a)
    engine.add(b)
    engine.step()            # A 5, B 3
    assert (a.num_computed_tokens, b.num_computed_tokens) == (5, 3)
    engine.add(c)
    plan = engine.scheduler.schedule()
    assert [(p.request.request_id, p.start, p.num_tokens, p.num_logits) for p in plan.chunks] == [
        ("a", 5, 1, 1), ("b", 3, 7, 0)]
    assert plan.num_tokens == 8 and not plan.admitted and not plan.preempted


def test_the_youngest_is_preempted_and_comes_back_first() -> None:
    engine = script_engine(block_size=1, num_blocks=14, watermark=0.0)
    requests = [request(name, 4, 8) for name in "abcd"]
    for r in requests:
        engine.add(r)
    seen = []
    while engine.has_unfinished():
        before = [r.request_id for r in engine.scheduler.running]
        engine.step()
        check(engine)
        order = [r.request_id for r in (*engine.scheduler.running, *engine.scheduler.waiting)]
        assert order == sorted(order), "arrival order is kept through preemption"
        gone = [name for name in before if name not in order]
        seen += gone
    assert engine.counters.preemptions > 0
    assert seen == ["a", "b", "c", "d"]
    assert all(r.output_token_ids == expected(r) for r in requests)


def test_the_watermark_keeps_room_for_those_who_run() -> None:
    """10 blocks of 4. A takes its third, B needs 7: it fits, but then nothing is left to grow into."""
    for watermark, preemptions in ((0.0, 1), (0.2, 0)):
        engine = script_engine(block_size=4, num_blocks=10, watermark=watermark)
        engine.add(a := request("a", 8, 12))
        engine.step()
        engine.add(b := request("b", 28, 2))
        drain(engine)
        assert engine.counters.preemptions == preemptions
        assert a.output_token_ids == expected(a) and b.output_token_ids == expected(b)


def test_a_stolen_pool_is_the_error_of_the_request_that_asked() -> None:
    engine = script_engine(block_size=4, num_blocks=8)
    engine.add(a := request("a", 8, 20))
    engine.step()
    stolen = engine.cache.pool.allocate(6)
    engine.add(b := request("b", 2, 2))
    events = []
    while engine.has_unfinished():
        events += engine.step()
    errors = {e.request_id: e.error for e in events if e.error}
    assert errors == {"a": "OutOfBlocks: 3 KV blocks needed, 2 of 8 are free and nothing runs"}
    assert a.output_token_ids == expected(a)[:1]
    assert b.output_token_ids == expected(b)
    engine.cache.pool.free(stolen)
    engine.cache.pool.check([])


# --- random schedules --------------------------------------------------------------------------------------------


def random_run(seed: int) -> Counter:
    """A random engine under random traffic; every invariant after every step. Returns what happened."""
    rng = random.Random(seed)
    block_size, seqs = rng.choice([1, 2, 4, 8]), rng.randint(1, 6)
    budget = rng.randint(seqs, seqs + 16)
    engine = script_engine(
        block_size=block_size, num_blocks=rng.randint(4, 40), max_num_seqs=seqs, max_num_batched_tokens=budget,
        max_prefill_chunk=rng.choice([None, rng.randint(1, budget)]), watermark=rng.choice([0.0, 0.01, 0.2]))
    todo = [request(f"r{i}", rng.randint(1, 20), rng.randint(1, 12),
                    stop_token_ids=tuple(rng.sample(range(64), rng.choice([0, 0, 4]))))
            for i in range(rng.randint(1, 10))]
    happened, accepted, aborted, steps = Counter(), [], set(), 0
    due: dict[str, int] = {}       # the step by which a request must have its first token
    while todo or engine.has_unfinished():
        while todo and rng.random() < 0.5:
            r = todo.pop(0)
            try:
                engine.add(r)
            except ValueError:
                needed = engine.cache.pool.blocks_for(r.num_tokens + r.params.max_tokens - 1)
                assert needed > engine.cache.pool.num_blocks
                happened["refused"] += 1
                continue
            ahead = [*engine.scheduler.running, *engine.scheduler.waiting]
            due[r.request_id] = steps + sum(len(o.prompt_token_ids) + o.params.max_tokens for o in ahead)
            accepted.append(r)
        if rng.random() < 0.05 and accepted:
            victim = rng.choice(accepted)
            if engine._find(victim.request_id):
                aborted.add(victim.request_id)
            engine.abort(victim.request_id)
        for event in engine.step():
            assert event.error is None
        steps += 1
        check(engine)
        late = [r.request_id for r in accepted if r.request_id not in aborted and not r.output_token_ids
                and steps > due[r.request_id]]
        assert not late, f"{late} starve: no first token after {steps} steps"
        assert steps < 3000
    engine.scheduler.kv.check()
    assert engine.cache.pool.num_used == 0
    for r in accepted:
        whole = expected(r)
        assert r.output_token_ids == (whole[:len(r.output_token_ids)] if r.request_id in aborted else whole)
    happened.update(preempted=engine.counters.preemptions, aborted=len(aborted), accepted=len(accepted))
    return happened


@pytest.mark.parametrize("part", range(4))
def test_1000_random_schedules_break_no_invariant(part: int) -> None:
    """Arrivals, lengths, budgets, pools, stops and aborts at random.

    The stated bound: the oldest request never loses its blocks and gets at least one token a step, so
    a request's first token comes within as many steps as the requests before it, and it, have tokens.
    """
    happened = Counter()
    for seed in range(part * 250, part * 250 + 250):
        try:
            happened += random_run(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert happened["preempted"] > 50 and happened["aborted"] > 20 and happened["accepted"] > 500, happened


@pytest.mark.parametrize("neighbours", [[], [SamplingParams(max_tokens=9)],
                                        [SamplingParams(max_tokens=5, temperature=1.0, seed=1),
                                         SamplingParams(max_tokens=20, temperature=0.5)]])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_m2_a_seeded_request_depends_on_nothing_else(neighbours: list, place: int) -> None:
    """Alone, beside others, in another row, after preemption: the same ids."""
    alone = script_engine(RandomRunner)
    alone.add(r := request("seeded", 6, 16, temperature=0.8, seed=42))
    drain(alone)
    want = r.output_token_ids
    engine = script_engine(RandomRunner, block_size=2, num_blocks=18, watermark=0.0)
    queue = [request(f"n{i}", 5, params.max_tokens, temperature=params.temperature, seed=params.seed)
             for i, params in enumerate(neighbours)]
    queue.insert(place, again := request("seeded", 6, 16, temperature=0.8, seed=42))
    for each in queue:
        engine.add(each)
    drain(engine)
    assert again.output_token_ids == want
    if len(neighbours) == 2:
        assert engine.counters.preemptions > 0
