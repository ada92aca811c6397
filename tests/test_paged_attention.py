"""The Triton kernel against plain softmax in float64: in Triton's interpreter, and for real where there is a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from liteinfer.cache.paged import GatherSdpa, PagedCache, PagedLayout
from liteinfer.loading import ModelConfig, tiny_model
from liteinfer.model.layout import Layout

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")   # triton reads it when it is first imported
pytest.importorskip("triton", reason="triton is not installed: it is needed on Linux with a GPU only")

from liteinfer.kernels import paged_attention  # noqa: E402
from liteinfer.kernels.paged_attention import TritonAttention  # noqa: E402

pytestmark = pytest.mark.ch04

ROOT = Path(__file__).parents[1]
DEVICE = torch.device("cuda" if CUDA else "cpu")
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
IN_PARTS = {"programs": 1 << 20, "keys_per_part": 1}     # as many parts as max_parts allows

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]
interpreted = pytest.mark.skipif(CUDA, reason="float64 is for Triton's interpreter, which is off where there is a GPU")
DTYPES = [pytest.param(torch.float64, id="float64", marks=interpreted),
          pytest.param(torch.bfloat16, id="bfloat16", marks=on_gpu),
          pytest.param(torch.float32, id="float32", marks=on_gpu)]
dtypes = pytest.mark.parametrize("dtype", DTYPES)


@dataclass
class Step:
    """A step's input, and the output that is right."""

    q: Tensor             # [N, H, D]
    keys: Tensor          # [num_blocks + 1, block_size, K, D], NaN wherever no token of these sequences is stored
    values: Tensor
    layout: PagedLayout
    expected: Tensor      # [N, H, D] float64

    def check(self, attention: TritonAttention) -> Tensor:
        out = attention(self.q, self.keys, self.values, self.layout)
        assert out.shape == self.q.shape and out.dtype == self.q.dtype
        assert torch.isfinite(out).all(), "something was read that no token of the sequence wrote"
        error = (out.double().cpu() - self.expected).abs().max().item()
        assert error <= TOLERANCE[self.q.dtype], f"error {error:.1e}"
        return out


def make_step(sequences: Sequence[tuple[int, int]], dtype: torch.dtype, *, head_size: int = 8, block_size: int = 4,
              kv_heads: int = 2, group: int = 2, seed: int = 0) -> Step:
    """A step of (tokens cached, tokens to add) for each sequence, in blocks scattered over a pool with room to spare.

    Queries, keys and values are views of larger tensors, as a fused projection and a cache of many layers give them.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    needs = [-(-(context + new) // block_size) for context, new in sequences]
    num_blocks, heads, count = sum(needs) + 3, kv_heads * group, sum(new for _, new in sequences)
    free = torch.randperm(num_blocks, generator=generator).tolist()
    pages = torch.full((num_blocks + 1, 2, block_size, kv_heads, head_size), torch.nan, dtype=dtype)
    queries, expected, tables = random(count, heads + 2 * kv_heads, head_size), [], []
    for (context, new), need in zip(sequences, needs, strict=True):
        table = [free.pop() for _ in range(need)]
        row, total = len(expected), context + new
        stored = random(2, total, kv_heads, head_size)
        for token in range(total):
            pages[table[token // block_size], :, token % block_size] = stored[:, token]
        for i in range(new):
            seen = stored[:, :context + i + 1].double()                     # [2, S, K, D]
            expected.append(torch.stack([one_head(queries[row + i, head].double(), *seen[:, :, head // group])
                                         for head in range(heads)]))
        tables.append(table)
    layout = Layout.of([(seq, *lengths) for seq, lengths in enumerate(sequences)], DEVICE)
    block_tables = torch.full((len(tables), max(needs)), num_blocks, dtype=torch.int32)
    for seq, table in enumerate(tables):
        block_tables[seq, :len(table)] = torch.tensor(table)
    assert pages[num_blocks].isnan().all() and pages.isnan().all((1, 2, 3, 4)).sum() == 4   # null block, 3 of nobody
    pages = pages.to(DEVICE)
    paged = PagedLayout(layout.seq_ids, layout.context_lens, layout.query_lens, layout.query_start_loc,
                        layout.seq_lens, layout.positions, block_tables.to(DEVICE), torch.empty(0))
    return Step(queries.to(DEVICE)[:, :heads], pages[:, 0], pages[:, 1], paged, torch.stack(expected))


def one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention as the formula says it: q [D], k and v [S, D] -> [D]."""
    weights = (k @ q / len(q) ** 0.5).exp()
    return weights @ v / weights.sum()


