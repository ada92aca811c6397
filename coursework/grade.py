"""`make grade`: run the exercises of returned notebooks under nbval, and say how each went.

Each exercise runs alone, in a notebook made of the course's setup cells, what
the student's own cells define, the student's solution, and the course's own
check with its stored output. So a check that was deleted or changed is noticed
and does not matter, and one broken or endless cell costs its own exercise.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import nbformat
from nbformat import NotebookNode

from coursework.cells import ROOT, Exercise, code_cells, exercises, notebooks, tagged, tags
from coursework.execute import KERNEL

Verdict = Literal["passed", "failed", "not attempted", "broken"]
PAST_LIMIT = "ran past the time limit (an endless loop?)"
OTHER_OUTPUT = "the check passes but prints something else"


class GradingError(ValueError):
    """Grading itself does not work here, whatever was returned."""


@dataclass(frozen=True)
class Grade:
    """How one exercise went; `reason` is one line, empty for a pass. `remark` says what else was noticed.

    `exercise` is empty where not even the chapter is known.
    """

    notebook: str            # its path below what is graded
    exercise: str
    verdict: Verdict
    reason: str = ""
    remark: str = ""

    def line(self) -> str:
        said = "; ".join(part for part in (self.reason, self.remark) if part)
        which = f"  exercise {self.exercise}" if self.exercise else ""
        return f"{self.notebook}{which}  {self.verdict}" + (f": {said}" if said else "")


def returned(path: Path) -> list[Path]:
    """The notebooks to grade: the one named, or all in the folder.

    Raises:
        ValueError: there are none.
    """
    found = sorted(path.rglob("*.ipynb")) if path.is_dir() else [path] if path.is_file() else []
    found = [p for p in found if ".ipynb_checkpoints" not in p.parts]
    if not found:
        raise ValueError(f"{path}: no notebook there")
    return found


def original_of(path: Path, root: Path = ROOT) -> Path:
    """The course's notebook that a returned one goes back to, by its name, which may have grown (01_no_cache_ann).

    Raises:
        ValueError: none of them.
    """
    for original in notebooks(root):
        if path.stem.startswith(original.stem):
            return original
    names = ", ".join(p.name for p in notebooks(root))
    raise ValueError(f"no notebook of this course; the name must begin like one of {names}")


def grade(path: Path, timeout: int, name: str | None = None, root: Path = ROOT) -> list[Grade]:
    """Grade one returned notebook: one Grade per exercise of the original, whatever state the notebook is in."""
    name = name or path.name
    try:
        original = original_of(path, root)
    except ValueError as error:
        return [Grade(name, "", "broken", str(error))]
    grades = []
    for exercise in exercises(original):
        try:
            grades.append(_grade_one(name, code_cells(original), code_cells(path), exercise, timeout))
        except GradingError:
            raise
        except Exception as error:   # what was returned may be anything
            why = f"the notebook cannot be read ({type(error).__name__}: {' '.join(str(error).split())[:100]})"
            grades.append(Grade(name, exercise.number, "broken", why))
    return grades


def _grade_one(name: str, original: list[NotebookNode], cells: list[NotebookNode], exercise: Exercise,
               timeout: int) -> Grade:
    answers = tagged(cells, "solution", exercise.number)
    checks = tagged(cells, "check", exercise.number)
    remark = ""
    if not checks:
        remark = "its check was deleted, the original was used"
    elif checks[0].source != exercise.check.source:
        remark = "its check was changed, the original was used"
    if not answers:
        return Grade(name, exercise.number, "broken", "its solution cell was deleted or has lost its tags", remark)
    known = {cell.source for cell in original}
    own = [definitions(cell.source) for cell in cells
           if cell.source not in known and not {"solution", "check"} & set(tags(cell))]
    parts = [*(cell.source for cell in tagged(original, "setup")), "\n\n".join(filter(None, own)),
             *(cell.source for cell in answers)]
    *before, last = run(parts, exercise.check, timeout)
    for i, failure in enumerate(before):
        if failure:
            where = "the solution cell" if i >= len(before) - len(answers) else "what stands before the solution"
            return Grade(name, exercise.number, "broken", f"{where} fails: {failure}", remark)
    if last == OTHER_OUTPUT:
        remark = "; ".join(filter(None, [remark, "it prints something else than the original (a leftover print?)"]))
        return Grade(name, exercise.number, "passed", remark=remark)
    if last.startswith("NotImplementedError: chapter "):
        return Grade(name, exercise.number, "not attempted", remark=remark)
    return Grade(name, exercise.number, "failed" if last else "passed", last, remark)


def definitions(source: str) -> str:
    """What a student's own cell gives to a solution: its imports, functions and classes, and nothing that runs."""
    try:
        body = ast.parse(source).body
    except SyntaxError:
        return ""
    kept = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    return "\n\n".join(ast.unparse(node) for node in body if isinstance(node, kept))


