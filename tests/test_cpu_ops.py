"""The compiled operators against torch, for float and double, and what happens where nothing can be compiled."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from liteinfer.cache.paged import GatherSdpa, PagedLayout
from liteinfer.fast.attention import FastAttention, InPlace
from liteinfer.fast.linear import Panels
from liteinfer.kernels import build, cpu
from liteinfer.kernels.cpu import CpuOps, cpu_ops
from liteinfer.loading import tiny_model
from liteinfer.model.layout import Layout
from liteinfer.model.rope import rotate

needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler")
pytestmark = pytest.mark.ch09

DTYPES = (torch.float32, torch.float64)
CLOSE = {torch.float32: {"rtol": 2e-5, "atol": 2e-5}, torch.float64: {"rtol": 1e-12, "atol": 1e-12}}


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, equal_nan=True, **CLOSE[found.dtype])


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=DTYPES, ids=["float32", "float64"])
def ops(request: pytest.FixtureRequest) -> CpuOps:
    if build.compiler() is None:
        pytest.skip("needs a C++ compiler")
    return CpuOps(request.param)


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 12, 13, 25, 32, 100, 301])
@pytest.mark.parametrize(("inner", "out"), [(1, 1), (3, 40), (64, 32), (65, 33), (576, 100), (1536, 65)])
def test_linear_layers(ops: CpuOps, rows: int, inner: int, out: int) -> None:
    x, weight = numbers(rows, inner, dtype=ops.dtype), numbers(out, inner, dtype=ops.dtype, seed=1)
    bias = numbers(out, dtype=ops.dtype, seed=2)
    scale = math.sqrt(inner)
    panels = ops.pack(weight / scale)
    close(ops.linear(x, panels, None, out), F.linear(x, weight / scale))
    close(ops.linear(x, panels, bias, out), F.linear(x, weight / scale, bias))


def test_a_linear_layer_reads_rows_of_a_wider_tensor_and_writes_no_other_row(ops: CpuOps) -> None:
    wide, weight = numbers(9, 50, dtype=ops.dtype), numbers(21, 20, dtype=ops.dtype, seed=1)
    close(ops.linear(wide[:, 10:30], ops.pack(weight), None, 21), F.linear(wide[:, 10:30], weight))
    one = ops.linear(wide[3:4, 10:30], ops.pack(weight), None, 21)
    assert torch.equal(one, ops.linear(wide[3:4, 10:30].contiguous(), ops.pack(weight), None, 21))


def test_what_is_not_a_number_reaches_its_own_row_only(ops: CpuOps) -> None:
    x, weight = numbers(14, 32, dtype=ops.dtype), numbers(40, 32, dtype=ops.dtype, seed=1)
    x[5, 7] = float("nan")
    wrong = ops.linear(x, ops.pack(weight), None, 40).isnan().any(dim=1)
    assert wrong.nonzero().flatten().tolist() == [5]
    gate = numbers(3, 40, dtype=ops.dtype)
    gate[1, 2] = gate[2, 39] = float("nan")
    assert ops.silu_mul(gate, torch.ones_like(gate)).isnan().nonzero().tolist() == [[1, 2], [2, 39]]


@pytest.mark.parametrize(("rows", "hidden"), [(1, 64), (1, 576), (3, 37), (40, 576)])
def test_norms_with_and_without_a_residual(ops: CpuOps, rows: int, hidden: int) -> None:
    x, add = numbers(rows, hidden, dtype=ops.dtype), numbers(rows, hidden, dtype=ops.dtype, seed=1)
    weight = numbers(hidden, dtype=ops.dtype, seed=2)
    before = x.clone()
    close(ops.add_rms_norm(x, None, weight, 1e-5), F.rms_norm(before, weight.shape, weight, 1e-5))
    assert torch.equal(x, before)
    close(ops.add_rms_norm(x, add, weight, 1e-5), F.rms_norm(before + add, weight.shape, weight, 1e-5))
    assert torch.equal(x, before + add)


@pytest.mark.parametrize(("rows", "inner"), [(1, 64), (1, 1536), (3, 37), (33, 96)])
def test_silu_and_product(ops: CpuOps, rows: int, inner: int) -> None:
    both = 6 * numbers(rows, 2 * inner, dtype=ops.dtype)
    gate, up = both.split([inner, inner], dim=-1)
    close(ops.silu_mul(gate, up), F.silu(gate) * up)


def test_silu_far_from_zero(ops: CpuOps) -> None:
    gate = torch.tensor([[-1000.0, -200, -100, -90, -87.5, -80, -50, -1e-6, 0, 1e-6, 50, 80, 87.5, 90, 100, 1000]],
                        dtype=ops.dtype).repeat(1, 3)
    found = ops.silu_mul(gate, torch.ones_like(gate))
    assert (found - F.silu(gate)).abs().max() < 1e-30 + 1e-6 * gate.abs().max() and not found.isnan().any()


def test_rotation_and_store(ops: CpuOps) -> None:
    n, heads, kv, size, blocks = 5, 6, 2, 16, 7
    fused = numbers(n, (heads + 2 * kv) * size, dtype=ops.dtype)
    q, k, v = (part.unflatten(-1, (-1, size)) for part in fused.split([heads * size, kv * size, kv * size], dim=-1))
    angles = numbers(n, size // 2, dtype=ops.dtype, seed=1).repeat(1, 2)[:, None]
    slots = torch.tensor([9, 3, 27, 0, 12])
    pages = [torch.full((blocks, 4, kv, size), 7.0, dtype=ops.dtype) for _ in range(2)]
    expected = [page.clone() for page in pages]
    expected[0].flatten(0, 1)[slots] = rotate(k, angles.cos(), angles.sin())
    expected[1].flatten(0, 1)[slots] = v
    turned = rotate(q, angles.cos(), angles.sin())
    ops.rotate_and_store(q, k, v, angles.cos(), angles.sin(), slots, *pages)
    close(q.contiguous(), turned)
    close(pages[0], expected[0])
    assert torch.equal(pages[1], expected[1])


def step(contexts: list[int], news: list[int], dtype: torch.dtype, heads: int, kv: int, size: int, block_size: int
         ) -> tuple[Tensor, Tensor, Tensor, PagedLayout]:
    """Queries, pages, and the layout of sequences whose blocks lie in no order."""
    layout = Layout.of([(i, c, n) for i, (c, n) in enumerate(zip(contexts, news, strict=True))], torch.device("cpu"))
    counts = [-(-(c + n) // block_size) for c, n in zip(contexts, news, strict=True)]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(3)).tolist()
    null, widest = sum(counts), max(counts)
    tables = [[order.pop() for _ in range(count)] for count in counts]
    tables = [table + [null] * (widest - len(table)) for table in tables]
    pages = [numbers(null + 1, block_size, kv, size, dtype=dtype, seed=seed) for seed in (4, 5)]
    pages[0][null] = pages[1][null] = float("nan")                           # nobody may look there
    paged = PagedLayout(layout.seq_ids, layout.context_lens, layout.query_lens, layout.query_start_loc,
                        layout.seq_lens, layout.positions, torch.tensor(tables, dtype=torch.int32),
                        torch.zeros(sum(news), dtype=torch.int64))
    return numbers(sum(news), heads, size, dtype=dtype, seed=6), pages[0], pages[1], paged


@pytest.mark.parametrize(("contexts", "news"), [
    ([0], [1]), ([0, 300], [130, 70]), ([1], [1]), ([15], [1]), ([16], [1]), ([17, 3, 40], [1, 1, 1]),
    ([5, 0, 31], [4, 7, 1]), ([0, 100], [16, 16]), ([0, 3, 200], [40, 1, 17]), ([1000], [1]), ([7] * 32, [1] * 32)])
@pytest.mark.parametrize(("heads", "kv", "size", "block_size"), [(4, 2, 16, 16), (9, 3, 64, 16), (2, 1, 80, 4),
                                                                 (4, 4, 128, 8), (8, 1, 32, 1)])
def test_attention_in_place(ops: CpuOps, contexts: list[int], news: list[int], heads: int, kv: int, size: int,
                            block_size: int) -> None:
    q, keys, values, layout = step(contexts, news, ops.dtype, heads, kv, size, block_size)
    assert ops.fits(size)
    close(InPlace()(q, keys, values, layout), GatherSdpa()(q, keys, values, layout))


def test_queries_that_lie_in_a_fused_tensor(ops: CpuOps) -> None:
    q, keys, values, layout = step([9, 2], [1, 3], ops.dtype, 4, 2, 16, 4)
    fused = torch.cat((q.flatten(1), torch.full((4, 50), 9.0, dtype=ops.dtype)), dim=1)
    found = InPlace()(fused[:, :64].unflatten(-1, (4, 16)), keys, values, layout)
    close(found, GatherSdpa()(q, keys, values, layout))


def test_a_score_that_is_not_a_number_spoils_its_own_query_only(ops: CpuOps) -> None:
    q, keys, values, layout = step([9, 2], [1, 1], ops.dtype, 4, 2, 16, 4)
    q[1, 2, 3] = float("nan")
    wrong = InPlace()(q, keys, values, layout).isnan().all(dim=-1)
    assert wrong.nonzero().tolist() == [[1, 2]]


@pytest.mark.parametrize(("size", "dtype", "device", "words"), [
    (18, torch.float32, "cpu", "head_size is 18"), (64, torch.bfloat16, "cpu", "dtype is torch.bfloat16"),
    (64, torch.float32, "cuda", "device cuda")])
@needs_compiler
def test_what_the_kernel_does_not_take_is_refused_and_then_gathered(size: int, dtype: torch.dtype, device: str,
                                                                    words: str) -> None:
    config = tiny_model(head_dim=size).config
    with pytest.raises(ValueError, match=words):
        InPlace().check(config, dtype, torch.device(device))
    if device == "cpu":
        fast = FastAttention()
        fast.check(config, dtype, torch.device(device))
        assert isinstance(fast.inner, GatherSdpa) and fast.gathers


# ---- without them ----------------------------------------------------------------------------------------------

@pytest.fixture
def nothing_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("LITEINFER_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "compiler", lambda: None)
    for cached in (build.library, cpu_ops):
        cached.cache_clear()
    yield
    for cached in (build.library, cpu_ops):
        cached.cache_clear()


def test_without_a_compiler_everything_runs_as_before(nothing_built: None) -> None:
    with pytest.raises(build.NotBuilt, match=r"no C\+\+ compiler: install g\+\+"):
        build.library()
    assert cpu_ops(torch.float32) is None and Panels().path(torch.float64, torch.device("cpu")) == "fused F.linear"
    x, weight = numbers(3, 20, dtype=torch.float64), numbers(21, 20, dtype=torch.float64, seed=1)
    close(Panels()([weight], [None])(x)[0], F.linear(x, weight))
    fast = FastAttention()
    fast.check(tiny_model().config, torch.float64, torch.device("cpu"))
    assert isinstance(fast.inner, GatherSdpa)


def test_other_dtypes_are_left_to_torch() -> None:
    assert cpu_ops(torch.bfloat16) is None and cpu_ops(torch.float32, "cuda") is None


@pytest.mark.parametrize(("source", "found", "words"), [
    ("int main(", None, "failed: .*error"), ("int f;", "no-such-compiler", "no-such-compiler failed: .*No such file")])
@needs_compiler
def test_a_compiler_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str,
                                                     found: str | None, words: str) -> None:
    if found:
        monkeypatch.setenv("CXX", found)
    (tmp_path / "bad.cpp").write_text(source)
    with pytest.raises(build.NotBuilt, match=words):
        build.load(tmp_path / "bad.cpp", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@needs_compiler
def test_it_is_compiled_once_and_again_when_the_source_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Path] = []
    compile_it = build.build

    def noted(source: Path, target: Path) -> None:
        compiled.append(target)
        compile_it(source, target)

    monkeypatch.setattr(build, "build", noted)
    source = tmp_path / "one.cpp"
    for text, count in (("extern \"C\" int f() { return 1; }", 1), ("extern \"C\" int f() { return 1; }", 1),
                        ("extern \"C\" int f() { return 2; }", 2)):
        source.write_text(text)
        assert build.load(source, tmp_path / "cache").f() == count
        assert len(compiled) == count
    source.write_text("other")
    monkeypatch.setattr(build, "build", lambda source, target: target.write_bytes(b"not a library"))
    with pytest.raises(build.NotBuilt, match="cannot be loaded"):
        build.load(source, tmp_path / "cache")


@needs_compiler
def test_it_shares_torch_s_threads() -> None:
    build.library()
    maps = Path("/proc/self/maps")
    if not maps.is_file():
        pytest.skip("needs /proc")
    assert len({line.split()[-1] for line in maps.read_text().splitlines() if "gomp" in line or "iomp" in line}) == 1
    assert cpu.cpu_ops(torch.float32) is not None
