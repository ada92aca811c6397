"""The tables of requests across shapes: what a row gains over its base, against vLLM, and where its time goes."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from benchmarks.compare import Book
from benchmarks.prefix_tables import ends
from benchmarks.result_file import Result
from benchmarks.shapes import RECOMPUTES
from benchmarks.table import DASH, Table, number
from liteinfer.lineage import LADDER, reference_at

Place = tuple[int, int]                     # ISL and OSL
Rows = dict[str, dict[Place, Result]]       # by name


def shapes_table(book: Book) -> Table:
    """E2E by shape, with the gain over the row's base at the same shape."""
    def cell(rows: Rows, name: str, place: Place) -> str:
        base = _base(rows, name)
        gain = _gain(rows[name][place], rows[base].get(place)) if base else None
        return number(rows[name][place]["e2e_ms"] / 1000, ",.2f") + (f" ({gain:,.2f}x)" if gain else "")

    what = ("In brackets how many times faster than its base at the same shape: the row it improves on, or the nearest "
            "before that one that was run.")
    return _by_shape(book, "Across shapes: E2E in seconds, one request at a time", cell, [what])


def shapes_vllm_table(book: Book) -> Table:
    """How many times faster than vLLM, by shape."""
    def cell(rows: Rows, name: str, place: Place) -> str:
        gain = _gain(rows[name][place], rows.get(reference_at(1), {}).get(place))
        return f"{gain:,.2f}x" if gain else DASH

    return _by_shape(book, "Across shapes: E2E against vLLM", cell, [])


def shapes_split_table(book: Book) -> Table:
    """TTFT and TPOT by ISL, of the longest outputs."""
    result = book.of_kind("shapes")
    rows, places = _rows(result)
    longest = [place for place in places if place[1] == max(osl for _, osl in places)]
    figures = [(place, key) for key in ("ttft_ms", "tpot_ms") for place in longest]
    header = ("row", *(f"{'TTFT' if key == 'ttft_ms' else 'TPOT'} ms, {place[0]:,} in" for place, key in figures))
    cells = [(name, *(number(at[place][key], ",.1f") if place in at else DASH for place, key in figures))
             for name, at in rows.items()]
    return Table("Across shapes: the first token, and each one after it", header, cells,
                 [f"Outputs of {longest[0][1]:,} tokens.", *_left_out(rows, places), *ends(book, result)])


def _by_shape(book: Book, title: str, cell: Callable[[Rows, str, Place], str], notes: list[str]) -> Table:
    result = book.of_kind("shapes")
    rows, places = _rows(result)
    cells = [(name, *(cell(rows, name, place) if place in at else DASH for place in places))
             for name, at in rows.items()]
    count = result["prompts"]
    notes = [f"Medians over {count} prompts of each shape." if count > 1 else "One prompt of each shape.", *notes]
    return Table(title, ("row", *(f"{isl:,} in, {osl:,} out" for isl, osl in places)), cells,
                 [*notes, *_left_out(rows, places), *ends(book, result)])


def _rows(result: Result) -> tuple[Rows, list[Place]]:
    rows: Rows = {}
    for row in result["rows"]:
        rows.setdefault(row["name"], {})[row["isl"], row["osl"]] = row
    return rows, sorted({place for at in rows.values() for place in at})


def _base(rows: Rows, name: str) -> str | None:
    """The nearest row that this one improves on, directly or through others, among those that were run."""
    above = {row.name: row.improves_on for row in LADDER}
    while (found := above.get(name)) is not None:
        if found in rows:
            return found
        name = found
    return None


def _gain(row: Result, other: Result | None) -> float | None:
    """How many times faster than the other: the median of the rounds' ratios."""
    pairs = zip(row["rounds"], other["rounds"], strict=False) if other else ()
    ratios = [theirs["e2e_ms"] / mine["e2e_ms"] for mine, theirs in pairs]
    return median(ratios) if ratios else None


def _left_out(rows: Rows, places: list[Place]) -> list[str]:
    if RECOMPUTES.name not in rows or len(rows[RECOMPUTES.name]) == len(places):
        return []
    return [f"{RECOMPUTES.name} computes the whole text again for every token: it was run at the least ISL only."]
