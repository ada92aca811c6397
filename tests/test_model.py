"""Our forward against transformers': rotary frequencies, linear layers, logits."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from liteinfer.cache.contiguous import ContiguousCache
from liteinfer.loading import LoadedModel, RopeScaling, tiny_model
from liteinfer.model.layout import Layout
from liteinfer.model.linear import Packed, Plain, onednn_works
from liteinfer.model.llama import load_llama
from liteinfer.model.rope import cos_sin, inverse_frequencies, rotate

pytestmark = pytest.mark.ch03
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def logits(model: LoadedModel, ids: list[int], linear: Plain | Packed) -> torch.Tensor:
    cache = ContiguousCache(model.config, 1, len(ids), model.dtype, model.device)
    layout = Layout.of([(0, 0, len(ids))], model.device)
    cache.begin(layout)
    with torch.inference_mode():
        return load_llama(model, linear)(torch.tensor(ids), layout.positions, cache, torch.arange(len(ids)))


def reference(model: LoadedModel, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model.transformers_model()(torch.tensor([ids]), use_cache=False).logits[0]


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rope", [None, LLAMA3, {"rope_type": "default", "rope_theta": 100000.0}])
@pytest.mark.parametrize("linear", [Plain(), Packed()], ids=lambda linear: linear.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logits_equal_transformers(architecture: str, tied: bool, rope: dict | None, linear: Plain | Packed,
                                   dtype: torch.dtype) -> None:
    """200 positions, so that theta and scaling matter (L4, L5)."""
    settings = {} if rope is None else {"rope_parameters": rope}
    model = tiny_model(architecture, dtype=dtype, tie_word_embeddings=tied, **settings)
    ids = torch.randint(0, 64, (200,), generator=torch.Generator().manual_seed(1)).tolist()
    torch.testing.assert_close(logits(model, ids, linear), reference(model, ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1), (8, 2)])
@pytest.mark.parametrize("head_dim", [8, 16])
def test_grouped_heads(heads: int, kv_heads: int, head_dim: int) -> None:
    model = tiny_model("llama", num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim)
    ids = list(range(20))
    torch.testing.assert_close(logits(model, ids, Plain()), reference(model, ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize("theta", [10000.0, 100000.0, 500000.0])
@pytest.mark.parametrize("scaled", [False, True])
def test_frequencies_equal_transformers(theta: float, scaled: bool) -> None:
    rope = {**LLAMA3, "rope_theta": theta} if scaled else {"rope_type": "default", "rope_theta": theta}
    model = tiny_model("llama", head_dim=64, rope_parameters=rope)
    ours = inverse_frequencies(model.config)
    theirs = model.transformers_model().model.rotary_emb.inv_freq
    if scaled:
        direct, _ = ROPE_INIT_FUNCTIONS["llama3"](model.transformers_model().config)
        torch.testing.assert_close(theirs, direct, rtol=0, atol=0)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


def test_llama3_scaling_by_hand(tiny_llama: LoadedModel) -> None:
    """One turn within the old context: slowed by the factor. Four turns or more: kept. Between: blended."""
    config = dataclasses.replace(tiny_llama.config, head_size=64, rope_theta=10000.0,
                                 rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64))
    plain = inverse_frequencies(dataclasses.replace(config, rope_scaling=None))
    scaled = inverse_frequencies(config)
    turns = 64 * plain / (2 * torch.pi)
    assert (scaled[turns >= 4] == plain[turns >= 4]).all() and (turns >= 4).any()
    assert torch.allclose(scaled[turns <= 1], plain[turns <= 1] / 8) and (turns <= 1).any()
    between = (turns > 1) & (turns < 4)
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()


def test_rotation_by_hand() -> None:
    """D = 2 at position 1: the pair (1, 0) turns by one radian to (cos 1, sin 1); lengths are kept."""
    cos, sin = cos_sin(torch.tensor([1.0]), torch.tensor([0, 1, 5]), torch.float64)
    turned = rotate(torch.tensor([[[1.0, 0.0]]] * 3, dtype=torch.float64), cos, sin)
    one = torch.tensor(1.0)
    torch.testing.assert_close(turned[1, 0], torch.stack([one.cos(), one.sin()]).double(), rtol=0, atol=1e-7)
    assert turned[0, 0].tolist() == [1.0, 0.0]
    torch.testing.assert_close(turned.norm(dim=-1), torch.ones(3, 1).double(), rtol=0, atol=1e-6)


def test_a_query_and_a_key_meet_at_their_distance() -> None:
    inv_freq = inverse_frequencies(tiny_model("llama").config)
    q, k = torch.randn(2, 1, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def score(at: int, other: int) -> float:
        (a, b), (c, d) = (cos_sin(inv_freq, torch.tensor([p]), torch.float64) for p in (at, other))
        return float((rotate(q, a, b) * rotate(k, c, d)).sum())

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-4)
    assert abs(score(7, 3) - score(7, 4)) > 1e-2


@pytest.mark.parametrize("rows", [1, 3, 5, 33])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_packed_layers_compute_what_plain_ones_do(rows: int, bias: bool, dtype: torch.dtype) -> None:
    make = torch.Generator().manual_seed(0)
    weights = [torch.randn(out, 24, generator=make, dtype=dtype) for out in (40, 8, 8)]
    biases = [torch.randn(len(w), generator=make, dtype=dtype) if bias else None for w in weights]
    x = torch.randn(rows, 48, generator=make, dtype=dtype)[:, ::2]   # not contiguous
    plain, packed = Plain()(weights, biases)(x), Packed()(weights, biases)(x)
    assert [y.shape for y in packed] == [(rows, 40), (rows, 8), (rows, 8)]
    for a, b in zip(plain, packed, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_packed_says_which_code_runs_and_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert Packed().path(torch.float64, cpu) == "fused F.linear"
    assert not onednn_works(torch.float32, torch.device("cuda"))
    assert Packed().path(torch.float32, cpu) in ("oneDNN packed", "fused F.linear")

    class Absent:
        def __getattr__(self, name: str) -> None:
            raise AttributeError(name)

    monkeypatch.setattr(torch.ops, "mkldnn", Absent())
    assert Packed().path(torch.float32, cpu) == "fused F.linear"
    x, w = torch.randn(2, 3), torch.randn(4, 3)
    torch.testing.assert_close(Packed()([w], [None])(x)[0], x @ w.T)


def test_packed_layers_free_what_they_fused_unless_a_plain_row_holds_it() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    read, reads = model._read, []

    def noted() -> dict[str, torch.Tensor]:
        weights = read()
        reads.append(weakref.ref(weights["model.layers.0.self_attn.q_proj.weight"]))
        return weights

    model._read = noted
    load_llama(model, Packed())
    gc.collect()
    assert [fused() for fused in reads] == [None]
    plain = load_llama(model, Plain())
    assert len(reads) == 2 and reads[1]() is not None
    theirs = model.transformers_model()
    assert plain.embedding.data_ptr() == theirs.model.embed_tokens.weight.data_ptr()
    assert plain.layers[0].input_norm.data_ptr() == theirs.model.layers[0].input_layernorm.weight.data_ptr()
    assert len(reads) == 2 and load_llama(model, Plain()) is plain


def test_the_bundled_model_equals_transformers(smol: LoadedModel) -> None:
    ids = smol.encode("The lighthouse keeper wrote in two logbooks. In the first she put the weather, and")
    for linear in (Plain(), Packed()):
        torch.testing.assert_close(logits(smol, ids, linear), reference(smol, ids), rtol=0, atol=1e-4)
