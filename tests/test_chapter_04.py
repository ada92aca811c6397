"""Chapter 4: its worked example, the numbers in its text, and its deliberate breaks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.workloads import SHAPES
from liteinfer.cache import paged as paged_module
from liteinfer.cache import pool_size
from liteinfer.cache.block_pool import BlockPool, OutOfBlocks
from liteinfer.cache.contiguous import ContiguousCache
from liteinfer.cache.paged import GatherSdpa, PagedCache
from liteinfer.engines.paged import feed
from liteinfer.loading import LoadedModel
from liteinfer.model.layout import Layout
from liteinfer.model.linear import Plain
from liteinfer.model.llama import load_llama
from liteinfer.plots import ch03, ch04
from liteinfer.request import Counters, Request, SamplingParams
from tests.conftest import build, outputs

pytestmark = pytest.mark.ch04
README = (Path(__file__).parents[1] / "chapters" / "04_paged" / "README.md").read_text(encoding="utf-8")
PROMPT = [9, 44, 1, 62, 15, 33, 8, 2, 60]
CPU = torch.device("cpu")
PER_TOKEN, BLOCK = 46_080, 737_280   # bytes of SmolLM2 in float32


def says(*texts: str) -> None:
    """The chapter's text has these words, wherever its lines break."""
    readme = " ".join(README.split())
    assert [text for text in texts if " ".join(text.split()) not in readme] == []


