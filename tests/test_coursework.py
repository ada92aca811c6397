"""Handing out and grading: what a student gets, and what an instructor is told."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import nbformat
import pytest

from coursework.cells import ROOT, code_cells, exercises, notebooks, tagged, tags
from coursework.grade import OTHER_OUTPUT, PAST_LIMIT, Grade, definitions, failure, grade, junit, original_of, returned
from coursework.handout import hand_out

CH01 = next(path for path in notebooks() if path.name.startswith("01"))


@pytest.fixture(scope="module")
def handout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("handed") / "a folder"
    assert [path.name for path in hand_out(target)] == [path.name for path in notebooks()]
    return target


def test_a_handout_has_all_a_student_needs_and_no_answer(handout: Path) -> None:
    for name in ("README.md", "Makefile", "constraints.txt", "liteinfer/llm.py", "benchmarks/run.py",
                 "chapters/01_no_cache/README.md"):
        assert (handout / name).is_file(), name
    for name in ("tests", "coursework", "chapters/INSTRUCTORS.md", ".git"):
        assert not (handout / name).exists(), name
    for original in notebooks():
        theirs = nbformat.read(handout / "notebooks" / original.name, as_version=4)
        ours = nbformat.read(original, as_version=4)
        assert len(theirs.cells) == len(ours.cells)
        for mine, other in zip(ours.cells, theirs.cells, strict=True):
            if "solution" in tags(mine):
                number = mine.metadata["exercise"]
                chapter = int(number.split(".")[0])
                assert f'raise NotImplementedError("chapter {chapter}, exercise {number}' in other.source
                assert other.outputs == [] and tags(other) == tags(mine)
            else:
                assert other == mine
        for exercise in exercises(original):
            lines = map(str.strip, exercise.solution.source.splitlines())
            body = [line for line in lines if line.startswith("return ")]
            blank, = tagged([c for c in theirs.cells if c.cell_type == "code"], "solution", exercise.number)
            assert not any(line in blank.source for line in body), "the answer is still in the student's copy"


def test_a_handout_goes_into_an_empty_folder_outside(tmp_path: Path) -> None:
    (tmp_path / "kept.txt").write_text("mine")
    with pytest.raises(ValueError, match="not an empty folder"):
        hand_out(tmp_path)
    with pytest.raises(ValueError, match="lies inside the course"):
        hand_out(ROOT / "handout")
    assert [p.name for p in tmp_path.iterdir()] == ["kept.txt"]


def submission(folder: Path, edits: dict[str, str | None], extra: str | None = None) -> Path:
    """A returned chapter 1: solution cells replaced (None: as in the handout), perhaps with a cell of their own."""
    hand_out(folder / "handout")
    path = folder / "handout" / "notebooks" / CH01.name
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if "solution" in cell.metadata.get("tags", []) and (answer := edits.get(cell.metadata["exercise"])) is not None:
            cell.source = answer
    if extra is not None:
        notebook.cells.insert(1, nbformat.v4.new_code_cell(extra))
    target = folder / f"{CH01.stem}_ann.ipynb"
    nbformat.write(notebook, target)
    return target


@pytest.mark.notebook
def test_grading_says_how_each_exercise_went(tmp_path: Path) -> None:
    """Solved with a helper of the student's own, a usual mistake, an endless loop, not attempted.

    Cells of their own that fail or never end cost nothing.
    """
    first, second, third, *rest = exercises(CH01)
    misconception, wrong = importlib.import_module("tests.exercises.ch01").WRONG[second.number][0]
    path = submission(tmp_path, {
        first.number: first.solution.source + "\nassert helper() == 1\nprint('debugging')\n",
        second.number: wrong,
        third.number: "while True:   # the time limit will end this\n    pass",
    }, extra="def helper() -> int:\n    return 1\n\nwork(3, 4)\nwhile True:\n    pass")
    grades = {g.exercise: g for g in grade(path, timeout=25)}
    assert grades[first.number].verdict == "passed", grades[first.number].line()
    assert grades[second.number].verdict == "failed"
    assert len(grades[second.number].reason.split()) >= 5, (misconception, grades[second.number].reason)
    assert grades[third.number].verdict == "broken" and "time limit" in grades[third.number].reason
    assert [grades[e.number].verdict for e in rest] == ["not attempted"] * len(rest)
    assert all("\n" not in g.line() and "\x1b" not in g.line() and "#x1B" not in g.line() for g in grades.values())


@pytest.mark.slow
@pytest.mark.notebook
@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_the_solutions_pass_their_own_grading(path: Path) -> None:
    grades = grade(path, timeout=60)
    assert [g.verdict for g in grades] == ["passed"] * len(exercises(path)), [g.line() for g in grades]
    assert not any(g.remark for g in grades)


@pytest.mark.slow
@pytest.mark.notebook
def test_a_check_that_was_deleted_or_changed_is_reported_and_does_not_help(tmp_path: Path) -> None:
    first, second, *_ = exercises(CH01)
    path = submission(tmp_path, {})
    notebook = nbformat.read(path, as_version=4)
    for cell in list(notebook.cells):
        if "check" in cell.metadata.get("tags", []) and cell.metadata["exercise"] == first.number:
            notebook.cells.remove(cell)
        elif "check" in cell.metadata.get("tags", []) and cell.metadata["exercise"] == second.number:
            cell.source = "print('all good')"
    nbformat.write(notebook, path)
    grades = {g.exercise: g for g in grade(path, timeout=40)}
    assert grades[first.number].verdict == grades[second.number].verdict == "not attempted"
    assert "deleted" in grades[first.number].remark and "changed" in grades[second.number].remark


def test_what_is_no_notebook_or_lost_its_cells_is_reported(tmp_path: Path) -> None:
    broken = tmp_path / f"{CH01.stem}_bob.ipynb"
    broken.write_text("{ this is not JSON")
    assert {g.verdict for g in grade(broken, timeout=5)} == {"broken"}
    empty = tmp_path / f"{CH01.stem}_eve.ipynb"
    nbformat.write(nbformat.v4.new_notebook(), empty)
    grades = grade(empty, timeout=5)
    assert len(grades) == len(exercises(CH01))
    assert all(g.verdict == "broken" and "deleted" in g.reason for g in grades)
    with pytest.raises(ValueError, match="no notebook there"):
        returned(tmp_path / "nothing")
    with pytest.raises(ValueError, match="no notebook of this course"):
        original_of(tmp_path / "homework.ipynb")
    assert [p.name for p in returned(tmp_path)] == [broken.name, empty.name]


def test_junit_counts_and_reasons() -> None:
    path = "ann/01_no_cache.ipynb"
    grades = [Grade(path, "1.1", "passed"), Grade(path, "1.2", "failed", "off by <one>"),
              Grade(path, "1.3", "not attempted", remark="its check was changed"), Grade(path, "1.4", "broken", "no")]
    suite, = ET.fromstring(junit(grades).split("?>", 1)[1])
    assert {k: suite.get(k) for k in ("tests", "failures", "errors", "skipped")} == {
        "tests": "4", "failures": "1", "errors": "1", "skipped": "1"}
    assert [case.get("name") for case in suite] == [f"exercise {g.exercise}" for g in grades]
    assert suite[1][0].get("message") == "off by <one>"
    assert suite[2].find("system-out") is not None


def report(message: str, source: str = "x = 1", traceback: str = "") -> str:
    """As nbval puts it, colours spelled as JUnit XML spells them."""
    trace = f"\n#x1B[94mTraceback:#x1B[0m\n{traceback}\n" if traceback else ""
    return (f"#x1B[91mNotebook cell execution failed#x1B[0m\n#x1B[94mCell 3: {message}\n\nInput:\n#x1B[0m"
            f"{source}\n{trace}")


RAISED = "Cell execution caused an exception"


@pytest.mark.parametrize(("text", "expected"), [
    ("", ""),
    (report(RAISED, traceback="#x1B[31m----#x1B[39m\n#x1B[31mAssertionError#x1B[39m: TTFT is no gap: it\nis a wait"),
     "TTFT is no gap: it is a wait"),
    (report(RAISED, traceback="ZeroDivisionError: division by zero"), "ZeroDivisionError: division by zero"),
    (report(RAISED, traceback='NotImplementedError: chapter 1, exercise 1.2: yours'),
     "NotImplementedError: chapter 1, exercise 1.2: yours"),
    (report(RAISED, "# Timeout of 5 seconds exceeded: near the time limit", "SyntaxError: invalid syntax"),
     "SyntaxError: invalid syntax"),
    (report("Timeout of 20 seconds exceeded executing cell", traceback="KeyboardInterrupt: "), PAST_LIMIT),
    (report("Cell outputs differ", traceback="mismatch 'stdout'"), OTHER_OUTPUT),
])
def test_an_error_report_comes_down_to_one_line(text: str, expected: str) -> None:
    assert failure(text) == expected


def test_of_a_students_own_cells_only_definitions_are_kept() -> None:
    assert definitions("import math\nx = 1\nprint(x)\ndef f(a: int) -> int:\n    return a\nwhile True: pass") == (
        "import math\n\ndef f(a: int) -> int:\n    return a")
    assert definitions("this is no python") == definitions("%timeit f()") == ""


@pytest.mark.slow
@pytest.mark.notebook
def test_a_notebook_of_another_format_or_with_odd_metadata_is_graded(tmp_path: Path) -> None:
    """Colab writes 4.0 notebooks without cell ids; a "tags": null or a cell without source must not end the run."""
    notebook = nbformat.read(CH01, as_version=4)
    notebook.nbformat_minor = 0
    for cell in notebook.cells:
        cell.pop("id", None)
        if not cell.metadata.get("tags"):
            cell.metadata["tags"] = None
    path = tmp_path / CH01.name
    path.write_text(json.dumps(notebook))
    assert all(g.verdict in ("passed", "broken", "failed") for g in grade(path, timeout=40))
    for cell in notebook.cells:
        cell.pop("source", None)
    path.write_text(json.dumps(notebook))
    assert {g.verdict for g in grade(path, timeout=40)} == {"broken"}


def test_the_command_line(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "coursework", *arguments], cwd=ROOT, capture_output=True,
                              text=True, check=False)

    stray = tmp_path / "returned"
    stray.mkdir()
    shutil.copy(CH01, stray / "homework.ipynb")
    (stray / f"{CH01.stem}_bob.ipynb").write_text("not JSON")
    done = run("grade", str(stray), "--junit", str(tmp_path / "out" / "grades.xml"))
    assert done.returncode == 0, done.stderr
    assert "homework.ipynb  broken: no notebook of this course" in done.stdout
    assert f"0 of {len(exercises(CH01)) + 1} exercises passed" in done.stdout
    assert ET.parse(tmp_path / "out" / "grades.xml").getroot().tag == "testsuites"
    nothing = run("grade", str(tmp_path / "nothing"))
    assert nothing.returncode == 2 and nothing.stderr.count("\n") == 1 and "no notebook there" in nothing.stderr
    assert len(code_cells(CH01)) > 0
