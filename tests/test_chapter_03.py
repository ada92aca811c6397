"""Chapter 3: its worked examples, the numbers in its text, and its deliberate breaks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from liteinfer.cache.contiguous import ContiguousCache, sdpa
from liteinfer.engines import native_cache
from liteinfer.loading import LoadedModel
from liteinfer.model import llama as llama_module
from liteinfer.model.layout import Layout
from liteinfer.model.linear import Packed, Plain
from liteinfer.model.llama import load_llama
from liteinfer.plots import ch03
from liteinfer.request import SamplingParams
from tests.conftest import build, outputs

pytestmark = pytest.mark.ch03
README = (Path(__file__).parents[1] / "chapters" / "03_native" / "README.md").read_text(encoding="utf-8")
PROMPT = [9, 44, 1, 62, 15, 33, 8, 2, 60]
CPU = torch.device("cpu")
PRODUCTS = ("aten.linear", "aten.mm", "aten.addmm", "mkldnn._linear_pointwise")


def says(*texts: str) -> None:
    """The chapter's text has these words, wherever its lines break."""
    readme = " ".join(README.split())
    assert [text for text in texts if " ".join(text.split()) not in readme] == []


# --- worked by hand --------------------------------------------------------------------------------------------------


def test_the_layout_of_two_sequences() -> None:
    layout = Layout.of([(0, 5, 1), (1, 0, 3)], CPU)
    assert layout.positions.tolist() == [5, 0, 1, 2]
    assert layout.query_start_loc.tolist() == [0, 1, 4]
    assert layout.seq_lens.tolist() == [6, 3]
    says("positions          5    0  1  2", "query_start_loc    0    1        4", "seq_lens           6    3")


def test_a_step_writes_only_its_own_slots() -> None:
    _, before, after = ch03.ragged_step()
    changed = ~((before == after) | (before.isnan() & after.isnan()))
    written = [changed[:, seq].any(dim=(0, 1, 3)).nonzero().flatten().tolist() for seq in range(2)]
    assert written == [[5], [0, 1, 2]]
    never = after.isnan().all(dim=(0, 2, 4))
    assert never.any(dim=0).tolist() == [False] * 3 + [True] * 7 and int(never.sum()) == 11
    says("11 of the 20 are never touched")


def test_what_each_row_of_the_example_may_see(tiny_llama: LoadedModel) -> None:
    """a5 sees 6 keys; b0, b1, b2 see 1, 2, 3. Values that name their slot show it: the mean of the visible ones."""
    cache = ContiguousCache(tiny_llama.config, 2, 10, torch.float64, CPU)
    cache.values[:] = torch.arange(10.0).view(1, 1, 1, 10, 1)
    cache.keys.zero_()
    cache.lengths = [5, 0]
    layout = Layout.of([(0, 5, 1), (1, 0, 3)], CPU)
    cache.begin(layout)
    k = torch.zeros(4, 2, 8, dtype=torch.float64)
    v = layout.positions.double().view(4, 1, 1).expand(4, 2, 8)
    out = cache.attend(0, torch.zeros(4, 4, 8, dtype=torch.float64), k, v)
    torch.testing.assert_close(out[:, 0, 0].tolist(), [2.5, 0.0, 0.5, 1.0])


def test_is_causal_puts_its_triangle_at_the_top_left() -> None:
    q, k = torch.zeros(2, 1, 4), torch.zeros(1, 5, 4)                        # [L, H, D], [K, S, D]
    v = torch.arange(5.0).view(1, 5, 1).expand(1, 5, 4)
    torch.testing.assert_close(sdpa(q, k, v)[:, 0, 0].tolist(), [1.5, 2.0])  # slots 0..3 and 0..4
    torch.testing.assert_close(top_left(q, k, v)[:, 0, 0].tolist(), [0.0, 0.5])


# --- the numbers in the text -----------------------------------------------------------------------------------------


def test_bytes_of_a_step(smol: LoadedModel) -> None:
    found = ch03.decode_bytes(smol, context=160)
    linear = {kind: found[kind] for kind in (*ch03.KINDS, "head")}
    assert linear == {"QKV": 66_355_200, "attention output": 39_813_120, "gate and up": 212_336_640,
                      "down": 106_168_320, "head": 113_246_208}
    assert sum(linear.values()) == 537_919_488
    assert found["embedding row"] == 2_304
    assert found["keys and values of 160 tokens"] == 7_372_800
    assert sum(w.nbytes for w in smol.weights().values()) == 538_060_032
    says("537,919,488", "2,304", "113,246,208", "7,372,800")


def test_the_whole_cache_is_taken_at_the_start(smol: LoadedModel) -> None:
    engine = build("native-eager", smol)
    assert engine.cache.keys.shape == (30, 1, 3, 8192, 64)
    assert engine.cache.nbytes == 377_487_360 and engine.cache.nbytes // 8192 == 46_080
    stored = 128 + 64 - 1                                                    # the last token is never fed
    assert stored * 46_080 == 8_801_280 and round(8_801_280 / 377_487_360 * 100, 1) == 2.3
    assert (6_000_000_000 - 538_060_032) // 377_487_360 == 14
    says("8,192 tokens x 46,080 bytes = 377,487,360", "stores 191 of them, 8,801,280", "2.3 %", "97.7 %", "fourteen")


