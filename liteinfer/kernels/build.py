"""Compile cpu.cpp for this processor, once, and load it.

The file knows neither Python nor torch, so that it takes a C++ compiler and seconds, and the result is called
through ctypes. It is kept in liteinfer's cache folder under a name made of all that it depends on.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch

from liteinfer.conversion import cache_folder

SOURCE = Path(__file__).with_name("cpu.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
PATIENCE = 300   # seconds that a compiler may take
LAST = 200       # letters of its last words that a reason quotes


class NotBuilt(RuntimeError):
    """There is no library of compiled operators here, and why."""


def compiler() -> str | None:
    """The C++ compiler: what CXX names, else the first that is there."""
    return os.environ.get("CXX") or next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The operators, compiled if they are not yet.

    Raises:
        NotBuilt: no compiler, or it failed; the message is one line.
    """
    return load(SOURCE, cache_folder() / "kernels")


def load(source: Path, folder: Path) -> ctypes.CDLL:
    """Compile a source into the folder, unless that was done, and load it. Raises NotBuilt."""
    target = folder / f"{source.stem}-{_depends_on(source)}.so"
    if not target.is_file():
        build(source, target)
    try:
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise NotBuilt(f"{target} cannot be loaded: {error}") from None


def build(source: Path, target: Path) -> None:
    """Compile; the target is there whole or not at all. Raises NotBuilt."""
    found = compiler()
    if found is None:
        raise NotBuilt("no C++ compiler: install g++ (Debian: apt-get install g++), or name one in CXX")
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        ended = subprocess.run([found, *FLAGS, str(source), "-o", str(partial), *_threads()], capture_output=True,
                               text=True, timeout=PATIENCE, check=False)
        if ended.returncode:
            raise NotBuilt(f"{found} failed: {(ended.stderr.strip().splitlines() or ['it said nothing'])[0][:LAST]}")
        os.replace(partial, target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotBuilt(f"{found} failed: {' '.join(str(error).split())[:LAST]}") from None
    finally:
        partial.unlink(missing_ok=True)


def _threads() -> Sequence[str]:
    """Use the OpenMP that torch has loaded: two of them would be two teams of threads on the same cores."""
    own = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return ["-Wl,--as-needed", str(own[0])] if own else []


def _depends_on(source: Path) -> str:
    """A name for the source, the flags, the compiler and the processor together: 16 hex digits."""
    cpu = Path("/proc/cpuinfo")
    flags = next((line for line in cpu.read_text().splitlines() if line.startswith(("flags", "Features"))), ""
                 ) if cpu.is_file() else platform.processor()
    parts = (source.read_text(encoding="utf-8"), *FLAGS, str(compiler()), torch.__version__, platform.machine(), flags)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
