"""The tables of two kinds of result that are no rows of the ladder: KV memory, and the width curve."""

from __future__ import annotations

from benchmarks.ceilings import NEVER_ABOVE
from benchmarks.compare import Book
from benchmarks.result_file import Result
from benchmarks.table import DASH, Table, number, share, size, with_range


def kv_memory_table(book: Book) -> Table:
    """Contiguous preallocation against blocks, by output length."""
    result = book.of_kind("kv_memory")
    rows = [(f"{line['output']:,}", f"{line['stored']:,}", f"{line['blocks']:,}", size(line["contiguous_bytes"]),
             size(line["paged_bytes"]), f"{line['saved']:.1%}", f"{line['streams_contiguous']:,}",
             f"{line['streams_paged']:,}") for line in result["lengths"]]
    header = ("output tokens", "tokens stored", "blocks", "contiguous", "paged", "saved", "streams contiguous",
              "streams paged")
    notes = [f"A stream has a prompt of {result['isl']:,} and stores all but its last token: contiguous in a slot of "
             f"{result['max_model_len']:,}, paged in blocks of {result['block_size']}. Streams: how many "
             f"{result['budget_bytes'] / 2**30:,.4g} GiB holds at once."]
    return Table("KV memory: bytes of one stream, and streams in a budget", header, rows, notes + stale(book, result))


def waste_table(book: Book) -> Table:
    """Slots held in which no token is stored, by block size."""
    result = book.of_kind("kv_memory")
    waste = result["waste"]
    rows = [(f"{line['block_size']}", f"{line['held_slots']:,}", f"{line['tail_slots']:,}", f"{line['waste']:.1%}",
             f"{line['waste_at_end']:.1%}") for line in waste["by_block_size"]]
    notes = [f"The {waste['prompts']} prompts of the shape {waste['shape']} (ISL {waste['isl']}, OSL {waste['osl']}). "
             "Slots are summed over all passes; waste at end: at the last pass of each sequence."]
    header = ("block size", "slots held", "slots empty", "waste", "waste at end")
    return Table("Waste: token slots held and empty, by block size", header, rows, notes + stale(book, result))


def widths_table(book: Book) -> Table:
    """ITL and tok/s by the number of sequences decoded together, beside what the machine allows."""
    result = book.of_kind("widths")
    rows = [_width(row, point, result["rounds"] > 1) for row in result["rows"] for point in row["widths"]]
    header = ("row", "width", "ITL p50 ms", "tok/s", "vs least width", "ceiling ms", "bound", "ceiling/measured",
              "linear layers ms")
    point, machine = result["turning_point"], result["machine"]
    limits = f"at {machine['bandwidth_gb_s']:,.1f} GB/s and {machine['peak_gflop_s']:,.0f} GFLOP/s"
    notes = [f"Predicted {limits}: " + ("computing a step never takes as long as reading for it." if point is None else
             f"from {point:,.1f} sequences on a step is bound by computing.")]
    notes += [f"{row['name']}: linear layers by {row['linear_path'] or DASH}." for row in result["rows"]]
    notes += [f"Warning: {row['name']}, width {point['width']}, is faster than its ceiling: that was measured too low."
              for row in result["rows"] for point in row["widths"]
              if point["ceiling_ms"] > NEVER_ABOVE * point["itl_p50_ms"]]
    if result.get("interrupted"):
        notes.append("The run was interrupted: the widths have the rounds that were finished by then.")
    return Table("Widths: sequences decoded together", header, rows, notes + stale(book, result))


def _width(row: Result, point: Result, several_rounds: bool) -> tuple[str, ...]:
    itl = with_range(number(point["itl_p50_ms"], ",.1f"), point["itl_range"] if several_rounds else None, ",.1f")
    return (row["name"], str(point["width"]), itl, number(point["tok_s"], ",.1f"),
            f"{point['tok_s'] / row['widths'][0]['tok_s']:,.2f}x", number(point["ceiling_ms"], ",.1f"), point["bound"],
            share(point["ceiling_ms"], point["itl_p50_ms"], ".2f"), number(point["linear_ms"], ",.1f"))


def stale(book: Book, result: Result) -> list[str]:
    return ["stale: the code has changed since this was measured."] if book.stale_result(result) else []
