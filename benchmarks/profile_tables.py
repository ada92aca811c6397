"""The table of where a decode step's time goes."""

from __future__ import annotations

from benchmarks.compare import Book
from benchmarks.prefix_tables import ends
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