def run(parts: list[str], check: NotebookNode, timeout: int) -> list[str]:
    """Run `parts`, then the check, as one notebook under nbval: for each, in one line, what failed; empty if nothing.

    Only the check's output is compared. A cell has `timeout` seconds.

    Raises:
        GradingError: nbval itself did not run.
    """
    # nbval starts the kernel where the notebook lies; a course notebook looks for the repository around it.
    sources = [f"import os\nos.chdir({str(ROOT)!r})", *parts]
    loose = {"tags": ["nbval-ignore-output"]}
    cells = [nbformat.v4.new_code_cell(source, metadata=loose, execution_count=1) for source in sources]
    cells.append(nbformat.v4.new_code_cell(check.source, outputs=check.outputs, execution_count=1))
    with tempfile.TemporaryDirectory(prefix="liteinfer-grade-") as folder:
        path, report = Path(folder) / "exercise.ipynb", Path(folder) / "report.xml"
        nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=KERNEL), path)
        command = [sys.executable, "-m", "pytest", "--nbval", f"--nbval-cell-timeout={timeout}", "-q", "-c", os.devnull,
                   "--rootdir", folder, "-p", "no:cacheprovider", "-p", "coursework.nbval_stderr",
                   f"--junit-xml={report}", str(path)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        environment.pop("PYTEST_ADDOPTS", None)
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
                                  timeout=(len(cells) + 1) * timeout + 120)
        except subprocess.TimeoutExpired:
            return [PAST_LIMIT] * (len(cells) - 1)
        if not report.is_file():
            raise GradingError(f"nbval did not run: {(done.stderr or done.stdout).strip().splitlines()[-1:]}")
        cases = ET.parse(report).getroot().iter("testcase")
        said = [failure("".join(problem.text or "" for problem in case)) for case in cases]
    said += ["was not run, since a cell before it ended the kernel"] * (len(cells) - len(said))
    return said[1:]


def failure(report: str) -> str:
    """What nbval says of a cell, in one line: the time limit, the exception with its message, or the output."""
    plain = re.sub(r"(?:\x1b|#x1B)\[[0-9;]*m", "", report)   # JUnit XML spells the escape out
    head, _, rest = plain.partition("\nInput:\n")
    if not plain.strip():
        return ""
    if "Timeout of " in head:
        return PAST_LIMIT
    if "Cell outputs differ" in head:
        return OTHER_OUTPUT
    trace = rest.rpartition("\nTraceback:\n")[2]
    raised = re.findall(r"^(\w+): (.*(?:\n(?!\w+: ).+)*)", trace, flags=re.MULTILINE)
    if "caused an exception" in head and raised:
        kind, message = raised[-1]
        message = " ".join(message.split())
        return message if kind == "AssertionError" and message else f"{kind}: {message}".rstrip(": ")
    lines = [line.strip() for line in (trace or head).splitlines() if line.strip()]
    return lines[-1] if lines else "failed"


def junit(grades: list[Grade]) -> str:
    """JUnit XML: a suite per notebook, a case per exercise."""
    root = ET.Element("testsuites")
    for notebook in dict.fromkeys(g.notebook for g in grades):
        own = [g for g in grades if g.notebook == notebook]
        name = notebook.removesuffix(".ipynb")
        counts = {kind: sum(g.verdict == kind for g in own) for kind in ("failed", "broken", "not attempted")}
        suite = ET.SubElement(root, "testsuite", name=name, tests=str(len(own)),
                              failures=str(counts["failed"]), errors=str(counts["broken"]),
                              skipped=str(counts["not attempted"]))
        for g in own:
            case = ET.SubElement(suite, "testcase", classname=name, name=f"exercise {g.exercise}".strip())
            if g.verdict != "passed":
                element = {"failed": "failure", "broken": "error", "not attempted": "skipped"}[g.verdict]
                ET.SubElement(case, element, message=g.reason or g.verdict)
            if g.remark:
                ET.SubElement(case, "system-out").text = g.remark
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"
