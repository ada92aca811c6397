"""Attention that reads the pages where they lie: a Triton kernel.

Since gather + SDPA: at every layer and step, the gather copied each sequence's
blocks into one tensor, for SDPA to read once and drop. Every key and value
moved three times (read, written, read again) to be used once, and a decode
step is nothing but such reads. Here nothing is copied. A program (what Triton
calls one of its many parallel instances) is given some queries of a sequence
and one kv head. It looks the blocks up in the block table as it goes, and
reads each key and value in place, once: PagedAttention (Kwon et al. 2023).

It sees keys a tile at a time, yet softmax wants the largest score before the
first exponential. Online softmax (Milakov and Gimelshein 2018) takes the
largest so far, and when a larger one comes, shrinks what is summed already:

    scores         2            then 4                       softmax([2, 4]) @ v
    highest        2            4
    total          1            1 * exp(2 - 4) + 1           = exp(-2) + 1
    acc            v0           v0 * exp(2 - 4) + v1         acc / total is the output

So the S scores of a query never exist together: FlashAttention (Dao et al.
2022). The rows of a tile are (query, query head) pairs, all the heads that
share the kv head side by side: with GQA a key is read once for all of them.

    two queries, 2 query heads to a kv head, 3 keys cached before; the tile of kv head 1
    row     query   head   sees keys
    0       0       2      0 .. 3
    1       0       3      0 .. 3
    2       1       2      0 .. 4
    3       1       3      0 .. 4

One sequence that decodes is one program per kv head, 3 to 8 of them on a GPU
that can run over a hundred, each walking down the whole context. Flash-Decoding
(Dao et al. 2023) cuts the keys into parts, one program each. The three numbers
of the table above are all it takes to join parts, whatever their order.
"""

# Triton reads a kernel's annotations for itself, and only constexpr can be said there.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
from torch import Tensor

from liteinfer.cache.paged import PagedLayout
from liteinfer.loading import LoadError, ModelConfig

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise LoadError("the Triton kernel needs triton, which is not installed here: "
                    "pip install triton (Linux with an NVIDIA GPU)") from error

INTERPRETED = triton.knobs.runtime.interpret    # TRITON_INTERPRET=1: the kernels below run in Python, on any device


