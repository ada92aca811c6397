"""`make grade`: run the exercises of returned notebooks under nbval, and say how each went.

Each exercise runs alone, in a notebook made of the course's setup cells, the
student's own extra cells, the student's solution and the course's own check with
its stored output. So a check that was deleted or changed is noticed and does not
matter, and one broken or endless cell costs its own exercise.
"""

from __future__ import annotations

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


@dataclass(frozen=True)
class Grade:
    """How one exercise went; `reason` is one line, empty for a pass. `remark` says what was done to the notebook.

    `exercise` is empty where not even the chapter is known.
    """

    notebook: Path
    exercise: str
    verdict: Verdict
    reason: str = ""
    remark: str = ""

    def line(self) -> str:
        said = "; ".join(part for part in (self.reason, self.remark) if part)
        which = f"  exercise {self.exercise}" if self.exercise else ""
        return f"{self.notebook.name}{which}  {self.verdict}" + (f": {said}" if said else "")


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


def grade(path: Path, timeout: int, root: Path = ROOT) -> list[Grade]:
    """Grade one returned notebook: one Grade per exercise of the original, whatever state the notebook is in."""
    try:
        original = original_of(path, root)
    except ValueError as error:
        return [Grade(path, "", "broken", str(error))]
    try:
        cells = code_cells(path)
    except Exception as error:  # a file that is no notebook breaks in many ways
        why = f"cannot be read as a notebook ({type(error).__name__})"
        return [Grade(path, exercise.number, "broken", why) for exercise in exercises(original)]
    return [_grade_one(path, original, cells, exercise, timeout) for exercise in exercises(original)]


def _grade_one(path: Path, original: Path, cells: list[NotebookNode], exercise: Exercise, timeout: int) -> Grade:
    answers = tagged(cells, "solution", exercise.number)
    checks = tagged(cells, "check", exercise.number)
    remark = ""
    if not checks:
        remark = "its check was deleted, the original was used"
    elif checks[0].source != exercise.check.source:
        remark = "its check was changed, the original was used"
    if not answers:
        return Grade(path, exercise.number, "broken", "its solution cell was deleted or has lost its tags", remark)
    known = {cell.id for cell in code_cells(original)}
    own = [cell for cell in cells if cell.id not in known and not {"solution", "check", "setup"} & set(tags(cell))]
    parts = [*tagged(code_cells(original), "setup"), *own, *answers, exercise.check]
    outcomes = run(parts, timeout)
    for cell, (passed, text) in zip(parts[:-1], outcomes[:-1], strict=True):
        if not passed and "solution" in tags(cell):
            return Grade(path, exercise.number, "broken", f"the solution cell fails: {last_line(text)}", remark)
        if not passed:
            return Grade(path, exercise.number, "broken", f"a cell before it fails: {last_line(text)}", remark)
    passed, text = outcomes[-1]
    if passed:
        return Grade(path, exercise.number, "passed", remark=remark)
    if re.search(r"NotImplementedError: chapter \d+, exercise ", text):
        return Grade(path, exercise.number, "not attempted", remark=remark)
    return Grade(path, exercise.number, "failed", last_line(text), remark)


def run(cells: list[NotebookNode], timeout: int) -> list[tuple[bool, str]]:
    """Run cells as one notebook under nbval: for each, whether it passed and what was said if not.

    Only the last cell's output is compared. A cell has `timeout` seconds.
    """
    notebook = nbformat.v4.new_notebook(metadata=KERNEL)
    # nbval starts the kernel where the notebook lies; a course notebook looks for the repository around it.
    cells = [nbformat.v4.new_code_cell(f"import os\nos.chdir({str(ROOT)!r})"), *cells]
    for cell in cells:
        copy = nbformat.v4.new_code_cell(cell.source, execution_count=1,
                                         outputs=cell.outputs if cell is cells[-1] else [])
        copy.metadata["tags"] = [] if cell is cells[-1] else ["nbval-ignore-output"]
        notebook.cells.append(copy)
    with tempfile.TemporaryDirectory(prefix="liteinfer-grade-") as folder:
        path, report = Path(folder) / "exercise.ipynb", Path(folder) / "report.xml"
        nbformat.write(notebook, path)
        command = [sys.executable, "-m", "pytest", "--nbval", f"--nbval-cell-timeout={timeout}", "-q", "-c", os.devnull,
                   "--rootdir", folder, "-p", "no:cacheprovider", f"--junit-xml={report}", str(path)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        try:
            subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False,
                           timeout=(len(cells) + 1) * timeout + 120)
            cases = ET.parse(report).getroot().iter("testcase")
        except (subprocess.TimeoutExpired, OSError, ET.ParseError):
            return [(False, f"no result within the time limit of {timeout} s a cell")] * (len(cells) - 1)
        said = ["".join(f"{problem.get('message', '')}\n{problem.text or ''}" for problem in case) for case in cases]
    said += ["was not run, since a cell before it broke the kernel"] * (len(cells) - len(said))
    return [(not text, text) for text in said[1:]]


def last_line(text: str) -> str:
    """What an error report comes down to: the time limit, the exception's own line, or the differing output."""
    plain = re.sub(r"(?:\x1b|#x1B)\[[0-9;]*m", "", text)   # JUnit XML spells the escape out
    if "Timeout of" in plain or "time limit" in plain:
        return "ran past the time limit (an endless loop?)"
    raised = re.findall(r"^(\w*(?:Error|Exception|Interrupt|Exit))(?:: (.*))?$", plain, flags=re.MULTILINE)
    if raised:
        kind, message = raised[-1]
        return message if kind == "AssertionError" and message else f"{kind}: {message}".rstrip(": ")
    if "!= REFERENCE" in plain or "mismatch" in plain:
        return "the check passes but prints other numbers than expected"
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    return lines[-1] if lines else "failed"


def junit(grades: list[Grade]) -> str:
    """JUnit XML: a suite per notebook, a case per exercise."""
    root = ET.Element("testsuites")
    for notebook in dict.fromkeys(g.notebook for g in grades):
        own = [g for g in grades if g.notebook == notebook]
        counts = {kind: sum(g.verdict == kind for g in own) for kind in ("failed", "broken", "not attempted")}
        suite = ET.SubElement(root, "testsuite", name=notebook.stem, tests=str(len(own)),
                              failures=str(counts["failed"]), errors=str(counts["broken"]),
                              skipped=str(counts["not attempted"]))
        for g in own:
            case = ET.SubElement(suite, "testcase", classname=notebook.stem, name=f"exercise {g.exercise}".strip())
            if g.verdict != "passed":
                element = {"failed": "failure", "broken": "error", "not attempted": "skipped"}[g.verdict]
                ET.SubElement(case, element, message=g.reason or g.verdict)
            if g.remark:
                ET.SubElement(case, "system-out").text = g.remark
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"
