"""The paged cache: the contiguous cache's keys and values in other places, and no block more than needed."""

from __future__ import annotations

import random

import psutil
import pytest
import torch

from liteinfer.cache import pool_size as sizing
from liteinfer.cache.block_pool import OutOfBlocks
from liteinfer.cache.contiguous import ContiguousCache
from liteinfer.cache.paged import GatherSdpa, PagedCache, gather
from liteinfer.cache.pool_size import pool_size
from liteinfer.engines.paged import blocks_at_most
from liteinfer.loading import LoadedModel, tiny_model
from liteinfer.model.layout import Layout
from liteinfer.model.linear import Plain
from liteinfer.model.llama import load_llama
from liteinfer.request import Request, SamplingParams
from tests.conftest import build, outputs

pytestmark = pytest.mark.ch04
CPU = torch.device("cpu")


def paged(model: LoadedModel, num_blocks: int, block_size: int) -> PagedCache:
    return PagedCache(model.config, num_blocks, block_size, model.dtype, model.device, GatherSdpa())


@torch.inference_mode()
def feed(model: LoadedModel, cache: PagedCache | ContiguousCache,
         *sequences: tuple[int, int, list[int]]) -> torch.Tensor:
    """A step of (sequence, tokens held, new ids); logits [N, V]."""
    layout = Layout.of([(seq, held, len(ids)) for seq, held, ids in sequences], CPU)
    if isinstance(cache, PagedCache):
        for seq, held, ids in sequences:
            cache.reserve(seq, held + len(ids))
    cache.begin(layout)
    flat = torch.tensor([i for *_, ids in sequences for i in ids])
    return load_llama(model, Plain())(flat, layout.positions, cache, torch.arange(len(flat)))


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_gathered_keys_and_values_are_bitwise_those_of_the_contiguous_cache(block_size: int) -> None:
    """Random steps of four sequences: prefill, extension and decode mixed, one of them freed and started again."""
    model, rng = tiny_model("llama"), random.Random(block_size)
    cache = paged(model, 160 // block_size, block_size)
    reference = ContiguousCache(model.config, 4, 64, model.dtype, CPU)
    cache.keys.fill_(float("nan"))
    cache.values.fill_(float("nan"))
    held = [0] * 4
    for step in range(12):
        chosen = rng.sample(range(4), rng.randint(1, 4))
        sequences = [(seq, held[seq], [rng.randrange(64) for _ in range(rng.choice([1, 1, 3, 5]))]) for seq in chosen]
        assert torch.equal(feed(model, cache, *sequences), feed(model, reference, *sequences))
        for seq, _, ids in sequences:
            held[seq] += len(ids)
        for seq in (seq for seq in range(4) if held[seq]):
            table = torch.tensor(cache.tables[seq])
            for layer in range(model.config.num_layers):
                for pages, rows in ((cache.keys, reference.keys), (cache.values, reference.values)):
                    assert torch.equal(gather(pages[layer], table, held[seq]), rows[layer, seq, :, :held[seq]])
        if step == 6:
            for each in (cache, reference):
                each.free(2)
            held[2] = 0
        cache.check()


def test_p1_blocks_held_follow_the_tokens_stored() -> None:
    """ceil(stored / 4) at every step; all back at the end; the words are rung 1's."""
    model = tiny_model("llama")
    for length in (1, 3, 4, 5, 7, 8, 9):
        prompt = list(range(10, 10 + length))
        expected = outputs(build("nocache", model), [prompt], SamplingParams(max_tokens=9))[0]
        engine = build("paged", model, block_size=4, num_blocks=8)
        request = Request("r", prompt, SamplingParams(max_tokens=9))
        engine.add(request)
        for step in range(9):
            assert engine.has_unfinished()
            engine.step()
            stored = length + step if step < 8 else 0   # the ninth token is the last: all went back
            assert engine.cache.pool.num_used == -(-stored // 4)
        assert request.output_token_ids == expected
        assert not engine.has_unfinished() and engine.cache.pool.num_free == 8


def test_blocks_held_and_waste_from_120_to_136_tokens(smol: LoadedModel) -> None:
    """The done-when of the issue, on the real config: every length around 128, the waste counter by its formula."""
    cache = paged(smol, 3 * 9, 16)
    for stored in range(1, 137):
        for seq in (0, 1, 2):
            cache.reserve(seq, stored)
        cache.begin(Layout.of([(seq, stored - 1, 1) for seq in (0, 1, 2)], CPU))
        if stored >= 120:
            assert [len(cache.tables[seq]) for seq in (0, 1, 2)] == [-(-stored // 16)] * 3
            assert cache.pool.num_used == 3 * -(-stored // 16)
            assert cache.tail_slots == 3 * (-(-stored // 16) * 16 - stored) == 3 * (-stored % 16)
        cache.check()


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_the_counters_equal_their_formulas(block_size: int, tiny_llama: LoadedModel) -> None:
    engine = build("paged", tiny_llama, block_size=block_size, num_blocks=64)
    prompt, output = 10, 9
    outputs(engine, [[3] * prompt], SamplingParams(max_tokens=output))
    config, counters = tiny_llama.config, engine.counters
    block_bytes = 2 * config.num_layers * block_size * config.num_kv_heads * config.head_size * 8   # float64
    stored = range(prompt, prompt + output)                    # after each of the 9 passes
    blocks = [-(-n // block_size) for n in stored]
    assert engine.cache.block_bytes == engine.pool_size.block_bytes == block_bytes
    assert counters.forward_passes == output and counters.tokens_computed == prompt + output - 1
    assert counters.blocks_peak == max(blocks) and counters.kv_bytes_peak == max(blocks) * block_bytes
    assert counters.held_slots == sum(blocks) * block_size
    assert counters.tail_slots == sum(blocks) * block_size - sum(stored)
    assert counters.kv_bytes_copied == sum(blocks) * block_bytes, "every pass gathers every block it attends to"


def test_p2_sequences_of_one_step_write_to_different_slots() -> None:
    model = tiny_model("llama")
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12], [13, 14, 15, 16, 17, 18, 19, 20, 21]]
    cache = paged(model, 16, 4)
    together = feed(model, cache, *((seq, 0, prompt) for seq, prompt in enumerate(prompts)))
    slots = cache.layout.slot_mapping.tolist()
    assert len(set(slots)) == len(slots) == 17
    alone = [feed(model, paged(model, 16, 4), (0, 0, prompt)) for prompt in prompts]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-10)
    assert cache.layout.block_tables.dtype == torch.int32
    for seq, row in enumerate(cache.layout.block_tables.tolist()):
        assert row == cache.tables[seq] + [cache.pool.null_block] * (3 - len(cache.tables[seq]))
    nine = SamplingParams(max_tokens=9)
    expected = outputs(build("nocache", model), prompts, nine)
    assert outputs(build("paged-b4", model, block_size=4, num_blocks=16), prompts, nine) == expected


# --- running out, and other errors -------------------------------------------------------------------------------


def test_a_cache_that_runs_out_stays_as_it_was(tiny_llama: LoadedModel) -> None:
    cache = paged(tiny_llama, 4, 4)
    feed(tiny_llama, cache, (0, 0, [1] * 9))
    with pytest.raises(OutOfBlocks, match="2 KV blocks asked for, 1 of 4 are free"):
        cache.reserve(1, 5)
    with pytest.raises(OutOfBlocks):
        cache.reserve(0, 17)
    assert cache.lengths == {0: 9} and len(cache.tables[0]) == 3 and 1 not in cache.tables
    cache.check()
    cache.reserve(1, 4)
    assert cache.pool.num_free == 0


def test_a_step_that_does_not_follow_is_refused(tiny_llama: LoadedModel) -> None:
    cache = paged(tiny_llama, 4, 4)
    feed(tiny_llama, cache, (0, 0, [1, 2, 3]))
    with pytest.raises(ValueError, match="sequence 0 holds 3 tokens, the step says 2"):
        cache.begin(Layout.of([(0, 2, 1)], CPU))
    with pytest.raises(ValueError, match="sequence 0 needs 5 slots, 4 are reserved"):
        cache.begin(Layout.of([(0, 3, 2)], CPU))
    with pytest.raises(ValueError, match="sequence 7 needs 1 slots, 0 are reserved"):
        cache.begin(Layout.of([(7, 0, 1)], CPU))
    with pytest.raises(ValueError, match="cannot truncate sequence 0 to 4 tokens, it holds 3"):
        cache.truncate(0, 4)
    assert cache.lengths == {0: 3}
    cache.free(0)
    cache.free(0)     # an unknown sequence holds nothing
    assert cache.pool.num_free == 4


def test_truncating_gives_back_the_blocks_past_the_end(tiny_llama: LoadedModel) -> None:
    cache = paged(tiny_llama, 8, 4)
    feed(tiny_llama, cache, (0, 0, [1] * 13))
    kept = cache.tables[0][:2]
    for n, blocks in ((8, 2), (7, 2), (5, 2), (4, 1), (0, 0)):
        cache.truncate(0, n)
        assert cache.tables[0] == kept[:blocks] and cache.pool.num_used == blocks
        cache.check()


@pytest.mark.parametrize("row", ["paged", "paged-b4"])
def test_a_request_that_the_pool_can_never_hold_is_refused_with_both_sizes(row: str, tiny_llama: LoadedModel) -> None:
    """The last token is never fed, so 16 prompt tokens and 17 to come fit 8 blocks of 4 exactly."""
    engine = build(row, tiny_llama, num_blocks=8, block_size=4)
    told = r"16 prompt tokens \+ max_tokens 18 need 9 KV blocks of 4 tokens, the pool has 8"
    with pytest.raises(ValueError, match=told):
        engine.add(Request("big", [1] * 16, SamplingParams(max_tokens=18)))
    assert blocks_at_most(Request("fits", [1] * 16, SamplingParams(max_tokens=17)), engine.cache) == 8
    assert len(outputs(engine, [[1] * 16], SamplingParams(max_tokens=17))[0]) == 17
    assert engine.counters.blocks_peak == 8


# --- P4: the pool's size -----------------------------------------------------------------------------------------


def test_p4_a_given_number_of_blocks_is_kept_exactly(tiny_llama: LoadedModel) -> None:
    engine = build("paged", tiny_llama, num_blocks=7, block_size=8)
    assert engine.pool_size.num_blocks == engine.cache.pool.num_blocks == 7
    assert engine.cache.keys.shape[1:3] == (8, 8), "seven blocks and the null block"
    assert str(engine.pool_size) == "KV pool: 7 blocks of 8 tokens, 0.0 MB (as given)"


def test_p4_by_default_the_pool_is_what_can_be_used(tiny_llama: LoadedModel) -> None:
    engine = build("paged-b4", tiny_llama, max_model_len=100)
    assert engine.pool_size.num_blocks == 28, "7 blocks of 16 for each of 4 sequences"
    assert str(engine.pool_size).endswith("(all that 4 x 100 tokens can need)")


def test_p4_or_a_share_of_memory_if_that_is_less(smol: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 x 30 layers x 3 heads x 64 x 4 bytes a token; an eighth of 4 GB holds 678 blocks of 16."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"total": 4_000_000_000})())
    size = pool_size(smol, 16, None, num_seqs=4, max_model_len=8192)
    assert size.block_bytes == 16 * 2 * 30 * 3 * 64 * 4 == 737_280
    assert size.num_blocks == 500_000_000 // 737_280 == 678
    assert str(size) == "KV pool: 678 blocks of 16 tokens, 499.9 MB (12.5% of 4.0 GB RAM)"


def test_p4_on_cuda_the_free_memory_counts(tiny_llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1_000_000, 8_000_000))
    monkeypatch.setattr(tiny_llama, "device", torch.device("cuda"))
    size = pool_size(tiny_llama, 16, None, num_seqs=10, max_model_len=10**5)
    assert size.num_blocks == int(1_000_000 * sizing.CUDA_SHARE) // size.block_bytes
    assert size.reason == "90.0% of 0.0 GB free GPU memory"


@pytest.mark.parametrize(("settings", "named"), [
    ({"num_blocks": 0}, "num_blocks.*0"), ({"block_size": 0}, "block_size.*0"), ({"block_size": 12}, "block_size.*12")])
def test_settings_that_make_no_pool_are_refused_before_any_work(settings: dict, named: str,
                                                                tiny_llama: LoadedModel) -> None:
    with pytest.raises(ValueError, match=named):
        build("paged", tiny_llama, **settings)
