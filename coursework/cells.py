"""The exercises of a notebook, found by the tags of its cells.

`setup` cells hold what exercises need; a `solution` and a `check` cell with the
metadata entry `exercise` ("1.2") make an exercise. A check uses nothing but the
setup cells and its solution.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Exercise:
    number: str              # "1.2"
    solution: NotebookNode
    check: NotebookNode

    @property
    def chapter(self) -> int:
        return int(self.number.split(".")[0])


def notebooks(root: Path = ROOT) -> list[Path]:
    """The course's own notebooks, in order."""
    return sorted((root / "notebooks").glob("*.ipynb"))


def code_cells(path: Path) -> list[NotebookNode]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def tags(cell: NotebookNode) -> list[str]:
    return list(cell.metadata.get("tags") or [])


def tagged(cells: list[NotebookNode], tag: str, exercise: str | None = None) -> list[NotebookNode]:
    """The cells with this tag (of this exercise)."""
    return [c for c in cells if tag in tags(c) and exercise in (None, c.metadata.get("exercise"))]


def exercises(path: Path) -> list[Exercise]:
    """The exercises of a notebook of the course.

    Raises:
        ValueError: an exercise without exactly one solution and one check.
    """
    cells, found = code_cells(path), []
    for number in dict.fromkeys(c.metadata.get("exercise") for c in cells if {"solution", "check"} & set(tags(c))):
        solution, check = tagged(cells, "solution", number), tagged(cells, "check", number)
        if number is None or len(solution) != 1 or len(check) != 1:
            raise ValueError(f"{path.name}: exercise {number} has {len(solution)} solution cells, {len(check)} checks")
        found.append(Exercise(number, solution[0], check[0]))
    return found


def stub(exercise: Exercise) -> str:
    """The solution cell as a student gets it: imports, signatures and docstrings, and bodies that raise."""
    lines = exercise.solution.source.splitlines()
    kept: list[str] = []
    for node in ast.parse(exercise.solution.source).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            kept += lines[node.lineno - 1:node.end_lineno]
        elif isinstance(node, ast.FunctionDef):
            kept += ["", "", *_without_body(node, lines, exercise)]
        elif isinstance(node, ast.ClassDef):
            kept += ["", "", *_class_without_bodies(node, lines, exercise)]
    return "\n".join(kept).strip() + "\n"


def _class_without_bodies(node: ast.ClassDef, lines: list[str], exercise: Exercise) -> list[str]:
    kept = lines[_start(node) - 1:node.body[0].lineno - 1]
    for part in node.body:
        if isinstance(part, ast.FunctionDef):
            kept += ["", *_without_body(part, lines, exercise)]
        elif part is node.body[0] and isinstance(part, ast.Expr):   # the docstring
            kept += lines[part.lineno - 1:part.end_lineno]
    return kept


def _without_body(node: ast.FunctionDef, lines: list[str], exercise: Exercise) -> list[str]:
    """Signature and docstring, then the raise."""
    first = node.body[0]
    documented = isinstance(first, ast.Expr) and ast.get_docstring(node) is not None
    end = first.end_lineno if documented else first.lineno - 1
    what = f"chapter {exercise.chapter}, exercise {exercise.number}: {node.name} is yours to write"
    return [*lines[_start(node) - 1:end], f'{" " * (node.col_offset + 4)}raise NotImplementedError("{what}")']


def _start(node: ast.FunctionDef | ast.ClassDef) -> int:
    return min([node.lineno, *(d.lineno for d in node.decorator_list)])
