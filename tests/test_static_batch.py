"""Static batches: each request's words are its own, whoever sits beside it, and its place is freed when it ends."""

from __future__ import annotations

import pytest
import torch

from liteinfer.engines.base import Engine
from liteinfer.engines.static_batch import pad_left, positions_of
from liteinfer.loading import LoadedModel, tiny_model
from liteinfer.request import Request, SamplingParams
from tests.conftest import build, outputs

pytestmark = pytest.mark.ch05
BATCHED = ["eager-b4", "native-eager-b4", "paged-b4", "paged-b32"]
LENGTHS_3_7_12 = [[7, 3, 51], [20, 20, 9, 44, 1, 62, 15], [33, 8, 5, 6, 7, 8, 1, 2, 3, 4, 60, 61]]


def run_steps(engine: Engine, requests: list[Request]) -> list[list]:
    """The events of every step."""
    for request in requests:
        engine.add(request)
    steps = []
    while engine.has_unfinished():
        steps.append(engine.step())
    return steps


@pytest.mark.parametrize("extra", [0, 5, 20])
def test_b1_padding_of_any_amount_changes_nothing(extra: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from liteinfer.engines import static_batch

    model = tiny_model("llama")
    expected = outputs(build("nocache", model), LENGTHS_3_7_12, SamplingParams(max_tokens=8))
    monkeypatch.setattr(static_batch, "pad_left", lambda rows, device: pad_left(rows, device, extra))
    engine = build("eager-b4", model)
    assert outputs(engine, LENGTHS_3_7_12, SamplingParams(max_tokens=8)) == expected
    assert engine.counters.tokens_computed == 3 * (12 + extra) + 3 * 7, "padding is computed like any token"


def test_positions_count_real_tokens_only() -> None:
    ids, mask = pad_left([[5, 6, 7, 8], [9], [1, 2]], torch.device("cpu"), extra=1)
    assert ids.tolist() == [[0, 5, 6, 7, 8], [0, 0, 0, 0, 9], [0, 0, 0, 1, 2]]
    assert mask.tolist() == [[0, 1, 1, 1, 1], [0, 0, 0, 0, 1], [0, 0, 0, 1, 1]]
    assert positions_of(mask).tolist() == [[0, 0, 1, 2, 3], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]]


@pytest.mark.parametrize("row", BATCHED)
def test_b3_a_row_with_one_real_token_among_seven_of_padding(row: str) -> None:
    model = tiny_model("llama")
    prompts = [[5], [1, 2, 3, 4, 5, 6, 7, 8]]
    expected = outputs(build("nocache", model), prompts, SamplingParams(max_tokens=6))
    engine, finite = build(row, model), []
    logits_of = engine.next_logits

    def noting(requests: list[Request]) -> torch.Tensor:
        logits = logits_of(requests)
        finite.append(bool(logits.isfinite().all()))
        if row == "eager-b4":   # the keys of the padding too: masked they may be, NaN they must not be
            finite.append(all(bool(layer.keys.isfinite().all() and layer.values.isfinite().all())
                              for layer in engine.cache.layers))
        return logits

    engine.next_logits = noting
    assert outputs(engine, prompts, SamplingParams(max_tokens=6)) == expected
    assert finite and all(finite)


@pytest.mark.parametrize("row", ["eager-b4", "native-eager-b4", "paged-b4"])
def test_b4_real_end_tokens_in_a_prompt_are_seen(row: str, smol: LoadedModel) -> None:
    """SmolLM2's padding token is its EOS: a two-turn chat holds real ones."""
    chat = smol.encode_chat([{"role": "user", "content": "Name a colour."}, {"role": "assistant", "content": "Blue."},
                             {"role": "user", "content": "Another."}])
    assert smol.tokenizer.pad_token_id == smol.config.eos_token_ids[0] and chat.count(smol.tokenizer.pad_token_id) >= 3
    prompts = [chat, smol.encode("The sky is")]
    expected = outputs(build("nocache", smol), prompts, SamplingParams(max_tokens=6, ignore_eos=True))
    assert outputs(build(row, smol), prompts, SamplingParams(max_tokens=6, ignore_eos=True)) == expected


