"""`make handout`: the course as students get it, without solutions and without the tests that know the answers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import nbformat

from coursework.cells import ROOT, exercises, notebooks, stub, tagged, tags

WITHHELD = ("tests", "coursework", ".ci", ".git", ".github", "chapters/INSTRUCTORS.md")


def hand_out(target: Path, root: Path = ROOT) -> list[Path]:
    """Copy the course to `target`, solution cells replaced by stubs. Returns the student notebooks.

    The copy has all that the notebooks need (package, benchmarks, set-up), so that it is enough
    to have it and an environment made once by `make notebooks`.

    Raises:
        ValueError: `target` is a file, or a folder with something in it, or inside the course itself.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} is there already and not an empty folder")
    if target.resolve() != root and root in target.resolve().parents:
        raise ValueError(f"{target} lies inside the course {root}: choose a folder outside")
    for path in shipped(root):
        copy = target / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / path, copy)
    return [blank(target / path.relative_to(root)) for path in notebooks(root)]


def shipped(root: Path) -> list[Path]:
    """The course's files that students get, relative to it: those git tracks, if this is a checkout."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root,
                            capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        paths = [Path(name) for name in listed.stdout.split("\0") if name and (root / name).is_file()]
    else:
        paths = [p.relative_to(root) for p in root.rglob("*") if p.is_file() and ".venv" not in p.parts]
    withheld = [Path(name) for name in WITHHELD]
    return [p for p in paths if not any(w == p or w in p.parents for w in withheld)]


def blank(path: Path) -> Path:
    """Replace the solutions of one notebook, in place, by stubs; their stored outputs go with them."""
    stubs = {exercise.number: stub(exercise) for exercise in exercises(path)}
    notebook = nbformat.read(path, as_version=4)
    for cell in tagged([c for c in notebook.cells if c.cell_type == "code"], "solution"):
        cell.source, cell.outputs = stubs[cell.metadata["exercise"]].rstrip(), []
        assert "solution" in tags(cell)
    nbformat.write(notebook, path)
    return path
