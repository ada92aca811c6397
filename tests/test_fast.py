"""The parts of the fast row: the fused forward, the graphs' padded steps, tokens chosen for all at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from liteinfer import lineage
from liteinfer.engines.base import run
from liteinfer.engines.continuous import ContinuousEngine
from liteinfer.fast import graphs
from liteinfer.fast.attention import InPlace
from liteinfer.fast.forward import FusedLlama
from liteinfer.fast.graphs import GraphRunner, Rerun, padded
from liteinfer.fast.runner import FusedRunner, fast_runner
from liteinfer.fast.sampling import BatchSampler
from liteinfer.kernels import build as compiling
from liteinfer.kernels.cpu import cpu_ops
from liteinfer.loading import LoadedModel, tiny_model
from liteinfer.model.linear import Plain
from liteinfer.request import Request, SamplingParams
from liteinfer.runner import Runner, StepOutput
from liteinfer.speculative.choose import drafter
from tests.conftest import build, outputs

pytestmark = [pytest.mark.ch09, pytest.mark.skipif(compiling.compiler() is None, reason="needs a C++ compiler")]

PROMPTS = [[9, 44, 1, 62, 15], [33] * 17, [8, 2], [60, 61, 62] * 11, [5], [7, 9] * 8]
FORCED = SamplingParams(max_tokens=21, ignore_eos=True)


class Replaying(GraphRunner):
    """A graph runner for a machine without CUDA."""

    record = Rerun


def fast(model: LoadedModel, **settings: Any) -> ContinuousEngine:
    engine = build("fast", model, **settings)
    assert isinstance(engine, ContinuousEngine)
    return engine


def steps_of(engine: Any, prompts: list[list[int]], params: SamplingParams) -> list[StepOutput]:
    """What the model said in every step."""
    inner, seen = engine.runner.run, list[StepOutput]()

    def run_and_note(chunks: Any) -> StepOutput:
        output = inner(chunks)
        seen.append(StepOutput(output.logits.clone(), output.hidden_states.clone()))
        return output

    engine.runner.run = run_and_note
    outputs(engine, prompts, params)
    return seen


def expected(model: LoadedModel) -> list[list[int]]:
    return outputs(build("nocache", model), PROMPTS, FORCED)


def test_it_is_made_of_its_own_parts(tiny_llama: LoadedModel) -> None:
    engine = fast(tiny_llama)
    assert engine.linear_path == "our panels" and isinstance(engine.runner, FusedRunner)
    assert isinstance(engine.cache.attention.inner, InPlace) and isinstance(engine.drafter, BatchSampler)
    assert lineage.find(lineage.DEFAULT).parts.items() > lineage.find("fast").parts.items()


def test_the_fused_forward_is_the_plain_one(tiny: LoadedModel) -> None:
    plain, fused = (fast(tiny, runner=runner) for runner in (Runner, fast_runner))
    seen = [steps_of(engine, PROMPTS, FORCED) for engine in (plain, fused)]
    assert isinstance(fused.runner, FusedRunner) and len(seen[0]) == len(seen[1])
    for one, other in zip(*seen, strict=True):
        torch.testing.assert_close(one.hidden_states, other.hidden_states, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(one.logits, other.logits, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("replaced", ["linear", "attention", "runner", "drafter"])
def test_each_part_can_be_replaced_by_the_plain_one(tiny: LoadedModel, replaced: str) -> None:
    from liteinfer.cache.paged import GatherSdpa
    from liteinfer.engines.continuous import NoDrafter

    plain = {"linear": Plain(), "attention": GatherSdpa(), "runner": Runner, "drafter": NoDrafter}[replaced]
    engine = fast(tiny, **{replaced: plain}, max_prefill_chunk=7)
    assert outputs(engine, PROMPTS, FORCED) == expected(tiny)


def test_nothing_is_copied_to_attend(tiny_llama: LoadedModel) -> None:
    engine = fast(tiny_llama)
    outputs(engine, PROMPTS, FORCED)
    assert engine.counters.kv_bytes_copied == 0 and engine.counters.tokens_computed == sum(
        len(prompt) + 20 for prompt in PROMPTS)


@pytest.mark.parametrize("max_num_seqs", [1, 3, 5, 6])
def test_padded_steps_give_the_same_tokens(tiny: LoadedModel, max_num_seqs: int) -> None:
    engine = fast(tiny, runner=Replaying, max_num_seqs=max_num_seqs, num_blocks=40, block_size=4)
    assert outputs(engine, PROMPTS, FORCED) == expected(tiny)
    slots = engine.runner.slots
    assert set(slots) <= {padded(width) for width in range(1, max_num_seqs + 1)} and slots
    engine.cache.check()
    assert engine.cache.pool.num_used == 0


def test_what_other_rows_hold_is_left_alone(tiny_llama: LoadedModel) -> None:
    engine = fast(tiny_llama, runner=Replaying, max_num_seqs=3, num_blocks=20, block_size=4)
    requests = [Request(str(i), prompt, FORCED) for i, prompt in enumerate(PROMPTS[:3])]
    for request in requests:
        engine.add(request)
    engine.step()
    before = engine.cache.keys.clone(), {name: list(table) for name, table in engine.cache.tables.items()}
    engine.step()
    written = {engine.cache.tables[r.request_id][(r.num_computed_tokens - 1) // 4] * 4
               + (r.num_computed_tokens - 1) % 4 for r in requests}
    changed = (engine.cache.keys != before[0]).flatten(1, 2).any(dim=(0, 2, 3)).nonzero().flatten().tolist()
    null = engine.cache.pool.null_block * 4
    assert written <= set(changed) <= written | {null}


def test_a_graph_is_recorded_once_for_a_width_and_steps_of_prompts_have_none(tiny_llama: LoadedModel,
                                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    init = graphs.Slots.__init__

    def noted(self: graphs.Slots, llama: Any, cache: Any, width: int, record: Any) -> None:
        made.append(width)
        init(self, llama, cache, width, record)

    monkeypatch.setattr(graphs.Slots, "__init__", noted)
    engine = fast(tiny_llama, runner=Replaying, max_num_seqs=6)
    for _ in range(2):
        outputs(engine, PROMPTS, FORCED)
    assert made == [8]
    outputs(engine, PROMPTS[:1], FORCED)
    assert made == [8, 1]


def test_widths_of_graphs() -> None:
    assert [padded(width) for width in (1, 2, 3, 5, 9, 17, 25, 32, 33)] == [1, 2, 4, 8, 16, 24, 32, 32, 64]


def test_greedy_tokens_are_chosen_together_and_the_rest_one_by_one(tiny_llama: LoadedModel,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    sample = BatchSampler._sample

    def noted(self: BatchSampler, logits: torch.Tensor, request: Request) -> Any:
        drawn.append(request.request_id)
        return sample(self, logits, request)

    monkeypatch.setattr(BatchSampler, "_sample", noted)
    params = [SamplingParams(max_tokens=5, ignore_eos=True, temperature=t, seed=3) for t in (0, 1.3, 0)]
    found = outputs(fast(tiny_llama), PROMPTS[:3], params)
    assert set(drawn) == {"1"} and len(drawn) == 5
    assert found == outputs(build("continuous", tiny_llama), PROMPTS[:3], params)


def test_a_row_that_is_not_a_number_costs_its_own_request(tiny_llama: LoadedModel) -> None:
    engine: Any = fast(tiny_llama)
    inner = engine.runner.run

    def spoiled(chunks: Any) -> StepOutput:
        output = inner(chunks)
        output.logits[1, 7] = float("nan")
        return output

    engine.runner.run = spoiled
    events = list(run(engine, [Request(str(i), p, SamplingParams(max_tokens=1)) for i, p in enumerate(PROMPTS[:3])]))
    assert {event.request_id: event.error for event in events if event.error} == {
        "1": "FloatingPointError: 1 of 64 logits are NaN"}


@pytest.mark.parametrize("draft", ["ngram", "early-exit:1"])
def test_a_drafter_takes_the_sampler_s_place(tiny: LoadedModel, draft: str) -> None:
    engine = fast(tiny, drafter=drafter(draft, 4), max_model_len=64)
    assert outputs(engine, PROMPTS, FORCED) == expected(tiny) and engine.counters.drafted_tokens


def test_without_our_kernels_the_row_is_the_plain_one(tiny_llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("linear", "attention", "runner"):
        monkeypatch.setattr(f"liteinfer.fast.{module}.cpu_ops", lambda *_: None)
    model = tiny_model("llama")
    engine = fast(model)
    assert type(engine.runner) is Runner and engine.linear_path == "fused F.linear" and engine.cache.attention.gathers
    assert outputs(engine, PROMPTS, FORCED) == expected(tiny_llama)


def test_real_weights_in_float32(smol: LoadedModel) -> None:
    """The fused forward's logits beside those of rung 3, both in float32: as near as packed ones are to plain ones."""
    ops = cpu_ops(torch.float32)
    assert ops is not None
    prompts = [smol.encode("The capital of France is"), smol.encode("def fibonacci(n):\n    ")]
    engines: list[Any] = [build(name, smol, num_blocks=64) for name in ("continuous", "fast")]
    steps = [steps_of(engine, prompts, SamplingParams(max_tokens=4, ignore_eos=True)) for engine in engines]
    assert isinstance(engines[1].runner.model, FusedLlama)
    for plain, fused in zip(*steps, strict=True):
        torch.testing.assert_close(plain.logits, fused.logits, rtol=1e-3, atol=2e-3)
