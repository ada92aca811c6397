"""Two result sets side by side: what became better, what became worse, and what is no regression.

Two sets are two runs, and of two versions of the code: that is the point, and no
reason for doubt. Everything else that was not alike is, and carries a `~`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.compare import Book
from benchmarks.compare_sides import Findings, Sides, no_hash
from benchmarks.report import facts_table
from benchmarks.result_file import Result, load
from benchmarks.table import Table

NOISE = 0.1


def compare(a: Path, b: Path, noise: float = NOISE) -> Findings:
    """Compare two result files, or two folders of them by file name; a file is also looked up in a folder by its name.

    Raises:
        ValueError: a noise that is no share from 0 to below 1, a file that is no result, two results of
            different kinds, or nothing that is in both.
    """
    if not 0 <= noise < 1:
        raise ValueError(f"noise must be a share from 0 to below 1, such as {NOISE}, got {noise}")
    mine, theirs = _read(a), _read(b)
    found = Findings(noise)
    if a.is_dir() or b.is_dir():
        pairs = {f"{Path(name).stem}: ": (mine[name], theirs[name]) for name in mine if name in theirs}
        found.told += [f"Only in {side}: {', '.join(names)}." for side, names in (
            ("A", [name for name in mine if name not in theirs]), ("B", [name for name in theirs if name not in mine])
        ) if names]
    else:
        pairs = {"": (mine[a.name], theirs[b.name])}
    if not pairs:
        raise ValueError(f"{a} and {b} have no file name in common: {', '.join(mine)} against {', '.join(theirs)}")
    found.tables.append(_facts(list(pairs.values())))
    for place, (first, second) in pairs.items():
        Sides(place, first, second, found).compare()
    if not found.rows and not found.regressions:
        raise ValueError(f"{a} and {b} have no row in common")
    found.tables.append(found.closing())
    return found


def _facts(pairs: Sequence[tuple[Result, Result]]) -> Table:
    """The strips on top of both; a line that is the same on both sides once."""
    sides = [facts_table(Book(results, no_hash)).notes for results in zip(*pairs, strict=True)]
    lines = [f"{'A and B' if line in sides[1] else 'A'}: {line}" for line in sides[0]]
    return Table("", (), [], [*lines, *(f"B: {line}" for line in sides[1] if line not in sides[0])])


def _read(path: Path) -> dict[str, Result]:
    if not path.is_dir():
        return {path.name: load(path)}
    if not (files := sorted(path.glob("*.json"))):
        raise ValueError(f"{path}: no result file in this folder")
    return {file.name: load(file) for file in files}
