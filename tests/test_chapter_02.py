"""Chapter 2: its worked example, its typed numbers, its picture, and the faults its checks catch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from benchmarks.ceilings import Sizes, Step
from liteinfer.engines.dynamic_cache import DynamicCacheEngine, kv_bytes
from liteinfer.loading import LoadedModel, tiny_model
from liteinfer.plots import ch02
from liteinfer.request import Request, SamplingParams
from tests.conftest import build, outputs

pytestmark = pytest.mark.ch02

ROOT = Path(__file__).parents[1]
CHAPTER = ROOT / "chapters" / "02_dynamic_cache"
PROMPT = [7, 3, 51, 20]


def said(text: str) -> None:
    """The chapter says this, wherever its lines break."""
    assert text in " ".join((CHAPTER / "README.md").read_text().split()), f"the chapter does not say {text!r}"


# --- the worked example ----------------------------------------------------------------------------------------


def test_four_tokens_in_three_out(tiny_llama: LoadedModel) -> None:
    """Computes 4 + 1 + 1, copies 0 + 4 + 5 tokens, holds 6 at the end; rung 1 computes 4 + 5 + 6."""
    engine, slow = build("eager", tiny_llama), build("nocache", tiny_llama)
    params = SamplingParams(max_tokens=3)
    tokens, = outputs(engine, [PROMPT], params)
    assert outputs(slow, [PROMPT], params) == [tokens] == [[49, 19, 31]]
    assert (engine.counters.tokens_computed, slow.counters.tokens_computed) == (6, 15)
    assert engine.counters.kv_bytes_copied == (4 + 5) * 512 == 4608
    assert engine.counters.kv_bytes_peak == 6 * 512 == 3072
    said("| 2 | [49] | 4 | 2,048 | 2,560 |")
    said("| 3 | [19] | 5 | 2,560 | 3,072 |")
    said("4 + 5 + 6 = 15")
    said("4,608 bytes")
    said("tokens 49, 19, 31")


def test_each_step_of_the_example(tiny_llama: LoadedModel) -> None:
    seen = ch02.watch(DynamicCacheEngine(tiny_llama), Request("r", PROMPT, SamplingParams(max_tokens=8)), 3)
    assert [(s.fed, s.copied, s.held, s.tokens) for s in seen] == [
        (4, 0, 2048, 4), (1, 2048, 2560, 5), (1, 2560, 3072, 6)]
    before, after = seen[1].layers[0][0], seen[2].layers[0][0]
    assert after.data_ptr() != before.data_ptr()            # a new tensor ...
    assert torch.equal(after[:, :, :5], before)             # ... holding the old rows, copied


def test_past_keys_and_values_do_not_depend_on_later_tokens(tiny_llama: LoadedModel) -> None:
    def cached(ids: list[int]) -> DynamicCache:
        cache = DynamicCache()
        with torch.inference_mode():
            tiny_llama.transformers_model()(torch.tensor([ids]), use_cache=True, **{tiny_llama.cache_keyword: cache})
        return cache

    alone, longer, changed = cached(PROMPT), cached([*PROMPT, 49, 19, 31]), cached([7, 4, 51, 20])
    for layer, (a, b, c) in enumerate(zip(alone.layers, longer.layers, changed.layers, strict=True)):
        torch.testing.assert_close(a.keys, b.keys[:, :, :4], rtol=0, atol=1e-10)
        torch.testing.assert_close(a.values, b.values[:, :, :4], rtol=0, atol=1e-10)
        assert torch.equal(a.keys[:, :, 0], c.keys[:, :, 0])        # token 0 is before the changed token 1
        # In layer 0 only the changed token itself differs; from layer 1 on, all that come after it.
        assert torch.equal(a.keys[:, :, 2:], c.keys[:, :, 2:]) == (layer == 0)


# --- the typed numbers -----------------------------------------------------------------------------------------


def test_tokens_computed_and_bytes_of_the_course_shape(smol: LoadedModel) -> None:
    shape, config = ch02.SMOLLM2, smol.config
    sizes = Sizes.of(config, smol.dtype)
    assert (shape.layers, shape.kv_heads, shape.head_size, shape.itemsize, shape.weight_bytes, shape.longest) == (
        config.num_layers, config.num_kv_heads, config.head_size, smol.dtype.itemsize, sizes.weight_bytes,
        config.max_position_embeddings)
    assert shape.weight_bytes == sum(p.nbytes for p in smol.transformers_model().parameters())
    prompt, output = 128, 64
    said(f"{output * prompt + output * (output - 1) // 2:,}")                                # 10,208
    said(f"{prompt + output - 1} token computations")                                       # 191
    said(f"{(output * prompt + output * (output - 1) / 2) / (prompt + output - 1):.0f} times fewer")
    said(f"2 × 30 × 3 × 64 × 4 = {shape.bytes_per_token:,} bytes")                          # 46,080
    said(f"{(prompt + output - 1) * shape.bytes_per_token:,} bytes held")                   # 8,801,280
    said(f"{ch02.copied_tokens(prompt, output) * shape.bytes_per_token:,} bytes copied")    # 461,583,360
    said(f"{ch02.copied_tokens(prompt, output):,} tokens")                                  # 10,017
    said(f"{prompt * shape.bytes_per_token:,} bytes for nothing")                           # 5,898,240


def test_a_live_real_cache_holds_what_the_formula_says(smol: LoadedModel) -> None:
    engine = build("eager", smol)
    outputs(engine, [[1, 2, 3, 4, 5]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert engine.counters.kv_bytes_peak == 7 * ch02.SMOLLM2.bytes_per_token == 7 * 46_080
    assert engine.counters.kv_bytes_copied == ch02.copied_tokens(5, 3) * 46_080 == (5 + 6) * 46_080


def test_the_memory_table() -> None:
    llama = ch02.KVShape("Llama-3.2-1B, bfloat16", 16, 8, 64, 2, 2_471_628_800, 131_072)
    said(f"2 × 16 × 8 × 64 × 2 = {llama.bytes_per_token:,} bytes")
    for shape, heads in ((ch02.SMOLLM2, 9), (llama, 32)):
        full = replace(shape, kv_heads=heads)
        said(f"| {shape.name.replace(', ', ' | ')} | {shape.layers} | {heads} | {shape.kv_heads} | "
             f"{shape.bytes_per_token:,} | {full.bytes_per_token:,} | {8192 * shape.bytes_per_token / 1e6:,.0f} MB |")
        assert full.bytes_per_token // shape.bytes_per_token == heads // shape.kv_heads
    said(f"{llama.longest * llama.bytes_per_token / 1e9:.2f} GB")
    said(f"{llama.weight_bytes / 1e9:.2f} GB of weights")


def test_the_ceiling_of_a_mean_step(smol: LoadedModel) -> None:
    sizes = Sizes.of(smol.config, smol.dtype)
    mean = 128 + 64 / 2
    cached, whole = Step(1, mean, True), Step(mean, mean, False)
    said(f"{cached.bytes(sizes) / 1e6:.0f} MB")
    said(f"{cached.flops(sizes) / 1e9:.2f} GFLOP")
    said(f"{whole.flops(sizes) / 1e9:.1f} GFLOP")
    said(f"{cached.flops(sizes) / cached.bytes(sizes):.1f} operations per byte")
    said(f"{whole.flops(sizes) / cached.flops(sizes):.0f} times fewer operations")


def test_where_copying_catches_up_with_the_weights() -> None:
    shape = ch02.SMOLLM2
    assert (shape.crossover - 1) * shape.bytes_per_token < shape.weight_bytes <= shape.crossover * 46_080
    said(f"{shape.crossover:,} tokens")                                                     # 11,677
    said(f"{replace(shape, weight_bytes=shape.weight_bytes // 2).crossover:,} tokens")      # 5,839
    mean = ch02.copied_tokens(128, 64) / 63 * shape.bytes_per_token
    said(f"{mean / 1e6:.1f} MB a step, {mean / shape.weight_bytes:.1%} of the weights")
    full = (shape.longest - 1) * shape.bytes_per_token
    said(f"{full / 1e6:.0f} MB, {full / shape.weight_bytes:.0%} of the weights")
    outputs_ = shape.longest - 128
    short, long = ch02.copied_tokens(128, 64), ch02.copied_tokens(128, outputs_)
    said(f"{outputs_:,} output tokens instead of 64 is {outputs_ / 64:.0f} times as many, and copies "
         f"{long / short:,.0f} times as many bytes: {long * shape.bytes_per_token / 1e12:.2f} TB")


@pytest.mark.parametrize(("prompt", "output"), [(1, 1), (1, 2), (9, 1), (5, 8)])
def test_the_formula_for_copying_is_the_counter(prompt: int, output: int, tiny_llama: LoadedModel) -> None:
    engine = build("eager", tiny_llama)
    outputs(engine, [[3] * prompt], SamplingParams(max_tokens=output))
    assert engine.counters.kv_bytes_copied == 512 * ch02.copied_tokens(prompt, output)


def test_one_output_token_gains_nothing(tiny_llama: LoadedModel) -> None:
    engine, slow = build("eager", tiny_llama), build("nocache", tiny_llama)
    for each in (engine, slow):
        outputs(each, [[3] * 128], SamplingParams(max_tokens=1))
    assert engine.counters.tokens_computed == slow.counters.tokens_computed == 128
    assert engine.counters.kv_bytes_peak == 128 * 512
    assert slow.counters.kv_bytes_peak == 0


# --- the mask --------------------------------------------------------------------------------------------------


def attention(q: Tensor, k: Tensor, v: Tensor, **how: object) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, **how)


def test_is_causal_alone_hides_the_history() -> None:
    """The chapter's two masks: 3 new tokens on 4 held ones."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.rand(3, 1, 2, 7, 8, dtype=torch.float64, generator=generator)
    ones = torch.ones(3, 7, dtype=torch.bool)
    expected = attention(q, k, v, is_causal=True)[..., 4:, :]
    chunk = q[..., 4:, :]
    top_left, bottom_right = ones.tril(), ones.tril(7 - 3)
    torch.testing.assert_close(attention(chunk, k, v, attn_mask=bottom_right), expected, rtol=0, atol=1e-12)
    square = attention(chunk, k, v, is_causal=True)
    torch.testing.assert_close(square, attention(chunk, k, v, attn_mask=top_left), rtol=0, atol=1e-12)
    assert (square - expected).abs().max() > 1e-3
    last = attention(q[..., 6:, :], k, v)                   # one token needs no mask at all
    torch.testing.assert_close(last, expected[..., -1:, :], rtol=0, atol=1e-12)
    page = (CHAPTER / "README.md").read_text().splitlines()
    for i in range(3):
        drawn = ["".join(" 1" if x else " ." for x in mask[i].tolist()).strip() for mask in (top_left, bottom_right)]
        assert any(line.endswith("      ".join(drawn)) for line in page), drawn