def blocks(tokens: int, block_size: int = 16) -> int:
    return -(-tokens // block_size)


# --- worked by hand --------------------------------------------------------------------------------------------------


def test_the_step_of_two_sequences_in_a_used_pool() -> None:
    cache, layout = ch04.used_pool()
    assert cache.tables[0] == [7, 2] and cache.tables[1] == [5]
    assert cache.layout.block_tables.tolist() == [[7, 2], [5, 8]] and cache.pool.null_block == 8
    assert cache.layout.slot_mapping.tolist() == [9, 20, 21, 22]
    assert cache.layout.positions is layout.positions
    says("block_tables       7 2       (A)", "5 null    (B)", "slot_mapping       9   20 21 22",
         "slot 2 * 4 + 1 = 9", "5 * 4 + 0, 1, 2", "number 8, one past the last")


def test_the_story_of_the_pool() -> None:
    frames = ch04.pool_story()
    assert [frame.tables for frame in frames] == [
        {0: [0, 1]}, {0: [0, 1], 1: [2]}, {0: [0, 1, 3], 1: [2]}, {0: [0, 1, 3], 1: [2], 2: [0, 4]},
        {1: [2], 2: [0, 4]}, {1: [2], 2: [0, 4], 3: [1]}]
    assert [frame.holders[0] for frame in frames] == [1, 1, 1, 2, 1, 1]
    assert [frame.free for frame in frames[3:]] == [[5], [1, 3, 5], [3, 5]]
    d, left_over = frames[-1].blocks[1][2:]
    assert (d.token, d.alive) == ("d2", True) and (left_over.token, left_over.alive) == ("a7", False)
    says("so block 3 may follow block 1", "In moment 6 D has three tokens in a block of four", "still lies a7")


def test_self_check_answers() -> None:
    layout = Layout.of([(0, 35, 1)], CPU)
    assert paged_module.slot_mapping([[3, 9, 4]], layout, 16) == [67] and 3 * 16 == 48
    pool = BlockPool(100, 16)
    pool.allocate(88)
    with pytest.raises(OutOfBlocks):
        pool.allocate(13)
    assert pool.num_free == 12
    says("slot 4 * 16 + 3 = 67. 48 tokens.")


def test_online_softmax_by_hand() -> None:
    """Scores 2, then 4: the sum that is kept is the denominator as if both had been known at once."""
    kept = 1 * torch.tensor(2.0 - 4).exp() + 1
    torch.testing.assert_close(kept, (torch.tensor([2.0, 4.0]) - 4).exp().sum())
    assert (torch.tensor([0.0, 1.0]) @ torch.tensor([float("nan"), 1.0])).isnan()
    says("the sum 1 * exp(2 - 4) + 1", "exp(-2) + exp(0)", "0 times NaN is NaN")


# --- the numbers in the text -----------------------------------------------------------------------------------------


def test_bytes_held(smol: LoadedModel) -> None:
    config, stored = smol.config, 128 + 64 - 1                               # the last token is never fed
    whole = ContiguousCache(config, 1, 8192, smol.dtype, CPU).nbytes
    assert whole == 377_487_360 and whole == 8192 * PER_TOKEN
    assert 2 * config.num_layers * config.num_kv_heads * config.head_size * smol.dtype.itemsize == PER_TOKEN
    assert ch04.held(config, [16, stored]) == [BLOCK, 8_847_360]
    assert blocks(stored) == 12 and whole // 8_847_360 == 42
    assert 10**9 // whole == 2 and 10**9 // 8_847_360 == 113
    assert (pool_size.RAM_SHARE, pool_size.CUDA_SHARE) == (1 / 8, 0.9)
    says("8,192 rows, 377,487,360 bytes", "fills 191", "2 x 30 x 3 x 64 x 4 = 46,080", "737,280", "8,847,360",
         "a forty-second", "two such reservations", "over a hundred requests", "an eighth of the RAM", "nine tenths")


def test_bytes_copied(tiny_llama: LoadedModel, smol: LoadedModel) -> None:
    """Counted on the tiny model, in blocks: lengths decide, not the model."""
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    engine = build("paged", tiny_llama, num_blocks=12)
    outputs(engine, [[3] * 128], params)
    copied, remainder = divmod(engine.counters.kv_bytes_copied, engine.cache.block_bytes)
    assert (copied, remainder) == (668, 0)
    assert copied == sum(blocks(s) for s in range(128, 192))
    assert copied * BLOCK == 492_503_040 and engine.counters.blocks_peak == 12
    eager = build("eager", tiny_llama)
    outputs(eager, [[3] * 128], params)
    per_token = engine.cache.block_bytes // 16
    assert eager.counters.kv_bytes_copied // per_token * PER_TOKEN == 461_583_360
    mean, step = copied * BLOCK / 64, step_bytes(smol)
    assert (round(copied / 64, 1), round(2 * mean / 1e6, 1), round(step / 1e6)) == (10.4, 15.4, 545)
    assert f"{2 * mean / step:.1%}" == "2.8%"
    weights = sum(w.nbytes for w in smol.weights().values())
    assert round(weights / (2 * PER_TOKEN)) == 5_838 and round(5_838 / 160) == 36 and round(weights / 1e6) == 538
    says("668 blocks, 492,503,040 bytes", "461,583,360", "10.4 blocks on average", "15.4 MB besides the 545 MB",
         "2.8 %", "5,838 tokens", "36 of 160", "two requests of 492.5", "all 538 MB of weights", "12 blocks")


def step_bytes(smol: LoadedModel) -> int:
    """Bytes of a decode step at 160 tokens, as chapter 3 counts them."""
    return sum(ch03.decode_bytes(smol, context=160).values())


def test_gathers_and_writes_of_a_step(smol: LoadedModel) -> None:
    layers, heads = smol.config.num_layers, smol.config.num_kv_heads
    assert 2 * layers == 60
    piece = heads * smol.config.head_size * 4
    assert (piece, 16 * piece) == (768, 12_288)
    says("60 gathers and 60 indexed writes", "191 pieces of 768 bytes", "12 pieces of 12,288")
    assert 2 * 24 * 2 * 64 * 2 == 12_288 and 1280 * 10**6 // 2048 == 625 * 10**3
    says("2 x 24 x 2 x 64 x 2 = 12,288", "625 KB a token")


def test_waste_of_the_mixed_workload() -> None:
    ragged = SHAPES["ragged"]
    lengths = [ragged.output_length(i) for i in range(ragged.prompts_at(32))]
    mean = ch04.mean_length(ragged.isl, lengths)
    measured = ch04.waste(ragged.isl, lengths)
    assert measured[1] == 0 and measured[16] < 0.038
    for size in (2, 4, 8, 16, 32):
        assert abs(measured[size] / ch04.expected_waste(size, mean) - 1) < 0.05
    for size in (64, 128, 256):
        assert abs(measured[size] / ch04.expected_waste(size, mean) - 1) > 0.05
    assert round(mean) == 213 and f"{7.5 / 220.5:.1%}" == "3.4%" == f"{ch04.expected_waste(16, mean):.1%}"
    says("7.5 / 220.5 = 3.4 %", "some 213 stored tokens", "The prediction fails from 64 on")


# --- the deliberate breaks -------------------------------------------------------------------------------------------


def one_late(tables, layout, block_size):
    """Slots whose block is chosen one token too late."""
    return [table[max(t - 1, 0) // block_size] * block_size + t % block_size
            for table, context, new in zip(tables, layout.context_lens, layout.query_lens, strict=True)
            for t in range(context, context + new)]


def with_tail(pages, table, length):
    """Gathers a sequence's blocks whole, the end of the last one included."""
    return pages.index_select(0, table[:-(-length // pages.shape[1])]).flatten(0, 1).transpose(0, 1)


def free_at_once(self, blocks):
    """Gives blocks back whoever else holds them."""
    for block in reversed(blocks):
        self.ref_counts[block] -= 1
        self.free_list.append(block)


def agreed(model: LoadedModel, block_size: int) -> int:
    """How many of 24 tokens paged shares with rung 1 before the first that differs, or before it fails."""
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    first = outputs(build("nocache", model), [PROMPT], params)[0]
    engine = build("paged", model, block_size=block_size, num_blocks=blocks(32, block_size))
    engine.cache.keys.fill_(float("nan"))
    engine.cache.values.fill_(float("nan"))
    request = Request("r", PROMPT, params)
    engine.add(request)
    while engine.has_unfinished():
        engine.step()
    ours = request.output_token_ids
    return next((i for i, token in enumerate(first) if i >= len(ours) or ours[i] != token), 24)


def test_a_slot_off_by_one_is_right_in_the_first_block(tiny_llama: LoadedModel,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    assert [agreed(tiny_llama, size) for size in (4, 16, 32)] == [24, 24, 24]
    monkeypatch.setattr(paged_module, "slot_mapping", one_late)
    assert one_late([[7, 2]], Layout.of([(0, 2, 4)], CPU), 4) == [30, 31, 28, 9]     # right: 30, 31, 8, 9
    assert agreed(tiny_llama, 32) == 24 and agreed(tiny_llama, 4) == 0
    says("With blocks of 32 the first break gives all 24 tokens of our test right")


def test_reading_the_tail_meets_nan_at_once(tiny_llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_module, "gather", with_tail)
    assert agreed(tiny_llama, 1) == 24                     # no tail to read
    assert agreed(tiny_llama, 4) == 0


@torch.inference_mode()
def survivor(model: LoadedModel, checked: bool = False) -> tuple[list[int], PagedCache]:
    """Eight tokens of C, which shares a block with A; A ends after the first, and D takes what is free."""
    llama, counters = load_llama(model, Plain()), Counters()
    cache = PagedCache(model.config, 4, 4, model.dtype, CPU, GatherSdpa())
    cache.reserve("A", 4)
    feed(llama, cache, {"A": PROMPT[:4]}, counters)
    cache.pool.share(cache.tables["A"])
    cache.tables["C"], cache.lengths["C"] = list(cache.tables["A"]), 4
    ids = PROMPT[:5]
    for step in range(8):
        cache.reserve("C", len(ids))
        ids.append(int(feed(llama, cache, {"C": ids}, counters)[0].argmax()))
        if step == 0:
            cache.free("A")
            if checked:
                cache.check()
            cache.reserve("D", 4)
            feed(llama, cache, {"D": [3, 1, 4, 1]}, counters)
    return ids[5:], cache


def test_a_block_freed_early_is_caught_by_check_before_any_token(tiny_llama: LoadedModel,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    expected = outputs(build("nocache", tiny_llama), [PROMPT[:5]], SamplingParams(max_tokens=8))[0]
    tokens, cache = survivor(tiny_llama, checked=True)
    assert tokens == expected
    cache.check()
    monkeypatch.setattr(BlockPool, "free", free_at_once)
    assert agreed(tiny_llama, 4) == 24                     # no engine of this chapter shares
    tokens, cache = survivor(tiny_llama)
    assert tokens[0] == expected[0] and tokens != expected
    assert set(cache.tables["C"]) & set(cache.tables["D"]), "C and D have no block in common"
    with pytest.raises(AssertionError, match="block 0 has 1 holders; free: True"):
        survivor(tiny_llama, checked=True)                 # when A ended, before D took the block


# --- the pictures ----------------------------------------------------------------------------------------------------


def test_the_pictures_show_what_was_measured(smol: LoadedModel) -> None:
    measured = {1: 0.0, 16: 0.03, 256: 0.4}
    axes = ch04.waste_picture(measured, 200.0).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "16", "256"]
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([0, 3, 40])
    near = ch04.memory_picture(smol.config, 256).axes[1]
    paged, stored = (list(line.get_ydata()) for line in near.lines)
    assert paged[0] == pytest.approx(blocks(100) * BLOCK / 1e6) and stored[0] == pytest.approx(100 * PER_TOKEN / 1e6)
    assert len(ch04.slots_picture(*ch04.used_pool()).axes[0].texts) > 40
    assert len(ch04.pool_picture(ch04.pool_story()).axes) == 6
