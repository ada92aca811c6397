"""Chapter 1: its hand-worked examples, the numbers typed into its page, and its deliberate break."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks import metrics
from benchmarks.ceilings import Sizes, Step, allowed
from benchmarks.loop import Trace
from liteinfer.checkpoint import ModelConfig
from liteinfer.engines.no_cache import NoCacheEngine
from liteinfer.loading import LoadedModel
from liteinfer.plots import ch01
from liteinfer.request import Request, SamplingParams
from liteinfer.sampling import pick, processed_probs, sample
from tests.conftest import outputs

pytestmark = pytest.mark.ch01

# What the page's arithmetic is about: the bundled model, and the one of the published page (its public config.json).
SMOL = ModelConfig("llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9,
                   num_kv_heads=3, head_size=64, rms_norm_eps=1e-5, rope_theta=1e5, rope_scaling=None,
                   max_position_embeddings=8192, tie_word_embeddings=True, eos_token_ids=(2,), bos_token_id=1)
LLAMA_1B = ModelConfig("llama", vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_layers=16,
                       num_heads=32, num_kv_heads=8, head_size=64, rms_norm_eps=1e-5, rope_theta=5e5,
                       rope_scaling=None, max_position_embeddings=131072, tie_word_embeddings=True,
                       eos_token_ids=(128001,), bos_token_id=128000)
A40 = {"bandwidth_gb_s": 696.0, "peak_gflop_s": 149_700.0}   # NVIDIA's data sheet: GDDR6, dense bfloat16


def recorded(engine: NoCacheEngine, prompt: list[int], max_tokens: int) -> tuple[list[int], list[ch01.StepRecord]]:
    request = Request("r", list(prompt), SamplingParams(max_tokens=max_tokens))
    steps = ch01.record(engine, request)
    return request.output_token_ids, steps


# --- the hand-worked examples ------------------------------------------------------------------------------------


def test_three_prompt_tokens_and_four_outputs_by_hand(tiny_llama: LoadedModel) -> None:
    engine = NoCacheEngine(tiny_llama)
    tokens, steps = recorded(engine, [5, 9, 2], 4)
    assert tokens == [6, 56, 51, 34]
    assert [(step.computed, step.token) for step in steps] == [(3, 6), (4, 56), (5, 51), (6, 34)]
    assert ch01.first_times(steps) == [3, 1, 1, 1]
    assert engine.counters.tokens_computed == 18 and sum(ch01.first_times(steps)) == 6
    assert engine.counters.forward_passes == 4


def test_four_tokens_sampled_by_hand() -> None:
    probs = torch.tensor([0.15, 0.5, 0.05, 0.3], dtype=torch.float64)
    # Temperature 0.5 squares: 0.0225, 0.25, 0.0025, 0.09, which sum to 0.365. Temperature 2 takes square roots.
    by_hand = {
        (1.0, 0, 1.0): [0.15, 0.5, 0.05, 0.3],
        (0.5, 0, 1.0): [0.0225 / 0.365, 0.25 / 0.365, 0.0025 / 0.365, 0.09 / 0.365],
        (1.0, 2, 1.0): [0, 0.625, 0, 0.375],
        (1.0, 0, 0.85): [0.15 / 0.95, 0.5 / 0.95, 0, 0.3 / 0.95],
        (0.5, 0, 0.85): [0, 0.25 / 0.34, 0, 0.09 / 0.34],   # after squaring, two tokens already reach 0.85
        (0.0, 0, 1.0): [0, 1, 0, 0],
    }
    for (temperature, top_k, top_p), expected in by_hand.items():
        made = processed_probs(probs.log(), SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p))
        torch.testing.assert_close(made, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)
    nucleus = processed_probs(probs.log(), SamplingParams(temperature=1.0, top_p=0.85))
    torch.testing.assert_close(nucleus.cumsum(0), torch.tensor([0.158, 0.684, 0.684, 1.0]).double(), rtol=0, atol=5e-4)
    assert [pick(nucleus, u) for u in (0.1, 0.6, 0.69)] == [0, 1, 3]


def test_four_timestamps_by_hand() -> None:
    trace = Trace("r", 0.0, [(0.5, 1), (0.6, 1), (0.8, 1), (1.1, 1)], [1, 2, 3, 4], finish_reason="length")
    assert metrics.ttft(trace) == 0.5
    assert metrics.gaps(trace) == pytest.approx([0.1, 0.2, 0.3])
    assert metrics.tpot(trace) == pytest.approx(0.2)
    assert metrics.e2e(trace) == 1.1
    assert metrics.throughput([trace], {"r": 4})["tok_s"] == pytest.approx(3.6, abs=0.05)


# --- the numbers typed into the page -----------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "output", "computed", "needed"), [
    (3, 4, 18, 6), (8, 12, 162, 19), (8, 4, 38, 11), (128, 64, 10_208, 191), (128, 1, 128, 128),
    (128, 128, 24_512, 255), (128, 256, 65_408, 383), (128, 1024, 654_848, 1_151)])
def test_token_counts_of_the_page(prompt: int, output: int, computed: int, needed: int,
                                  tiny_llama: LoadedModel) -> None:
    assert output * prompt + output * (output - 1) // 2 == computed == sum(range(prompt, prompt + output))
    assert prompt + output - 1 == needed
    if output <= 12:   # and the engine counts the same
        engine = NoCacheEngine(tiny_llama)
        _, steps = recorded(engine, [3] * prompt, output)
        assert (engine.counters.tokens_computed, sum(ch01.first_times(steps))) == (computed, needed)


def test_ratios_of_the_page() -> None:
    assert round(10_208 / 191) == 53
    assert round(24_512 / 10_208, 1) == 2.4
    assert round(654_848 / 1_151) == 569


def test_work_of_a_mean_step_of_the_page() -> None:
    """ISL 128, OSL 64: after the first, a step feeds 160 tokens on average."""
    assert sum(range(129, 192)) / 63 == 160
    sizes = Sizes.of(SMOL, torch.float32)
    assert (sizes.parameters, sizes.layer_linear, sizes.head) == (134_515_008, 106_168_320, 28_311_552)
    rule_of_thumb = 2 * sizes.parameters * 160
    no_cache, cached = Step(160, 160, cached=False), Step(1, 160, cached=True)
    assert round(rule_of_thumb / 1e9) == 43 and round(no_cache.flops(sizes) / 1e9) == 35
    assert round(2 * (sizes.layer_linear * 160 + sizes.head) / 1e9) == 34   # the linear layers alone
    assert round(cached.flops(sizes) / 1e9, 2) == 0.28
    assert round(no_cache.bytes(sizes) / 1e6) == 538
    assert no_cache.flops(sizes) / no_cache.bytes(sizes) == pytest.approx(65, abs=0.5)
    assert cached.flops(sizes) / cached.bytes(sizes) == pytest.approx(0.5, abs=0.03)


def test_keeping_the_last_logits_only_saves_what_the_page_says(tiny_llama: LoadedModel) -> None:
    assert 191 * 49152 * 4 == 37_552_128              # bytes of logits, all positions of the last step
    assert round(2 * 28_311_552 * 190 / 1e9, 1) == 10.8   # GFLOP of the head that nobody reads
    ids = torch.tensor([[5, 9, 2]])
    with torch.inference_mode():
        everything = tiny_llama.transformers_model()(input_ids=ids, use_cache=False).logits
        last = tiny_llama.transformers_model()(input_ids=ids, use_cache=False, logits_to_keep=1).logits
    assert everything.shape == (1, 3, 64) and last.shape == (1, 1, 64)
    torch.testing.assert_close(last[0, 0], everything[0, 2], rtol=0, atol=1e-12)


def test_why_the_published_gpu_hardly_notices() -> None:
    """Llama-3.2-1B in bfloat16 on an A40, ISL 128, OSL 256: both limits of a step come out nearly equal."""
    sizes = Sizes.of(LLAMA_1B, torch.bfloat16)
    assert sizes.parameters == 1_235_814_400
    cached, no_cache = Step(1, 256, cached=True), Step(256, 256, cached=False)
    seconds, bound = allowed(cached, sizes, A40)
    assert bound == "bandwidth" and round(seconds * 1e3, 1) == 3.6
    computing = no_cache.flops(sizes) / (A40["peak_gflop_s"] * 1e9)
    assert round(computing * 1e3, 1) == 3.4
    assert round(A40["peak_gflop_s"] / A40["bandwidth_gb_s"]) == 215
    assert round(16.5 / 13.7, 1) == 1.2


# --- prove it ----------------------------------------------------------------------------------------------------


def test_rung_1_says_what_transformers_own_generate_says(tiny: LoadedModel) -> None:
    for prompt in ([5, 9, 2], [1], list(range(20))):
        ids = torch.tensor([prompt])
        # The mask is given: left to itself, generate takes every prompt token with the pad's id for padding.
        own = tiny.transformers_model().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12,
                                                 do_sample=False, use_cache=False, pad_token_id=0)
        assert outputs(NoCacheEngine(tiny), [prompt], SamplingParams(max_tokens=12)) == [own[0, len(prompt):].tolist()]


def test_what_is_computed_again_comes_out_the_same(tiny: LoadedModel) -> None:
    ids = torch.tensor([[5, 9, 2, 6, 56, 51, 34, 11, 40, 3]])
    with torch.inference_mode():
        short, long = (tiny.transformers_model()(input_ids=i, use_cache=False).logits[0] for i in (ids[:, :7], ids))
    torch.testing.assert_close(short, long[:7], rtol=0, atol=1e-12)


class NewestOnly(NoCacheEngine):
    """The break: feeds the prompt once, then only the newest token, and has kept nothing of the others."""

    def next_logits(self, request: Request) -> torch.Tensor:
        fed = Request("part", request.output_token_ids[-1:] or request.prompt_token_ids)
        return super().next_logits(fed)


def test_feeding_only_the_newest_token_is_caught_by_rung_1(tiny_llama: LoadedModel) -> None:
    broken = NewestOnly(tiny_llama)
    tokens, _ = recorded(broken, [5, 9, 2], 4)
    right, _ = recorded(NoCacheEngine(tiny_llama), [5, 9, 2], 4)
    assert broken.counters.tokens_computed == 6   # the right count
    assert tokens[0] == right[0] and tokens[1] != right[1]


def test_a_shared_generator_would_let_a_neighbour_change_the_tokens() -> None:
    row = torch.tensor([0.15, 0.5, 0.05, 0.3]).log()
    seeded = SamplingParams(temperature=1.0, seed=7)

    def eight(request: Request, neighbour: Request | None = None) -> list[int]:
        tokens = []
        for _ in range(8):
            if neighbour is not None:
                sample(row, neighbour)
            tokens.append(sample(row, request))
        return tokens

    alone, other = eight(Request("a", [0], seeded)), SamplingParams(temperature=1.0)
    assert eight(Request("a", [0], seeded), Request("b", [0], other)) == alone
    shared, neighbour = Request("a", [0], seeded), Request("b", [0], other)
    neighbour.generator = shared.generator
    assert eight(shared, neighbour) != alone


def test_the_picture_shows_what_the_engine_counted(tiny_llama: LoadedModel) -> None:
    engine = NoCacheEngine(tiny_llama)
    _, steps = recorded(engine, [1, 2, 3, 4, 5, 6, 7, 8], 12)
    cells = np.asarray(ch01.triangle(steps).axes[0].collections[0].get_array())
    assert cells.shape == (12, 19)
    assert int((cells == 1).sum()) == 19
    assert int((cells > 0).sum()) == engine.counters.tokens_computed == 162
    assert set(ch01.pictures()) == {"triangle.svg"}
