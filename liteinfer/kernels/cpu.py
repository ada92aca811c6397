"""The operators of cpu.cpp, called with tensors.

Torch does nothing here but own the memory: an operator gets addresses, sizes, and how far rows lie apart. So the rows
of an input may lie in a wider tensor (queries in the output of a fused QKV); the numbers of a row lie side by side.
"""

from __future__ import annotations

import ctypes
import math
from ctypes import c_double, c_int, c_long, c_void_p
from functools import lru_cache

import torch
from torch import Tensor

from liteinfer.cache.paged import PagedLayout
from liteinfer.kernels.build import NotBuilt, library

LETTERS = {torch.float32: "f", torch.float64: "d"}
P, L, D, I = c_void_p, c_long, c_double, c_int  # noqa: E741 - as in cpu.cpp
SIGNATURES = {
    "pack": (P, P, L, L, I),
    "linear": (P, L, P, P, P, L, L, L, L, I),
    "add_rms_norm": (P, P, P, P, L, L, D, I),
    "rotate_and_store": (P, L, P, L, P, L, P, P, P, P, P, L, L, L, L, I),
    "silu_mul": (P, L, P, L, P, L, L, I),
    "attend": (P, L, P, P, P, L, P, P, L, P, L, L, L, L, D, I),
}


class CpuOps:
    """The operators for one dtype, float32 or float64.

    Raises:
        NotBuilt: they could not be compiled here.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        built, letter = library(), LETTERS[dtype]
        self.dtype = dtype
        self.panel = int(getattr(built, f"panel_{letter}")())                # P, outputs side by side in a panel
        self._functions = {name: getattr(built, f"{name}_{letter}") for name in SIGNATURES}
        for name, function in self._functions.items():
            function.argtypes, function.restype = SIGNATURES[name], None

    def _call(self, name: str, *arguments: Tensor | float | None) -> None:
        """Tensors become addresses; the last argument of every operator is the number of threads."""
        self._functions[name](*(each.data_ptr() if isinstance(each, Tensor) else each for each in arguments),
                              torch.get_num_threads())

    def pack(self, weight: Tensor) -> Tensor:
        """Panels [ceil(out / P), in, P] of a weight [out, in], padded with zeros."""
        out, inner = weight.shape
        panels = in_huge_pages(torch.empty((-(-out // self.panel), inner, self.panel), dtype=self.dtype))
        self._call("pack", weight.contiguous(), panels, out, inner)
        return panels

    def linear(self, x: Tensor, panels: Tensor, bias: Tensor | None, out: int) -> Tensor:
        """x [N, in] times the packed weight, plus bias [out] -> [N, out]."""
        y = torch.empty((x.shape[0], out), dtype=self.dtype)
        self._call("linear", x, x.stride(0), panels, bias, y, out, *x.shape, out)
        return y

    def add_rms_norm(self, x: Tensor, add: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add `add` [N, E] to x [N, E], in place; return the norm of the sum times weight [E]."""
        y = torch.empty_like(x)
        self._call("add_rms_norm", x, add, weight, y, *x.shape, eps)
        return y

    def rotate_and_store(self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: Tensor,
                         values: Tensor) -> None:
        """Turn q [N, H, D] in place; write k, v [N, K, D], k turned, to slots [N] of pages [blocks, size, K, D]."""
        n, heads, size = q.shape
        self._call("rotate_and_store", q, q.stride(0), k, k.stride(0), v, v.stride(0), cos, sin, slots, keys, values,
                   n, heads, k.shape[1], size)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up of [N, I] each."""
        y = torch.empty(gate.shape, dtype=self.dtype)
        self._call("silu_mul", gate, gate.stride(0), up, up.stride(0), y, *gate.shape)
        return y

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, layout: PagedLayout) -> Tensor:
        """q [N, H, D] over pages [blocks, block_size, K, D] -> [N, H, D]."""
        out, tables, (_, heads, size) = torch.empty(q.shape, dtype=q.dtype), layout.block_tables, q.shape
        self._call("attend", q, q.stride(0), keys, values, tables, tables.stride(0), layout.query_start_loc,
                   layout.seq_lens, len(layout.seq_lens), out, heads, keys.shape[2], size, keys.shape[1],
                   1 / math.sqrt(size))
        return out

    def fits(self, head_size: int) -> bool:
        """Whether a head fills whole registers, which attention asks for."""
        return head_size % (self.panel // 2) == 0


@lru_cache
def cpu_ops(dtype: torch.dtype, device_type: str = "cpu") -> CpuOps | None:
    """The operators, None where there are none: another device or dtype, or nothing to compile them with."""
    if device_type != "cpu" or dtype not in LETTERS:
        return None
    try:
        return CpuOps(dtype)
    except NotBuilt:
        return None


def in_huge_pages(tensor: Tensor) -> Tensor:
    """Ask Linux to back a fresh tensor with pages of 2 MB, where it has them: fewer addresses to look up."""
    size = 1 << 21
    start, end = -(-tensor.data_ptr() // size) * size, (tensor.data_ptr() + tensor.nbytes) // size * size
    try:
        if end > start:
            ctypes.CDLL(None).madvise(c_void_p(start), ctypes.c_size_t(end - start), 14)   # MADV_HUGEPAGE
    except (OSError, AttributeError):
        pass
    return tensor