# --- deliberate breaks -----------------------------------------------------------------------------------------


class PositionsRestart(DynamicCacheEngine):
    """Broken: every chunk is told that it starts at position 0, as if the cache were empty."""

    def next_logits(self, request: Request) -> Tensor:
        self.cache = self.cache or DynamicCache()
        new = request.token_ids[self.cache.get_seq_length():]
        out = self.model.transformers_model()(
            input_ids=torch.tensor([new]), position_ids=torch.arange(len(new))[None], use_cache=True,
            **{self.model.cache_keyword: self.cache})
        return out.logits[0, -1]


class LosesTheNewest(DynamicCacheEngine):
    """Broken: drops the newest entry, then feeds the last token only, so that one token is never seen."""

    def next_logits(self, request: Request) -> Tensor:
        if self.cache is None:
            return super().next_logits(request)
        self.cache.crop(-1)
        out = self.model.transformers_model()(
            input_ids=torch.tensor([request.token_ids[-1:]]), use_cache=True, **{self.model.cache_keyword: self.cache})
        return out.logits[0, -1]


class NeverKeeps(DynamicCacheEngine):
    """Broken in speed only: starts each step with an empty cache."""

    def next_logits(self, request: Request) -> Tensor:
        self.cache = None
        return super().next_logits(request)


