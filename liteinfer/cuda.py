"""Why torch does not see an NVIDIA GPU that is there, and the command that fixes it.

Ground file.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import torch

# CUDA versions for which pytorch.org has wheels of every torch from 2.9 on (2.12 dropped CUDA 12.8).
WHEELS = ((12, 6), (13, 0))
TRACES = ("/proc/driver/nvidia/version", "/dev/nvidia0", "/dev/dxg")   # the last is WSL's


def cuda_hint() -> str | None:
    """One line on what was found and what to type; None if torch sees a GPU, or there is no NVIDIA GPU."""
    if torch.cuda.is_available() or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    driver = driver_cuda_version()
    if driver is None and not any(Path(trace).exists() for trace in TRACES[:2]):
        return None
    built = torch.version.cuda
    supports = f"whose driver supports CUDA {driver[0]}.{driver[1]}" if driver else "whose driver does not answer"
    found = f"an NVIDIA GPU is present ({supports}) but torch {torch.__version__} does not see it"
    if driver and driver < (12, 0):
        return f"{found}: update the NVIDIA driver, torch needs one for CUDA 12 or later"
    why = "it is built without CUDA" if built is None else f"it is built for CUDA {built}"
    if driver and built and tuple(int(part) for part in built.split(".")[:2]) <= driver:
        return f"{found} ({why}, which this driver can run): restart the machine or reinstall the driver"
    return f"{found} ({why}); run: {install_command(driver)}"


def install_command(driver: tuple[int, int] | None) -> str:
    """The pip command for a build of this torch that the driver runs. Any CUDA 12 driver runs every CUDA 12 build."""
    fitting = [wheel for wheel in WHEELS if driver and wheel <= driver]
    major, minor = max(fitting, default=WHEELS[0])
    build, version = f"cu{major}{minor}", torch.__version__.partition("+")[0]
    return f"pip install torch=={version}+{build} --extra-index-url https://download.pytorch.org/whl/{build}"


def driver_cuda_version() -> tuple[int, int] | None:
    """The CUDA version that nvidia-smi says the driver supports; None without nvidia-smi or an answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        out = subprocess.run([program], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"CUDA Version:\s*(\d+)\.(\d+)", out)
    return (int(match[1]), int(match[2])) if match else None
