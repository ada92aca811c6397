"""Every engine keeps the contract of engines/base.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from liteinfer import lineage
from liteinfer.engines.base import Engine, run
from liteinfer.loading import LoadedModel, tiny_model
from liteinfer.request import Request, SamplingParams
from tests.conftest import build, outputs, replace_pass, rows

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10]]


def drain(engine: Engine) -> list:
    events = []
    for _ in range(1000):
        if not engine.has_unfinished():
            return events
        events += engine.step()
    raise AssertionError("still unfinished after 1000 steps")


@pytest.mark.parametrize("row", rows())
def test_events_carry_each_token_once_and_one_end(row: str, tiny_llama: LoadedModel) -> None:
    engine = build(row, tiny_llama)
    requests = [Request(str(i), p, SamplingParams(max_tokens=3 + i)) for i, p in enumerate(PROMPTS)]
    events = list(run(engine, requests))
    for request in requests:
        mine = [event for event in events if event.request_id == request.request_id]
        assert [t for event in mine for t in event.token_ids] == request.output_token_ids
        assert len(request.output_token_ids) == request.params.max_tokens
        assert [event.finish_reason for event in mine] == [None] * (len(mine) - 1) + ["length"]
    assert not engine.has_unfinished()
    assert engine.step() == []


@pytest.mark.parametrize("row", rows())
@pytest.mark.parametrize(("prompt", "params", "words"), [
    ([], SamplingParams(), ["empty"]),
    ([1, 64], SamplingParams(), ["64", "vocab_size"]),
    ([-1], SamplingParams(), ["-1"]),
    ([1.5], SamplingParams(), ["1.5"]),
    ([True], SamplingParams(), ["True"]),
    ([1], SamplingParams(stop_token_ids=[999]), ["999"]),
    ([1] * 30, SamplingParams(max_tokens=3), ["30", "3", "33", "max_model_len 32"]),
    ([1] * 32, SamplingParams(max_tokens=1), ["32", "33"]),
])
def test_a_bad_request_is_refused_and_the_next_one_works(
        row: str, prompt: list, params: SamplingParams, words: list[str], tiny_llama: LoadedModel) -> None:
    engine = build(row, tiny_llama, max_model_len=32)
    with pytest.raises(ValueError) as caught:
        engine.add(Request("bad", prompt, params))
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)
    assert not engine.has_unfinished()
    assert engine.counters.forward_passes == 0
    assert len(outputs(engine, [[1] * 30], SamplingParams(max_tokens=2))[0]) == 2   # exactly full is fine


@pytest.mark.parametrize("row", rows())
@pytest.mark.parametrize("length", [0, -1, 513])
def test_a_max_model_len_out_of_range_is_refused(row: str, length: int, tiny_llama: LoadedModel) -> None:
    with pytest.raises(ValueError, match=f"max_model_len.*512.*{length}"):
        build(row, tiny_llama, max_model_len=length)


@pytest.mark.parametrize("row", rows())
def test_a_request_id_in_flight_is_refused(row: str, tiny_llama: LoadedModel) -> None:
    engine = build(row, tiny_llama)
    engine.add(Request("a", [1]))
    with pytest.raises(ValueError, match="'a'"):
        engine.add(Request("a", [2]))
    engine.step()
    with pytest.raises(ValueError, match="'a'"):
        engine.add(Request("a", [2]))
    engine.abort("a")
    drain(engine)
    assert [len(tokens) for tokens in outputs(engine, [[1]], SamplingParams(max_tokens=1))] == [1]


@pytest.mark.parametrize("row", rows())
def test_a_request_runs_once(row: str, tiny_llama: LoadedModel) -> None:
    engine, request = build(row, tiny_llama), Request("a", [1, 2], SamplingParams(max_tokens=3))
    list(run(engine, [request]))
    with pytest.raises(ValueError, match="3 output tokens already"):
        engine.add(request)


@pytest.mark.parametrize("row", rows())
def test_a_step_interrupted_in_mid_forward_can_be_made_again(row: str) -> None:
    model = tiny_model("llama", seed=8)
    expected = outputs(build(row, model), [[4, 5]], SamplingParams(max_tokens=5))[0]
    engine, request = build(row, model), Request("a", [4, 5], SamplingParams(max_tokens=5))
    calls = 0

    def interrupted(healthy: Callable[[], torch.Tensor], _: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        logits = healthy()   # keys and values are written, then Ctrl-C comes
        if calls == 3:
            raise KeyboardInterrupt
        return logits

    replace_pass(engine, interrupted)
    engine.add(request)
    with pytest.raises(KeyboardInterrupt):
        drain(engine)
    drain(engine)
    assert request.output_token_ids == expected


@pytest.mark.parametrize("row", rows())
def test_s9_an_interrupted_step_loses_no_aborts_event(row: str, tiny_llama: LoadedModel) -> None:
    engine = build(row, tiny_llama)
    for name in "ab":
        engine.add(Request(name, [4, 5], SamplingParams(max_tokens=5)))
    engine.step()
    engine.abort("b")
    interrupt = True

    def interrupted(healthy: Callable[[], torch.Tensor], _: object) -> torch.Tensor:
        if interrupt:
            raise KeyboardInterrupt
        return healthy()

    replace_pass(engine, interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    interrupt = False
    assert [event.finish_reason for event in drain(engine) if event.request_id == "b"] == ["abort"]


@pytest.mark.parametrize("row", rows())
def test_s9_abort_at_any_moment(row: str, tiny_llama: LoadedModel) -> None:
    engine = build(row, tiny_llama)
    expected = outputs(build(row, tiny_llama), [[4, 5]], SamplingParams(max_tokens=5))[0]
    running, waiting, other = (Request(n, [4, 5], SamplingParams(max_tokens=5)) for n in "abc")
    for request in (running, waiting, other):
        engine.add(request)
    engine.step()
    engine.step()
    for _ in range(2):   # twice, and an unknown id: nothing more happens
        engine.abort("a")
        engine.abort("b")
        engine.abort("nobody")
    n = [len(running.output_token_ids), len(waiting.output_token_ids)]
    events = drain(engine)
    assert [e.request_id for e in events if e.finish_reason == "abort"] == ["a", "b"]
    assert not any(e.token_ids for e in events if e.request_id in "ab")
    assert [len(running.output_token_ids), len(waiting.output_token_ids)] == n
    assert n[0] == 2 and n[1] in (0, 2)   # a batch has both running
    assert other.output_token_ids == expected
    engine.abort("c")   # after its end
    assert not engine.has_unfinished()


@pytest.mark.parametrize("row", rows())
def test_finish_ends_a_request_silently(row: str, tiny_llama: LoadedModel) -> None:
    engine = build(row, tiny_llama)
    expected = outputs(build(row, tiny_llama), [[4, 5]], SamplingParams(max_tokens=5))[0]
    first, second = (Request(n, [4, 5], SamplingParams(max_tokens=5)) for n in "ab")
    engine.add(first)
    engine.add(second)
    engine.step()
    engine.finish("a", 1)
    engine.finish("nobody", 1)
    events = drain(engine)
    assert {event.request_id for event in events} == {"b"}
    assert second.output_token_ids == expected


@pytest.mark.parametrize("row", rows())
@pytest.mark.parametrize("fault", ["raise", "nan"])
def test_a_failing_request_gets_an_error_event_and_the_next_one_works(row: str, fault: str) -> None:
    """Of a batch, NaN logits are one request's fault; a pass that raises is that of all who were in it."""
    model = tiny_model("llama", seed=7)
    wide = max(lineage.find(row).widths) > 1
    engine = build(row, model, **({"max_num_seqs": 2} if wide and fault == "nan" else {"max_num_seqs": 1} if wide
                                  else {}))
    expected = outputs(build(row, model), [[4, 5]], SamplingParams(max_tokens=5))[0]
    calls = 0

    def failing(healthy: Callable[[], torch.Tensor], _: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        logits = healthy()   # [B, V]
        if calls == 3 and fault == "raise":
            raise RuntimeError("the forward broke")
        if calls == 3:
            logits[0] = float("nan")
        return logits

    replace_pass(engine, failing)
    requests = [Request(n, [4, 5], SamplingParams(max_tokens=5)) for n in "ab"]
    events = list(run(engine, requests))
    error = [event for event in events if event.error]
    assert len(error) == 1 and error[0].request_id == "a" and error[0].finish_reason == "error"
    assert ("the forward broke" if fault == "raise" else "64 of 64 logits are NaN") in str(error[0].error)
    assert requests[0].output_token_ids == expected[:2]
    assert requests[1].output_token_ids == expected


@pytest.mark.parametrize("row", rows())
def test_declared_eos_ends_with_stop_also_as_the_first_token(row: str, tiny_llama: LoadedModel) -> None:
    """B6, T10: the EOS is kept in the ids; ignore_eos goes on."""
    reference = outputs(build(row, tiny_llama), [[4, 5]], SamplingParams(max_tokens=8))[0]
    for step in (0, 3):
        eos = reference[step]
        at = reference.index(eos)
        model = tiny_model("llama", eos_token_id=eos)
        engine = build(row, model)
        request = Request("r", [4, 5], SamplingParams(max_tokens=8))
        events = list(run(engine, [request]))
        assert request.output_token_ids == reference[:at + 1]
        assert events[-1].finish_reason == "stop"
        ignoring = outputs(engine, [[4, 5]], SamplingParams(max_tokens=8, ignore_eos=True))[0]
        assert ignoring == reference


def test_counters_are_what_the_chapters_predict(tiny_llama: LoadedModel) -> None:
    """I prompt tokens, O output tokens: rung 1 computes O*I + O(O-1)/2 tokens, the cached rungs I + O - 1."""
    config = tiny_llama.config
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_size * 8   # float64
    prompt, output = 10, 6
    for row in ("nocache", "eager", "native-eager", "native-packed"):
        engine = build(row, tiny_llama, max_model_len=64)
        outputs(engine, [[3] * prompt], SamplingParams(max_tokens=output))
        counters = engine.counters
        assert counters.forward_passes == output
        if row == "nocache":
            assert counters.tokens_computed == output * prompt + output * (output - 1) // 2
            assert counters.kv_bytes_copied == counters.kv_bytes_peak == 0
        else:
            assert counters.tokens_computed == prompt + output - 1
        if row == "eager":   # each decode step copies all that is held: 10 + 11 + ... + 14 tokens
            assert counters.kv_bytes_copied == per_token * sum(range(prompt, prompt + output - 1))
            assert counters.kv_bytes_peak == per_token * (prompt + output - 1)
        if row.startswith("native"):
            assert counters.kv_bytes_copied == 0
            assert counters.kv_bytes_peak == per_token * 64
