"""`python -m liteinfer.plots [--check]`: store the chapters' pictures, or list those that are out of date."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from liteinfer.plots import svg

CHAPTERS = Path(__file__).parents[2] / "chapters"


def stale(write: bool) -> list[str]:
    """Pictures that differ from what the code draws now; stored again if `write`."""
    changed = []
    for folder in sorted(path for path in CHAPTERS.iterdir() if path.is_dir()):
        module = import_module(f"liteinfer.plots.ch{folder.name[:2]}")
        for name, figure in module.pictures().items():
            path, drawn = folder / name, svg(figure)
            if not path.exists() or path.read_bytes() != drawn:
                changed.append(f"{folder.name}/{name}")
                if write:
                    path.write_bytes(drawn)
    return changed


if __name__ == "__main__":
    names = stale(write="--check" not in sys.argv)
    print("\n".join(names) or "all pictures are current")
    sys.exit(bool(names) and "--check" in sys.argv)
