"""What this machine is, and what it allows: facts, read bandwidth, arithmetic peak.

The two limits are the best of several ways to do nothing but read, or nothing
but multiply, so that a row's own code can reach them but not pass them.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liteinfer.model.linear import onednn_works

READ_BYTES = 512 * 2**20    # far beyond any cache
GB = 1e9                    # bandwidth is quoted in powers of ten, as vendors do


def facts(device: torch.device) -> dict[str, Any]:
    """Names and sizes; `ram_gib` is None where the system does not tell."""
    cpu, cores = cpu_name(), usable_cores()
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {"name": gpu or f"{cpu}, {cores} cores", "cpu": cpu, "cores": cores, "threads": torch.get_num_threads(),
            "ram_gib": ram_gib(), "gpu": gpu, "os": f"{platform.system()} {platform.release()}"}


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's model: Linux says it in /proc/cpuinfo, elsewhere `platform` knows."""
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(("model name", "Model")) and ":" in line:
                return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine()


def usable_cpus() -> list[int]:
    """The numbers of the cores this process may run on, which in a container are fewer than the machine's."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def usable_cores() -> int:
    return len(usable_cpus())


def ram_gib() -> int | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    except (AttributeError, ValueError, OSError):   # Windows has no sysconf
        return None


def limits(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Measure `bandwidth_gb_s`, its `bandwidth_path`, and `peak_gflop_s`: some 5 seconds."""
    with torch.inference_mode():
        bandwidth, path = best(reading_paths(device, dtype))
        peak, _ = best(multiplying_paths(device, dtype))
    return {"bandwidth_gb_s": round(bandwidth / GB, 2), "bandwidth_path": path, "peak_gflop_s": round(peak / GB, 1)}


Way = tuple[str, float, Callable[[], object]]   # name, bytes or operations of one call, the call


def best(paths: list[Way], seconds_each: float = 0.5) -> tuple[float, str]:
    """The highest rate (amount / second) of any call of any path, and that path's name."""
    rates = [(amount / fastest(call, seconds_each), name) for name, amount, call in paths]
    return max(rates)


def fastest(call: Callable[[], object], budget: float) -> float:
    """Seconds of the fastest call, after one that is not counted; at least 3 calls, then until the budget is spent."""
    timed(call)
    times = [timed(call) for _ in range(3)]
    while sum(times) < budget:
        times.append(timed(call))
    return min(times)


def timed(call: Callable[[], object]) -> float:
    """Seconds of one call, the GPU's queue emptied before and after."""
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def reading_paths(device: torch.device, dtype: torch.dtype) -> list[Way]:
    """Several ways to read READ_BYTES once."""
    width = 1024
    data = torch.ones(READ_BYTES // dtype.itemsize, dtype=dtype, device=device).view(-1, width)
    vector = torch.ones(width, dtype=dtype, device=device)
    half = data.flatten().chunk(2)
    paths: list[Way] = [
        ("sum", data.nbytes, data.sum),
        ("matrix-vector product", data.nbytes, lambda: data.mv(vector)),
        ("copy, read and written bytes", data.nbytes, lambda: half[0].copy_(half[1])),
    ]
    if onednn_works(dtype, device):
        paths.append(("oneDNN packed linear, one row", data.nbytes, packed_linear(data, 2048, vector[None])))
    return paths


def packed_linear(weights: Tensor, rows_each: int, x: Tensor) -> Callable[[], object]:
    """Apply linear layers of `rows_each` outputs, cut from `weights` [many, in] and packed, to x [N, in], in turn."""
    packed = [torch.ops.mkldnn._reorder_linear_weight(w) for w in torch.split(weights, rows_each)]
    return lambda: [torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "") for w in packed]


def multiplying_paths(device: torch.device, dtype: torch.dtype) -> list[Way]:
    """Products of square matrices, and linear layers of the shapes a prefill has."""
    paths: list[Way] = []
    for n in (512, 1024, 2048) if device.type == "cpu" else (4096, 8192):
        a = torch.ones(n, n, dtype=dtype, device=device)
        paths.append((f"matmul {n}", 2 * n**3, partial(torch.matmul, a, a)))
    for tokens in (128, 512):
        x = torch.ones(tokens, 1024, dtype=dtype, device=device)
        w = torch.ones(4096, 1024, dtype=dtype, device=device)
        amount = 2 * tokens * w.numel()
        paths.append((f"linear, {tokens} rows", amount, partial(F.linear, x, w)))
        if onednn_works(dtype, device):
            paths.append((f"oneDNN packed linear, {tokens} rows", amount, packed_linear(w, 4096, x)))
    return paths