class DropsAndRefeeds(DynamicCacheEngine):
    """Not broken: what was dropped is no longer in the cache, so the same line feeds it again."""

    def next_logits(self, request: Request) -> Tensor:
        if self.cache is not None:
            self.cache.crop(-1)
        return super().next_logits(request)


@pytest.fixture(scope="module")
def words(tiny_llama: LoadedModel) -> list[int]:
    return outputs(build("nocache", tiny_llama), [PROMPT], SamplingParams(max_tokens=8))[0]


@pytest.mark.parametrize("broken", [PositionsRestart, LosesTheNewest])
def test_the_tokens_catch_a_wrong_cache(broken: type[DynamicCacheEngine], words: list[int],
                                        tiny_llama: LoadedModel) -> None:
    got, = outputs(broken(tiny_llama), [PROMPT], SamplingParams(max_tokens=8))
    assert got[0] == words[0]    # the prefill is still right: a test of one token would pass
    assert got != words


def test_only_the_counters_catch_an_unused_cache(words: list[int], tiny_llama: LoadedModel) -> None:
    engine = NeverKeeps(tiny_llama)
    assert outputs(engine, [PROMPT], SamplingParams(max_tokens=8)) == [words]
    assert engine.counters.tokens_computed == 8 * 4 + 8 * 7 // 2      # as many as rung 1, not 4 + 7
    assert engine.counters.kv_bytes_copied == 0


