"""Every notebook runs from a restart and prints what is stored; every exercise's check really checks.

A notebook's cells carry tags: `setup` (what exercises need: imports, tiny
models), `solution` and `check` (with the exercise's number in the metadata
entry `exercise`), `nbval-ignore-output` (times and pictures, not compared).
"""

from __future__ import annotations

import ast
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

from coursework.cells import code_cells, exercises, notebooks, stub, tagged, tags

ROOT = Path(__file__).parents[1]
NOTEBOOKS = notebooks()
LARGEST = 300_000   # bytes


def chapter(path: Path) -> str:
    return f"ch{path.name[:2]}"


def parameters(paths: list[Path]) -> list:
    return [pytest.param(path, marks=getattr(pytest.mark, chapter(path)), id=path.stem) for path in paths]


def nbval(path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a notebook and compare its outputs, as `make test` and an instructor do."""
    command = [sys.executable, "-m", "pytest", "--nbval", "--nbval-cell-timeout=300", "-q", "-p", "no:cacheprovider",
               "-p", "coursework.nbval_stderr",
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


def every_exercise() -> list:
    return [pytest.param(path, exercise.number, id=exercise.number, marks=getattr(pytest.mark, chapter(path)))
            for path in NOTEBOOKS for exercise in exercises(path)]


def attempt(path: Path, number: str, answer: str | None = None, check: str | None = None) -> None:
    """Run the notebook's setup cells, then `answer` in place of the solution, then the check (or another one)."""
    names: dict[str, object] = {"__name__": "__main__"}
    exercise, = (e for e in exercises(path) if e.number == number)
    setup = [cell.source for cell in tagged(code_cells(path), "setup")]
    for source in [*setup, answer or exercise.solution.source, check or exercise.check.source]:
        lines = [line for line in source.splitlines() if not line.startswith(("%", "!"))]
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile("\n".join(lines), f"{path.name} exercise {number}", "exec"), names)


def assert_caught(path: Path, number: str, answer: str, check: str | None = None) -> None:
    """A wrong answer must fail its check by an assertion that says in words what the usual mistake is."""
    with pytest.raises(AssertionError) as caught:
        attempt(path, number, answer, check)
    message = str(caught.value)
    assert len(message.split()) >= 5, f"a failing check should name the usual mistake, not say {message!r}"


def wrong_answers() -> list:
    found = []
    for path in NOTEBOOKS:
        known = importlib.import_module(f"tests.exercises.{chapter(path)}").WRONG
        for exercise, answers in known.items():
            found += [pytest.param(path, exercise, source, id=f"{exercise}: {misconception}",
                                   marks=getattr(pytest.mark, chapter(path))) for misconception, source in answers]
    return found


@pytest.mark.parametrize(("path", "number"), every_exercise())
def test_the_solution_passes(path: Path, number: str) -> None:
    attempt(path, number)


@pytest.mark.parametrize(("path", "number"), every_exercise())
def test_the_blank_stub_fails_and_keeps_what_a_student_needs(path: Path, number: str) -> None:
    exercise, = (e for e in exercises(path) if e.number == number)
    blank = stub(exercise)
    for node in ast.walk(ast.parse(exercise.solution.source)):
        if isinstance(node, ast.FunctionDef):
            assert f"def {node.name}" in blank
            assert node.returns is not None, f"{node.name} says no return type"
            assert all(a.annotation for a in node.args.args if a.arg != "self"), f"{node.name} has untyped arguments"
    assert '"""' in blank, "the stub says nothing of what is to be written"
    with pytest.raises(NotImplementedError, match=f"chapter {exercise.chapter}, exercise {number}"):
        attempt(path, number, blank)


@pytest.mark.parametrize(("path", "number", "answer"), wrong_answers())
def test_a_usual_wrong_answer_fails_its_check(path: Path, number: str, answer: str) -> None:
    assert_caught(path, number, answer)


@pytest.mark.parametrize(("path", "number"), every_exercise())
def test_a_check_that_always_passes_would_be_noticed(path: Path, number: str) -> None:
    """Each check with its assertions made true: a listed wrong answer gets through, and the test above says so."""
    exercise, = (e for e in exercises(path) if e.number == number)

    class AlwaysTrue(ast.NodeTransformer):
        def visit_Assert(self, node: ast.Assert) -> ast.AST:
            return ast.copy_location(ast.Assert(ast.Constant(True)), node)

    toothless = ast.unparse(ast.fix_missing_locations(AlwaysTrue().visit(ast.parse(exercise.check.source))))
    assert toothless != exercise.check.source
    noticed = 0
    for _, answer in importlib.import_module(f"tests.exercises.{chapter(path)}").WRONG[number]:
        try:
            assert_caught(path, number, answer, toothless)
        except pytest.fail.Exception:   # pytest's "did not raise"
            noticed += 1
        except Exception:               # this wrong answer breaks by itself, whatever the check
            continue
    assert noticed > 0


@pytest.mark.parametrize("path", parameters(NOTEBOOKS))
def test_there_are_exercises_with_two_wrong_answers_each(path: Path) -> None:
    known = importlib.import_module(f"tests.exercises.{chapter(path)}").WRONG
    numbers = [exercise.number for exercise in exercises(path)]
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
