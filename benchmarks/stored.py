"""The stored results, as the pages read them."""

from __future__ import annotations

from pathlib import Path

from benchmarks.compare import Book
from benchmarks.result_file import Result, load

RESULTS = "benchmarks/results"


def stored(root: Path, name: str) -> Result:
    """The result of this name, which may have a folder before it ("h200/paper").

    Raises:
        ValueError: it is not stored, and how to store it; or what is stored is no result.
    """
    where = f"{RESULTS}/{name}.json"
    if not (root / where).is_file():
        raise ValueError(f"no {where}; `python -m benchmarks run --rounds 5` (or memory, widths, radix ...) and "
                         f"then `python -m benchmarks store benchmarks/results/local/quick.json {where}` make it")
    return load(root / where)


def stale_lines(book: Book, name: str) -> list[str]:
    """A line for each part of a stored result whose code is no longer the code here."""
    where = f"{RESULTS}/{name}.json"
    stale = [f"{where} row {entry.name} is stale: its code has changed" for entry in book.entries if book.stale(entry)]
    return stale + [f"{where} is stale: its code has changed" for result in book.results if book.stale_result(result)]