class CountProducts(TorchDispatchMode):
    """Counts the matrix products that reach torch."""

    products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.products += str(func.overloadpacket) in PRODUCTS
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("linear", "products"), [(Plain(), 211), (Packed(), 121)], ids=["plain", "packed"])
def test_products_of_a_step(smol: LoadedModel, linear: Plain | Packed, products: int) -> None:
    """7 weights a layer and a head; fused, 4 a layer and a head."""
    llama = load_llama(smol, linear)
    cache = ContiguousCache(smol.config, 1, 4, smol.dtype, CPU)
    layout = Layout.of([(0, 0, 1)], CPU)
    cache.begin(layout)
    with torch.inference_mode(), CountProducts() as counted:
        llama(torch.tensor([504]), layout.positions, cache, torch.tensor([0]))
    assert counted.products == products
    q, k, v = llama.layers[0].qkv(torch.ones(1, 576))
    assert [y.shape[1] for y in (q, k, v)] == [576, 192, 192]
    says(str(products), "576 + 192 + 192 = 960")


def test_pairs_turn_by_what_the_text_says(smol: LoadedModel) -> None:
    """Pair 0 turns one radian a token, the last one once in half a million tokens or so."""
    inv_freq = llama_module.inverse_frequencies(smol.config)
    assert inv_freq[0] == 1 and len(inv_freq) == 32
    assert round(float(2 * torch.pi / inv_freq[0]), 2) == 6.28
    assert round(float(2 * torch.pi / inv_freq[-1]), -3) == 438_000
    says("6.28", "438,000")


# --- the deliberate breaks -------------------------------------------------------------------------------------------


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE over neighbours (x[0], x[1]) instead of halves."""
    half = x.shape[-1] // 2
    cos, sin = (t[..., :half].repeat_interleave(2, dim=-1) for t in (cos, sin))
    return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2) * sin


class Restarting(Layout):
    """Positions that begin at 0 in every step."""

    @staticmethod
    def of(sequences, device):
        right = Layout.of(sequences, device)
        return dataclasses.replace(right, positions=torch.cat([torch.arange(n) for n in right.query_lens]))


def top_left(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention with torch's own triangle, whatever L and S are."""
    q, k, v = q.transpose(0, 1)[None], k[None], v[None]
    return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=True)[0].transpose(0, 1)


def agreed(model: LoadedModel) -> int:
    """How many of 24 tokens native-eager shares with rung 1 before the first that differs."""
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    ours, first = (outputs(build(row, model), [PROMPT], params)[0] for row in ("native-eager", "nocache"))
    return next((i for i, (a, b) in enumerate(zip(ours, first, strict=True)) if a != b), 24)


def test_the_wrong_pairs_are_caught_at_once(tiny_llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert agreed(tiny_llama) == 24
    monkeypatch.setattr(llama_module, "rotate", interleaved)
    assert agreed(tiny_llama) == 0


def test_restarting_positions_get_the_first_token_right(tiny_llama: LoadedModel,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_cache, "Layout", Restarting)
    assert 1 <= agreed(tiny_llama) < 24


def test_the_wrong_triangle_shows_only_in_a_prompt_fed_in_parts(tiny_llama: LoadedModel,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode():
        whole = tiny_llama.transformers_model()(torch.tensor([PROMPT]), use_cache=False).logits[0]
    for attention, right in ((sdpa, [True] * 9), (top_left, [True] * 4 + [False] * 5)):
        cache = ContiguousCache(tiny_llama.config, 1, 16, tiny_llama.dtype, CPU, attention)
        got = []
        for done, part in ((0, PROMPT[:4]), (4, PROMPT[4:])):
            layout = Layout.of([(0, done, len(part))], CPU)
            cache.begin(layout)
            with torch.inference_mode():
                got.append(load_llama(tiny_llama, Plain())(torch.tensor(part), layout.positions, cache,
                                                           torch.arange(len(part))))
        assert ((torch.cat(got) - whole).abs().amax(dim=-1) < 1e-4).tolist() == right
    monkeypatch.setattr(ContiguousCache.__init__, "__defaults__", (top_left,))
    assert agreed(tiny_llama) == 24   # no engine of this chapter feeds a prompt in parts


# --- the pictures ----------------------------------------------------------------------------------------------------


def test_the_time_picture_shows_the_chapters_rows() -> None:
    ceiling = {"linear_ms": 40.0, "rest_ms": 10.0, "measured_itl_ms": 50.0, "itl_ms": 30.0}
    result = {"rows": [{"name": f"liteinfer-{name}", "ceiling": ceiling} for name in (*ch03.ROWS, "nocache")]}
    axes = ch03.time_picture(result).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == list(ch03.ROWS)
    assert [bar.get_width() for bar in axes.patches] == [40.0] * 3 + [10.0] * 3
