"""Every notebook runs from a restart and prints what is stored; every exercise's check really checks.

A notebook's cells carry tags: `setup` (what exercises need: imports, tiny
models), `solution` and `check` (with the exercise's number in the metadata
entry `exercise`), `nbval-ignore-output` (times and pictures, not compared).
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LARGEST = 300_000   # bytes


def chapter(path: Path) -> str:
    return f"ch{path.name[:2]}"


def parameters(paths: list[Path]) -> list:
    return [pytest.param(path, marks=getattr(pytest.mark, chapter(path)), id=path.stem) for path in paths]


def code_cells(path: Path) -> list[nbformat.NotebookNode]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def tags(cell: nbformat.NotebookNode) -> list[str]:
    return cell.metadata.get("tags", [])


def nbval(path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a notebook and compare its outputs, as `make test` and an instructor do."""
    command = [sys.executable, "-m", "pytest", "--nbval", "--nbval-cell-timeout=300", "-q", "-p", "no:cacheprovider",
               "-c", os.devnull, "--rootdir", str(path.parent), str(path)]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True,
                          check=False)


@pytest.mark.notebook
@pytest.mark.parametrize("path", parameters(NOTEBOOKS))
def test_notebook_runs_and_prints_what_is_stored(path: Path) -> None:
    result = nbval(path)
    assert result.returncode == 0, result.stdout[-6000:]


@pytest.mark.parametrize("path", parameters(NOTEBOOKS))
def test_notebook_is_stored_as_it_ran(path: Path) -> None:
    assert path.stat().st_size < LARGEST
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "not run from a restart"
    for cell in cells:
        compared = "nbval-ignore-output" not in tags(cell)
        assert "print(" not in cell.source or cell.outputs or "def " in cell.source, f"no stored output:\n{cell.source}"
        for output in cell.outputs:
            kinds = output.get("data", {})
            assert output.get("name") != "stderr", f"a warning or a progress bar is stored:\n{cell.source}"
            assert output.output_type != "error"
            assert "application/vnd.jupyter.widget-view+json" not in kinds, "a widget is stored"
            text = output.get("text", "") + kinds.get("text/plain", "")
            assert str(ROOT) not in text
            if compared:
                assert not any(kind.startswith("image/") for kind in kinds), f"a compared picture:\n{cell.source}"
                assert not re.search(r"0x[0-9a-f]{6,}|\d (ms|s|tok/s|GB/s)\b", text), f"compared as if exact:\n{text}"


# --- exercises -------------------------------------------------------------------------------------------------


def exercises() -> list:
    found = []
    for path in NOTEBOOKS:
        for cell in code_cells(path):
            if "solution" in tags(cell):
                found.append(pytest.param(path, cell.metadata["exercise"], id=cell.metadata["exercise"],
                                          marks=getattr(pytest.mark, chapter(path))))
    return found


def attempt(path: Path, exercise: str, answer: str | None = None) -> None:
    """Run the notebook's setup cells, then `answer` in place of the solution, then the check."""
    names: dict[str, object] = {"__name__": "__main__"}
    cells = code_cells(path)
    solution, = (c for c in cells if "solution" in tags(c) and c.metadata["exercise"] == exercise)
    check, = (c for c in cells if "check" in tags(c) and c.metadata["exercise"] == exercise)
    setup = [c.source for c in cells if "setup" in tags(c)]
    for source in [*setup, solution.source if answer is None else answer, check.source]:
        lines = [line for line in source.splitlines() if not line.startswith(("%", "!"))]
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile("\n".join(lines), f"{path.name} exercise {exercise}", "exec"), names)


def wrong_answers() -> list:
    found = []
    for path in NOTEBOOKS:
        known = importlib.import_module(f"tests.exercises.{chapter(path)}").WRONG
        for exercise, answers in known.items():
            found += [pytest.param(path, exercise, source, id=f"{exercise}: {misconception}",
                                   marks=getattr(pytest.mark, chapter(path))) for misconception, source in answers]
    return found


@pytest.mark.parametrize(("path", "exercise"), exercises())
def test_the_solution_passes(path: Path, exercise: str) -> None:
    attempt(path, exercise)


@pytest.mark.parametrize(("path", "exercise", "answer"), wrong_answers())
def test_a_usual_wrong_answer_fails_its_check(path: Path, exercise: str, answer: str) -> None:
    with pytest.raises(AssertionError) as caught:
        attempt(path, exercise, answer)
    message = str(caught.value)
    assert len(message.split()) >= 5, f"a failing check should name the usual mistake, not say {message!r}"


@pytest.mark.parametrize("path", parameters(NOTEBOOKS))
def test_there_are_exercises_with_two_wrong_answers_each(path: Path) -> None:
    known = importlib.import_module(f"tests.exercises.{chapter(path)}").WRONG
    numbers = [cell.metadata["exercise"] for cell in code_cells(path) if "solution" in tags(cell)]
    assert len(numbers) >= 3 and sorted(known) == sorted(numbers)
    assert all(len(answers) >= 2 for answers in known.values())
    assert all(number.startswith(f"{int(path.name[:2])}.") for number in numbers)


# --- N1 to N5: the way notebooks are checked, on small ones made here -------------------------------------------


def stored(folder: Path, *cells: tuple[str, str] | tuple[str, str, list[str]]) -> Path:
    """A notebook of (source, stored output, tags) cells."""
    notebook = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    for n, (source, text, *rest) in enumerate(cells, 1):
        cell = nbformat.v4.new_code_cell(source, execution_count=n, metadata={"tags": rest[0] if rest else []})
        cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=text)] if text else []
        notebook.cells.append(cell)
    path = folder / "small.ipynb"
    nbformat.write(notebook, path)
    return path


@pytest.mark.notebook
def test_n1_to_n3_what_must_not_fail_a_notebook(tmp_path: Path) -> None:
    """Many prints, other thread counts, warnings, times in tagged cells."""
    many = "import sys\nfor i in range(300):\n    print(i)\n    if i % 7 == 0: sys.stdout.flush()"
    path = stored(
        tmp_path,
        (many, "".join(f"{i}\n" for i in range(300))),
        ("import warnings, sys\nwarnings.warn('an extra warning')\nprint('noise', file=sys.stderr)\nprint(1)", "1\n"),
        ("import time\nprint(time.time())", "1.5\n", ["nbval-ignore-output"]),
        ("from tqdm.auto import tqdm\nprint(sum(tqdm(range(5))))", "10\n"),
    )
    for threads in ("1", "2"):
        result = nbval(path, OMP_NUM_THREADS=threads)
        assert result.returncode == 0, result.stdout[-3000:]


@pytest.mark.notebook
@pytest.mark.parametrize("kept", ["", "41\n"], ids=["output cleared", "number changed"])
def test_n5_what_must_fail_a_notebook(tmp_path: Path, kept: str) -> None:
    result = nbval(stored(tmp_path, ("print(6 * 7)", kept)))
    assert result.returncode == 1, result.stdout[-3000:]
    assert "1 failed" in result.stdout
