"""The tables of chapter 9: where a decode step's time goes, and what each piece of the fast row brings."""

from __future__ import annotations

from statistics import median

from benchmarks.compare import Book
from benchmarks.pieces import title
from benchmarks.prefix_tables import ends, ranged
from benchmarks.result_file import Result
from benchmarks.table import DASH, Table, number, with_range

HEADINGS = {"linear": "linear layers", "attention": "attention", "gather": "gather", "norms": "norms, rotations",
            "sampling": "sampling", "scheduling": "scheduling", "between": "Python between",
            "unattributed": "unattributed"}


def profile_table(book: Book) -> Table:
    """Milliseconds of each part of a decode step, and below each width what the machine allows."""
    result = book.of_kind("profile")
    rows, several = [], result["rounds"] > 1
    for width in sorted({row["width"] for row in result["rows"]}):
        here = [row for row in result["rows"] if row["width"] == width]
        rows += [(row["name"], str(width),
                  with_range(number(row["step_ms"], ",.1f"), row["step_range"] if several else None, ",.1f"),
                  number(row["profiled_ms"], ",.1f"), *(number(row["parts_ms"][part], ",.2f") for part in HEADINGS))
                 for row in here]
        least = here[0]["ceilings_ms"]
        rows.append(("least", str(width), number(least["step"], ",.1f"), DASH,
                     *(number(least[part], ",.2f") if part in least else DASH for part in HEADINGS)))
    machine = result["machine"]
    notes = [f"ISL {result['isl']}, OSL {result['osl']}: steps in which all sequences decode, in ms. Step: without the "
             "profiler, whose own time is in the parts and in their sum, profiled. Linear layers to scheduling: the "
             "time in them; Python between: the forward's time in which no operation runs.",
             f"Least: bytes at {machine['bandwidth_gb_s']:,.1f} GB/s or operations at {machine['peak_gflop_s']:,.0f} "
             "GFLOP/s, whichever takes longer."]
    return Table("Profile: where a decode step's time goes", ("row", "width", "step ms", "profiled ms",
                                                              *HEADINGS.values()), rows,
                 notes + ends(book, result), keys=2)


def pieces_table(book: Book) -> Table:
    """Each variant at each width: its step, its prefill, and how many times as long as the whole row's."""
    result = book.of_kind("pieces")
    whole = {row["width"]: row for row in result["rows"] if not row["without"]}
    rows = [(title(row["without"]), str(row["width"]), ranged(result, row, "itl_p50_ms", "itl_range"),
             number(row["width"] / row["itl_p50_ms"] * 1000, ",.1f"), _times(row, whole.get(row["width"]), "itl_ms"),
             ranged(result, row, "prefill_ms", "prefill_range"), _times(row, whole.get(row["width"]), "prefill_ms"))
            for row in sorted(result["rows"], key=lambda row: row["width"])]
    notes = [f"ISL {result['isl']}, OSL {result['osl']}: as many requests at once as the width. Without a piece: the "
             "plain part of rung 6 in its place. Prefill: until every request has its first token. Takes: times as "
             "long as with all pieces, the median of the rounds' ratios."]
    header = ("variant", "width", "ITL p50 ms", "tok/s", "takes", "prefill ms", "prefill takes")
    return Table("Pieces: what each of them brings", header, rows, notes + ends(book, result), keys=2)


def _times(row: Result, whole: Result | None, key: str) -> str:
    pairs = zip(row["rounds"], whole["rounds"], strict=False) if whole else ()
    ratios = [mine[key] / theirs[key] for mine, theirs in pairs]
    return f"{median(ratios):,.2f}x" if ratios else DASH