# A decode, an extension of a cached sequence, a fresh prompt.
MIXED = [(6, 1), (5, 4), (0, 7)]


@dtypes
@pytest.mark.parametrize("head_size", [8, 16, 48, 64, 80, 96, 128, 256])
def test_g1_head_sizes(head_size: int, dtype: torch.dtype) -> None:
    make_step(MIXED, dtype, head_size=head_size, kv_heads=1).check(TritonAttention())
    make_step([(70, 1)], dtype, head_size=head_size, kv_heads=1).check(TritonAttention(**IN_PARTS, max_parts=2))


@dtypes
@pytest.mark.parametrize("block_size", [1, 4, 16, 64, 256])
def test_block_sizes(block_size: int, dtype: torch.dtype) -> None:
    make_step([(64, 1), (63, 3), (0, 5)], dtype, block_size=block_size, kv_heads=1).check(TritonAttention())


@dtypes
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 17])
def test_query_heads_to_a_kv_head(group: int, dtype: torch.dtype) -> None:
    make_step(MIXED, dtype, group=group).check(TritonAttention())
    make_step([(69, 1), (3, 1)], dtype, group=group).check(TritonAttention(**IN_PARTS, max_parts=2))


@dtypes
@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 33, 65])
def test_g2_nothing_is_read_but_the_sequence_itself(length: int, dtype: torch.dtype) -> None:
    for context in {0, length // 2, length - 1}:
        make_step([(context, length - context)], dtype, block_size=16, kv_heads=1).check(TritonAttention())
    make_step([(length - 1, 1)], dtype, block_size=16, kv_heads=1).check(TritonAttention(**IN_PARTS, max_parts=4))


@dtypes
def test_a_mixed_step_over_many_tiles(dtype: torch.dtype) -> None:
    """Tiles of rows that end within a query's heads, sequences with fewer tiles than the longest, scattered blocks."""
    sequences = [(130, 1), (0, 1), (61, 24), (0, 45), (64, 2), (9, 1)]
    make_step(sequences, dtype, group=3).check(TritonAttention())


@dtypes
def test_keys_in_parts_are_the_same_attention(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 keys in 4 tiles: whole parts, a short last one, and parts that are empty for the shorter sequences."""
    step = make_step([(199, 1), (0, 1), (63, 1), (64, 1), (149, 1)], dtype, block_size=16, kv_heads=1, group=3)
    whole = step.check(TritonAttention(programs=1))
    for max_parts in (2, 8):
        attention = TritonAttention(**IN_PARTS, max_parts=max_parts)
        assert attention.parts(step.layout, kv_heads=1) == max_parts
        monkeypatch.setattr(attention, "attend_at_once", None)
        assert (step.check(attention) - whole).abs().max() <= 2 * TOLERANCE[dtype]


def test_when_keys_are_split() -> None:
    def parts(sequences: list[tuple[int, int]], kv_heads: int, **settings: int) -> int:
        layout = Layout.of([(seq, *lengths) for seq, lengths in enumerate(sequences)], torch.device("cpu"))
        return TritonAttention(**settings).parts(layout, kv_heads)

    numbers = {"programs": 128, "keys_per_part": 256, "max_parts": 32}
    assert parts([(4095, 1)], 8, **numbers) == 16                  # 128 programs wanted / 8 there are
    assert parts([(4095, 1)], 1, **numbers) == 16                  # 4,096 keys / 256
    assert parts([(99999, 1)], 1, **numbers) == 32                 # no more than max_parts
    assert parts([(4095, 1)] * 3, 8, **numbers) == 6               # 128 / 24, rounded up
    assert parts([(4095, 1)] * 16, 8, **numbers) == 1              # enough programs as it is
    assert parts([(510, 1)], 8, **numbers) == 1                    # 511 keys do not make two parts
    assert parts([(511, 1)], 8, **numbers) == 2
    assert parts([(4095, 1), (0, 2)], 1, **numbers) == 1           # a step of more than decodes


def test_an_odd_number_of_parts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^max_parts must be a power of two, got 12$"):
        TritonAttention(max_parts=12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16,
                                   pytest.param(torch.bfloat16, marks=on_gpu)], ids=["float32", "float16", "bfloat16"])
def test_dtypes(dtype: torch.dtype) -> None:
    make_step(MIXED, dtype, head_size=48).check(TritonAttention())
    make_step([(140, 1), (20, 1)], dtype, head_size=48).check(TritonAttention(**IN_PARTS, max_parts=4))


@settings(max_examples=12, deadline=None, derandomize=True)
@given(sequences=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=3),
       decodes=st.booleans(), head_size=st.integers(8, 24), block_size=st.sampled_from([1, 2, 8, 32, 128]),
       kv_heads=st.integers(1, 2), group=st.integers(1, 5), seed=st.integers(0, 99))
def test_any_layout(sequences: list[tuple[int, int]], decodes: bool, head_size: int, block_size: int, kv_heads: int,
                    group: int, seed: int) -> None:
    sequences = [(context, 1 if decodes else new) for context, new in sequences]
    step = make_step(sequences, torch.float32 if CUDA else torch.float64, head_size=head_size, block_size=block_size,
                     kv_heads=kv_heads, group=group, seed=seed)
    step.check(TritonAttention(**IN_PARTS, max_parts=2))


def test_the_cache_gives_what_gather_and_sdpa_give() -> None:
    """Prompts, a step that mixes all kinds, decodes in another order; nothing but NaN where nothing was stored."""
    dtype, config = torch.float32 if CUDA else torch.float64, tiny_model().config
    caches = [PagedCache(config, 24, 4, dtype, DEVICE, attention)
              for attention in (TritonAttention(), GatherSdpa())]
    generator, lengths = torch.Generator().manual_seed(0), {0: 0, 1: 0, 2: 0}
    for cache in caches:
        cache.keys.fill_(torch.nan)
        cache.values.fill_(torch.nan)
    for adds in ([(0, 9), (1, 3)], [(0, 1), (1, 6), (2, 5)], [(2, 1), (0, 1)]):
        layout = Layout.of([(seq, lengths[seq], new) for seq, new in adds], DEVICE)
        q, k, v = (torch.randn(sum(layout.query_lens), heads, config.head_size, generator=generator).to(DEVICE, dtype)
                   for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads))
        outputs = []
        for cache in caches:
            for seq, new in adds:
                cache.reserve(seq, lengths[seq] + new)
            cache.begin(layout)
            outputs.append(cache.attend(1, q, k, v))
        lengths |= {seq: lengths[seq] + new for seq, new in adds}
        torch.testing.assert_close(*outputs, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_a_call_does_not_wait_for_the_gpu() -> None:
    mixed, decode = make_step(MIXED, torch.float32), make_step([(140, 1)], torch.float32)
    attention = TritonAttention(**IN_PARTS)
    mixed.check(attention)
    decode.check(attention)                               # compiled now
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in (mixed, decode):
            attention(step.q, step.keys, step.values, step.layout)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return replace(tiny_model().config, head_size=64)


@pytest.mark.parametrize("head_size", [4, 7, 257, 512])
def test_head_sizes_it_does_not_take_are_refused(config: ModelConfig, head_size: int) -> None:
    with pytest.raises(ValueError, match=rf"^the Triton kernel takes head sizes 8 to 256, head_size is {head_size}$"):
        TritonAttention().check(replace(config, head_size=head_size), torch.float32, DEVICE)


def test_what_the_interpreter_takes(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attention, "INTERPRETED", True)
    for dtype in (torch.float64, torch.float32, torch.float16):
        TritonAttention().check(config, dtype, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"^Triton's interpreter .* dtype is bfloat16$"):
        TritonAttention().check(config, torch.bfloat16, torch.device("cpu"))


def test_what_a_gpu_takes(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    capability, cuda = [9, 0], torch.device("cuda", 0)
    monkeypatch.setattr(paged_attention, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: tuple(capability))
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        TritonAttention().check(config, dtype, cuda)
    with pytest.raises(ValueError, match=r"^the Triton kernel needs a CUDA device, device is cpu \(.*INTERPRET=1.*\)$"):
        TritonAttention().check(config, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"^the Triton kernel takes .* on CUDA, dtype is float64$"):
        TritonAttention().check(config, torch.float64, cuda)
    capability[:] = [7, 5]
    with pytest.raises(ValueError, match=r"^the Triton kernel needs compute capability 8.0 or newer, cuda:0 has 7.5$"):
        TritonAttention().check(config, torch.float32, cuda)


def python(code: str, **environment: str) -> list[str]:
    """What a fresh Python prints, line by line."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False,
                          env=os.environ | environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
from liteinfer import lineage
from liteinfer.engines.base import run
from liteinfer.loading import tiny_model
from liteinfer.request import Request, SamplingParams
request = Request("0", [1, 2, 3], SamplingParams(max_tokens=5))
engine = lineage.build(lineage.find("liteinfer-native-eager"), tiny_model())
print([event.error for event in run(engine, [request]) if event.error], len(request.output_token_ids))
try:
    import liteinfer.kernels.paged_attention
except ValueError as error:
    print(type(error).__name__, error)
"""


def test_i1_triton_is_needed_only_by_its_kernel() -> None:
    generated, refused = python(WITHOUT_TRITON)
    assert generated == "[] 5"
    assert refused == ("LoadError the Triton kernel needs triton, which is not installed here: "
                       "pip install triton (Linux with an NVIDIA GPU)")


COMPILED = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from liteinfer.kernels import paged_attention as module

def compiled(kernel, element, **constants):
    options = {"num_warps": constants.pop("num_warps")}
    signature, values = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[i,] = "constexpr", constants[name]
        elif name.endswith("strides"):
            signature[name] = ("i64",) + ("i32",) * (2 if name[0] in "kv" else 1) + ("constexpr",)
            values[i, len(signature[name]) - 1] = 1
        else:
            signature[name] = {"table_stride": "i32", "parts": "i32", "scratch": "*fp32", "block_tables": "*i32",
                               "query_start_loc": "*i32", "seq_lens": "*i32"}.get(name, element)
    source = ASTSource(kernel, signature, values)
    return triton.compile(source, target=GPUTarget("cuda", 80, 32), options=options)

for kernel, dtype, element, head_size, longest in (
        (module.attend_queries, torch.float32, "*fp32", 256, 9),
        (module.attend_queries, torch.bfloat16, "*bf16", 80, 9),
        (module.attend_part, torch.bfloat16, "*bf16", 80, 1),
        (module.join_parts, torch.bfloat16, "*bf16", 80, 1)):
    sizes = module.tile_sizes(torch.empty(longest, 4, head_size, dtype=dtype), 4, longest)
    constants = sizes | {"GROUP": 4, "HEAD_SIZE": head_size, "BLOCK_SIZE": 16, "MAX_PARTS": 32}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names + ["num_warps"]}
    binary = compiled(kernel, element, **constants)
    print(kernel.__name__, "sm_80" in binary.asm["ptx"], len(binary.asm["cubin"]) > 0, binary.metadata.shared)
"""


@pytest.mark.slow   # half a minute of ptxas; needs no GPU
def test_the_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """Triton's compiler needs no GPU. What the interpreter lets pass and the compiler does not is found here."""
    lines = [line.split() for line in python(COMPILED, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))]
    names = ("attend_queries", "attend_queries", "attend_part", "join_parts")
    assert [line[:3] for line in lines] == [[name, "True", "True"] for name in names]
    smallest = 99 * 1024                                 # bytes a block may have on GeForce cards from 8.6 on
    assert all(int(shared) <= smallest for *_, shared in lines), lines