def test_what_is_cropped_is_fed_again(words: list[int], tiny_llama: LoadedModel) -> None:
    engine = DropsAndRefeeds(tiny_llama)
    assert outputs(engine, [PROMPT], SamplingParams(max_tokens=8)) == [words]
    assert engine.counters.tokens_computed == 4 + 7 * 2


def test_crop_counts_what_to_remove(tiny_llama: LoadedModel) -> None:
    engine = DynamicCacheEngine(tiny_llama)
    engine.add(Request("r", PROMPT))
    engine.step()
    assert engine.cache is not None
    with pytest.raises(ValueError, match="negative"):
        engine.cache.crop(3)
    engine.cache.crop(-1)
    assert engine.cache.get_seq_length() == 3
    assert kv_bytes(engine.cache) == 3 * 512


# --- the pictures ----------------------------------------------------------------------------------------------


def test_the_picture_shows_the_live_cache(tiny_llama: LoadedModel) -> None:
    def texts(model: LoadedModel) -> str:
        seen = ch02.watch(DynamicCacheEngine(model), Request("r", PROMPT, SamplingParams(max_tokens=8)), 4)
        return "\n".join(t.get_text() for axes in ch02.live_cache(seen).axes for t in axes.texts)

    assert "layer 1 values [1, 2, 7, 8]: 896 bytes" in texts(tiny_llama)
    assert "computes 1, copies 3,072 bytes, holds 3,584 bytes" in texts(tiny_llama)
    other = texts(tiny_model(num_key_value_heads=1, num_hidden_layers=3, dtype=torch.float32))
    assert "layer 2 keys [1, 1, 7, 8]: 224 bytes" in other


def test_watch_needs_a_request_that_goes_on(tiny_llama: LoadedModel) -> None:
    with pytest.raises(ValueError, match="3 steps need max_tokens above 3, got 3"):
        ch02.watch(DynamicCacheEngine(tiny_llama), Request("r", PROMPT, SamplingParams(max_tokens=3)), 3)