@pytest.mark.parametrize("row", BATCHED)
@pytest.mark.parametrize("at", [0, 2])
def test_b6_a_finished_row_stops_and_gives_its_place_back(row: str, at: int) -> None:
    prompts = [[4, 5], [9, 44, 1, 62, 15]]
    reference = outputs(build("nocache", tiny_model("llama")), prompts, SamplingParams(max_tokens=20))
    eos = reference[0][at]
    at = reference[0].index(eos)
    model = tiny_model("llama", eos_token_id=eos)
    ends = [Request("0", prompts[0], SamplingParams(max_tokens=20)),
            Request("1", prompts[1], SamplingParams(max_tokens=20, ignore_eos=True))]
    settings = {"block_size": 4, "num_blocks": 16} if row.startswith("paged") else {}
    engine = build(row, model, max_num_seqs=2, **settings)
    for request in ends:
        engine.add(request)
    for step in range(20):
        events = {event.request_id: event for event in engine.step()}
        if step < at:
            assert events["0"].finish_reason is None
        elif step == at:
            assert events["0"].finish_reason == "stop"
        else:
            assert list(events) == ["1"]
        if row.startswith("paged"):
            stored = [0 if step >= at else 2 + step, 0 if step == 19 else 5 + step]
            assert engine.cache.pool.num_used == sum(-(-n // 4) for n in stored)
            engine.cache.check()
        if row == "eager-b4" and at <= step < 19:
            assert engine.cache.layers[0].keys.shape[0] == 1, "the finished row still has its place"
    assert not engine.has_unfinished()
    assert ends[0].output_token_ids == reference[0][:at + 1]
    assert ends[1].output_token_ids == reference[1]
    padded = 6 if row == "eager-b4" else 0   # 2 rows of 5, one of them with 3 of padding
    assert engine.counters.tokens_computed == 2 + 5 + at + 19 + padded // 2
    assert engine.counters.batch_slots == 2 * 20 and engine.counters.idle_slots == 20 - 1 - at


@pytest.mark.parametrize("row", BATCHED)
def test_b7_twelve_prompts_on_three_slots_three_rounds(row: str) -> None:
    model = tiny_model("llama")
    prompts = [[(7 * i + j) % 64 for j in range(1 + i % 5)] for i in range(12)]
    params = [SamplingParams(max_tokens=2 + (5 * i) % 7) for i in range(12)]
    expected = outputs(build("nocache", model), prompts, params)
    engine = build(row, model, max_num_seqs=3)
    for _ in range(3):
        assert outputs(engine, prompts, params) == expected


@pytest.mark.parametrize("row", BATCHED)
def test_a_batch_is_admitted_together_and_the_next_when_the_last_has_ended(row: str, tiny_llama: LoadedModel) -> None:
    lengths = [2, 5, 1, 3, 4]
    requests = [Request(str(i), [10 + i], SamplingParams(max_tokens=n)) for i, n in enumerate(lengths)]
    engine = build(row, tiny_llama, max_num_seqs=2)
    ran = [sorted(event.request_id for event in step) for step in run_steps(engine, requests)]
    assert ran == [["0", "1"]] * 2 + [["1"]] * 3 + [["2", "3"]] + [["3"]] * 2 + [["4"]] * 4
    assert engine.counters.forward_passes == 12
    assert engine.counters.batch_slots == 24 and engine.counters.idle_slots == 24 - sum(lengths)


@pytest.mark.parametrize("row", BATCHED)
def test_s9_abort_and_finish_while_waiting_and_running(row: str, tiny_llama: LoadedModel) -> None:
    prompts = [[4, 5], [6, 7, 8], [9], [10, 11]]
    expected = outputs(build("nocache", tiny_llama), prompts, SamplingParams(max_tokens=6))
    engine = build(row, tiny_llama, max_num_seqs=3)
    requests = [Request(str(i), p, SamplingParams(max_tokens=6)) for i, p in enumerate(prompts)]
    for request in requests:
        engine.add(request)
    engine.step()
    engine.step()
    engine.abort("0")
    engine.abort("3")     # still waiting
    engine.finish("2", 1)
    events = [event for event in engine.step() if event.finish_reason]
    assert sorted(event.request_id for event in events) == ["0", "3"]
    while engine.has_unfinished():
        assert {event.request_id for event in engine.step()} == {"1"}
    assert requests[1].output_token_ids == expected[1]
    assert [len(r.output_token_ids) for r in requests] == [2, 6, 2, 0]


def test_forced_exhaustion_is_the_error_of_the_request_that_asked(tiny_llama: LoadedModel) -> None:
    """Somebody takes the pool's last blocks in mid-run: the first to need one fails, its blocks let the other go on."""
    prompts = [[1] * 7, [2] * 6]
    expected = outputs(build("nocache", tiny_llama), prompts, SamplingParams(max_tokens=6))
    engine = build("paged-b4", tiny_llama, block_size=4, num_blocks=7)
    requests = [Request(str(i), p, SamplingParams(max_tokens=6)) for i, p in enumerate(prompts)]
    for request in requests:
        engine.add(request)
    engine.step()
    stolen = engine.cache.pool.allocate(3)
    events = []
    while engine.has_unfinished():
        events += engine.step()
        engine.cache.pool.check([*engine.cache.tables.values(), stolen])
    error, = (event for event in events if event.error)
    assert error.request_id == "0" and error.error == "OutOfBlocks: 1 KV blocks asked for, 0 of 7 are free"
    assert requests[0].output_token_ids == expected[0][:2]     # 7 + 1 stored filled two blocks; the next had no place
    assert requests[1].output_token_ids == expected[1]
    engine.cache.pool.free(stolen)
    assert outputs(engine, prompts, SamplingParams(max_tokens=6)) == expected


def test_a_batch_is_no_larger_than_the_pool_surely_holds(tiny_llama: LoadedModel) -> None:
    engine = build("paged-b4", tiny_llama, block_size=4, num_blocks=6)
    requests = [Request(str(i), [1 + i] * 5, SamplingParams(max_tokens=4)) for i in range(5)]   # 2 blocks each
    steps = run_steps(engine, requests)
    assert [len(step) for step in steps] == [3] * 4 + [2] * 4
    assert engine.counters.blocks_peak == 6


@pytest.mark.parametrize("row", BATCHED)
@pytest.mark.parametrize("width", [0, -1, True, 2.0])
def test_a_width_that_is_none_is_refused(row: str, width: object, tiny_llama: LoadedModel) -> None:
    with pytest.raises(ValueError, match="max_num_seqs must be an integer of at least 1"):
        build(row, tiny_llama, max_num_seqs=width)


def test_m2_a_seeded_request_says_the_same_beside_any_neighbours(tiny_llama: LoadedModel) -> None:
    seeded = SamplingParams(max_tokens=8, temperature=0.8, seed=42)
    alone = outputs(build("paged-b4", tiny_llama), [[4, 5, 6]], seeded)[0]
    others = [SamplingParams(max_tokens=3), SamplingParams(max_tokens=12, temperature=1.0, seed=1), seeded]
    for place in range(4):
        prompts, params = [[9], [8, 7], [4, 5, 6]], list(others)
        prompts.insert(place, [4, 5, 6])
        params.insert(place, seeded)
        got = outputs(build("paged-b4", tiny_llama), prompts, params)
        assert got[place] == alone and got[3 if place < 3 else 2] == alone