class TritonAttention:
    """Attention over pages in place. The three numbers decide when the keys of a decode step are split.

    Args:
        programs: enough of them to fill the GPU; keys are split only while there would be fewer.
        keys_per_part: a part of the keys is never made shorter than this, on the longest sequence.
        max_parts: in how many parts at most; a power of two.
    """

    gathers = False

    def __init__(self, programs: int = 128, keys_per_part: int = 256, max_parts: int = 32) -> None:
        if max_parts < 1 or max_parts & (max_parts - 1):
            raise ValueError(f"max_parts must be a power of two, got {max_parts}")
        self.programs = programs
        self.keys_per_part = keys_per_part
        self.max_parts = max_parts

    def check(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Refuse what the kernel cannot do, before anything is allocated. Raises ValueError."""
        if not 8 <= config.head_size <= 256:
            raise ValueError(f"the Triton kernel takes head sizes 8 to 256, head_size is {config.head_size}")
        if INTERPRETED:
            if dtype == torch.bfloat16:
                raise ValueError("Triton's interpreter (TRITON_INTERPRET=1) has no bfloat16, dtype is bfloat16")
            return
        if device.type != "cuda":
            raise ValueError(f"the Triton kernel needs a CUDA device, device is {device} (with TRITON_INTERPRET=1 in "
                             "the environment it runs, slowly, in Triton's interpreter)")
        if dtype == torch.float64:
            raise ValueError("the Triton kernel takes float32, bfloat16 and float16 on CUDA, dtype is float64")
        if (capability := torch.cuda.get_device_capability(device)) < (8, 0):
            raise ValueError("the Triton kernel needs compute capability 8.0 or newer, "
                             f"{device} has {capability[0]}.{capability[1]}")

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, layout: PagedLayout) -> Tensor:
        """q [N, H, D] over pages [num_blocks + 1, block_size, K, D] -> [N, H, D]. Waits for nothing."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        with torch.cuda.device_of(q):
            parts = self.parts(layout, keys.shape[2])
            if parts > 1:
                self.attend_in_parts(q, keys, values, layout, parts, out)
            else:
                self.attend_at_once(q, keys, values, layout, out)
        return out

    def parts(self, layout: PagedLayout, kv_heads: int) -> int:
        """Into how many parts the keys of this step are cut."""
        if max(layout.query_lens) > 1:
            return 1
        to_fill = triton.cdiv(self.programs, len(layout.seq_ids) * kv_heads)
        longest = max(layout.context_lens) + 1
        return max(1, min(to_fill, longest // self.keys_per_part, self.max_parts))

    def attend_at_once(self, q: Tensor, keys: Tensor, values: Tensor, layout: PagedLayout, out: Tensor) -> None:
        """Any step: a program for each tile of rows, kv head and sequence."""
        group, longest = q.shape[1] // keys.shape[2], max(layout.query_lens)
        sizes = tile_sizes(q, group, longest)
        grid = (triton.cdiv(longest * group, sizes["ROWS"]), keys.shape[2], len(layout.seq_ids))
        attend_queries[grid](q, q.stride(), keys, keys.stride(), values, values.stride(), out, out.stride(),
                             layout.block_tables, layout.block_tables.stride(0), layout.query_start_loc,
                             layout.seq_lens, GROUP=group, HEAD_SIZE=q.shape[2], BLOCK_SIZE=keys.shape[1], **sizes)

    def attend_in_parts(self, q: Tensor, keys: Tensor, values: Tensor, layout: PagedLayout, parts: int,
                        out: Tensor) -> None:
        """A step of one query per sequence: a program for each part of the keys, kv head and sequence; then join."""
        (batch, heads, head_size), kv_heads = q.shape, keys.shape[2]
        sizes = tile_sizes(q, heads // kv_heads, 1)
        scratch_type = torch.float64 if q.dtype == torch.float64 else torch.float32
        scratch = torch.empty((batch, heads, parts, head_size + 2), dtype=scratch_type, device=q.device)
        attend_part[(parts, kv_heads, batch)](
            q, q.stride(), keys, keys.stride(), values, values.stride(), scratch,
            layout.block_tables, layout.block_tables.stride(0), layout.seq_lens,
            GROUP=heads // kv_heads, HEAD_SIZE=head_size, BLOCK_SIZE=keys.shape[1], **sizes)
        join_parts[(heads, batch)](scratch, out, out.stride(), parts, HEAD_SIZE=head_size, WIDTH=sizes["WIDTH"],
                                   MAX_PARTS=self.max_parts)


def tile_sizes(q: Tensor, group: int, longest: int) -> dict[str, int]:
    """ROWS, TILE of keys, WIDTH of a head: powers of two, from 16 on, as Triton's dot asks; and the warps for them.

    A tile of keys is 8 KiB where that makes 16 to 64 of them, so that two tiles of keys and of values, one
    computed with while the next arrives, leave room in the shared memory of any GPU. float32 multiplies without
    tensor cores, from registers, and has half the rows.
    """
    width = max(16, triton.next_power_of_2(q.shape[2]))
    rows = max(16, triton.next_power_of_2(group)) if longest == 1 else 64 if q.element_size() == 2 else 32
    tile = min(64, max(16, 8192 // (width * q.element_size())))
    return {"ROWS": rows, "TILE": tile, "WIDTH": width, "num_warps": 8 if width == 256 else 4}


@triton.jit(do_not_specialize=["table_stride"])
def attend_queries(q, q_strides, keys, key_strides, values, value_strides, out, out_strides,
                   block_tables, table_stride, query_start_loc, seq_lens,
                   GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                   ROWS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """One program: up to ROWS rows of one sequence, over all the keys that they see."""
    tile, kv_head, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(query_start_loc + seq)
    new = tl.load(query_start_loc + seq + 1) - start                         # L
    held = tl.load(seq_lens + seq)                                           # S
    if tile * ROWS >= new * GROUP:       # the grid is as wide as the longest needs
        return
    row = tile * ROWS + tl.arange(0, ROWS)
    query, head = row // GROUP, kv_head * GROUP + row % GROUP
    sees = held - new + query + 1        # how many keys: query i of L sees 0 .. S - L + i
    end = tl.minimum(held, held - new + (tile * ROWS + ROWS - 1) // GROUP + 1)
    d = tl.arange(0, WIDTH)
    there = (row < new * GROUP)[:, None] & (d < HEAD_SIZE)[None, :]
    token = (start + query).to(tl.int64)[:, None]
    rows = tl.load(q + token * q_strides[0] + head[:, None] * q_strides[1] + d[None, :] * q_strides[2], there, 0)
    _, total, acc = walk(rows, sees, 0, end, block_tables + seq.to(tl.int64) * table_stride,
                         keys + kv_head * key_strides[2], key_strides,
                         values + kv_head * value_strides[2], value_strides, HEAD_SIZE, BLOCK_SIZE, TILE)
    to = out + token * out_strides[0] + head[:, None] * out_strides[1] + d[None, :] * out_strides[2]
    tl.store(to, (acc / total[:, None]).to(out.dtype.element_ty), there)


@triton.jit
def walk(rows, sees, start, end, table, keys, key_strides, values, value_strides,
         HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Online softmax of rows [ROWS, WIDTH] over keys start .. end - 1 of one sequence and kv head.

    Row r sees the keys below sees[r], the first one of the walk among them. No row that counts sees
    past `end`, unless that is a whole number of tiles from `start`. Returns highest score [ROWS], sum
    of exponentials [ROWS], and values weighted by them [ROWS, WIDTH].
    """
    kind: tl.constexpr = tl.float64 if rows.dtype == tl.float64 else tl.float32
    highest = tl.full([rows.shape[0]], float("-inf"), kind)
    total = tl.zeros([rows.shape[0]], kind)
    acc = tl.zeros([rows.shape[0], rows.shape[1]], kind)
    d = tl.arange(0, rows.shape[1])
    for first in range(start, end, TILE):
        token = first + tl.arange(0, TILE)
        block = tl.load(table + token // BLOCK_SIZE, token < end, 0).to(tl.int64)  # int64: pages outgrow 2^31 elements
        slot = token % BLOCK_SIZE
        # Slots that hold no token of this sequence may hold NaN, and 0 * NaN is NaN: they are not read, v's included.
        there = (token < end)[:, None] & (d < HEAD_SIZE)[None, :]
        k = tl.load(keys + (block * key_strides[0] + slot * key_strides[1])[:, None] + d[None, :] * key_strides[3],
                    there, 0)
        v = tl.load(values + (block * value_strides[0] + slot * value_strides[1])[:, None]
                    + d[None, :] * value_strides[3], there, 0)
        scores = tl.dot(rows, tl.trans(k), input_precision="ieee") * HEAD_SIZE ** -0.5
        scores = tl.where(token[None, :] < sees[:, None], scores, float("-inf"))                   # [ROWS, TILE]
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(highest - higher)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        highest = higher
    return highest, total, acc


@triton.jit(do_not_specialize=["table_stride"])
def attend_part(q, q_strides, keys, key_strides, values, value_strides, scratch,
                block_tables, table_stride, seq_lens,
                GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                ROWS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """One program: the only query of a sequence, GROUP heads of it, over one part of the keys.

    A part is a whole number of tiles, so the last ones may be empty: highest -inf, sums 0.
    """
    part, kv_head, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    parts = tl.num_programs(0)
    held = tl.load(seq_lens + seq)
    size = tl.cdiv(tl.cdiv(held, TILE), parts) * TILE
    row = tl.arange(0, ROWS)
    head = kv_head * GROUP + row
    d = tl.arange(0, WIDTH)
    there = (row < GROUP)[:, None] & (d < HEAD_SIZE)[None, :]
    seq = seq.to(tl.int64)
    rows = tl.load(q + seq * q_strides[0] + head[:, None] * q_strides[1] + d[None, :] * q_strides[2], there, 0)
    highest, total, acc = walk(rows, tl.full([ROWS], held, tl.int32), part * size, tl.minimum(part * size + size, held),
                               block_tables + seq * table_stride, keys + kv_head * key_strides[2], key_strides,
                               values + kv_head * value_strides[2], value_strides, HEAD_SIZE, BLOCK_SIZE, TILE)
    to = scratch + ((seq * tl.num_programs(1) * GROUP + head) * parts + part) * (HEAD_SIZE + 2)   # [ROWS]
    tl.store(to[:, None] + d[None, :], acc, there)
    tl.store(to + HEAD_SIZE, highest, row < GROUP)
    tl.store(to + HEAD_SIZE + 1, total, row < GROUP)


@triton.jit(do_not_specialize=["parts"])
def join_parts(scratch, out, out_strides, parts,
               HEAD_SIZE: tl.constexpr, WIDTH: tl.constexpr, MAX_PARTS: tl.constexpr):
    """One program: the output of one query head, from what `attend_part` left for it."""
    head, seq = tl.program_id(0), tl.program_id(1).to(tl.int64)
    part, d = tl.arange(0, MAX_PARTS), tl.arange(0, WIDTH)
    at = scratch + ((seq * tl.num_programs(0) + head) * parts + part) * (HEAD_SIZE + 2)           # [MAX_PARTS]
    highest = tl.load(at + HEAD_SIZE, part < parts, float("-inf"))
    total = tl.load(at + HEAD_SIZE + 1, part < parts, 0)
    acc = tl.load(at[:, None] + d[None, :], (part < parts)[:, None] & (d < HEAD_SIZE)[None, :], 0)
    shrink = tl.exp(highest - tl.max(highest, 0))
    joined = tl.sum(acc * shrink[:, None], 0) / tl.sum(total * shrink, 0)
    tl.store(out + seq * out_strides[0] + head * out_strides[1] + d * out_strides[2],
             joined.to(out.dtype.element_ty), d < HEAD_SIZE)
