"""The published figures of the two projects that this one answers, beside ours.

Theirs were reported by their authors, on their machines, and none was measured
again here. What can be compared is a ratio with a ratio.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from benchmarks.compare import Book, Entry, Ratio
from benchmarks.draft_tables import draft
from benchmarks.measured import LATENCY, PER_EVENT, THROUGHPUT, Measured, drafts, remarks
from benchmarks.prefix_tables import ends
from benchmarks.result_file import Result
from benchmarks.table import DASH, Table, number, share, size
from liteinfer.lineage import LADDER

FILE = Path(__file__).parent / "data" / "published.json"
SPECULATIVE = "liteinfer-speculative"   # the row whose draft stands beside a draft model
KB = 1024                               # as the published figures count
FIGURES = {                             # of a table of the ladder: theirs and ours, each with its format
    "latency": (("ITL p50 ms", ("itl_p50_ms", ",.1f"), ("latency.itl_p50_ms", ",.1f")),
                ("TTFT p50 ms", ("ttft_p50_ms", ",.1f"), ("latency.ttft_p50_ms", ",.1f")),
                ("E2E p50 ms", ("e2e_p50_ms", ",.1f"), ("latency.e2e_p50_ms", ",.1f"))),
    "throughput": (("tok/s", ("tok_s", ",.1f"), ("throughput.tok_s", ",.1f")),
                   ("req/s", ("req_s", ",.1f"), ("throughput.req_s", ",.2f"))),
}
UNITS = {"latency": "milliseconds", "throughput": "tok/s"}
BY_TPOT = "vs first and vs vLLM of a row that drafts: by TPOT."


@lru_cache
def published() -> Result:
    """All that is quoted, with its source, date, machine and model. Read only."""
    return dict(json.loads(FILE.read_text(encoding="utf-8")))


def published_latency_table(book: Book, rows: Sequence[str] | None = None) -> Table:
    """One request in flight: theirs and ours by row; of all rows or of some."""
    return _ladder(LATENCY, book, rows)


def published_throughput_table(book: Book, rows: Sequence[str] | None = None) -> Table:
    """All prompts at once: theirs and ours by row; of all rows or of some."""
    return _ladder(THROUGHPUT, book, rows)


def _ladder(kind: Measured, book: Book, rows: Sequence[str] | None) -> Table:
    theirs, figures = published()["liteinfer"], FIGURES[kind.what]
    by_name = {row["name"]: row for row in theirs["rows"]}
    shown = [e for e in book.entries if rows is None or e.name in rows]
    lines, uneven = [], dict[str, list[str]]()
    for name, entry in _lined_up(shown, [name for name in by_name if rows is None or name in rows]):
        row = by_name.get(name, {})
        cells = [cell for _, (key, spec), (path, our_spec) in figures
                 for cell in (number(row.get(key), spec), number(entry.get(path) if entry else None, our_spec))]
        for other_row, other in ((theirs["rows"][0], book.beside(entry, LADDER[0].name) if entry else None),
                                 (by_name.get(row.get("reference")),
                                  book.reference(entry, kind.what) if entry else None)):
            gain = book.gain(entry, other, kind.metric(entry, other), kind.lower_is_better) if entry else None
            if entry and other and gain and gain.doubts:
                uneven.setdefault(", ".join(gain.doubts), []).append(f"{entry.name} / {other.name}")
            cells += [str(_their_gain(kind, row, other_row) or DASH), str(gain or DASH)]
        lines.append((book.label(entry, kind.what) if entry else name, *cells))
    headings = (*(heading for heading, *_ in figures), "vs first", "vs vLLM")
    notes = [_whose(theirs, theirs["model"], [e.result for e in shown], UNITS[kind.what]),
             _their_workload(theirs), _their_ratios(theirs)]
    notes += [PER_EVENT, BY_TPOT] if kind is LATENCY and any(map(drafts, shown)) else []
    notes += [f"~ not measured alike ({why}): {', '.join(dict.fromkeys(pairs))}." for why, pairs in uneven.items()]
    return Table(f"Published {kind.what}: the liteinfer page's figures (theirs) beside ours",
                 ("row", *_sides(headings)), lines, [*notes, *remarks(book, shown)])


def _lined_up(shown: Sequence[Entry], theirs: Sequence[str]) -> Iterator[tuple[str, Entry | None]]:
    """Every row of either side in ladder order, the references last; once for each entry of ours."""
    order = [row.name for row in LADDER]
    names = dict.fromkeys((*theirs, *(entry.name for entry in shown)))
    for name in sorted(names, key=lambda name: order.index(name) if name in order else len(order)):
        entries = [entry for entry in shown if entry.name == name]
        yield from ((name, entry) for entry in entries or (None,))


def _their_gain(kind: Measured, row: Result, other: Result | None) -> Ratio | None:
    """Computed from their figures as they are rounded."""
    key = kind.headline.partition(".")[2]
    if not row or other is None:
        return None
    return Ratio(other[key] / row[key] if kind.lower_is_better else row[key] / other[key])


def _whose(theirs: Result, model: str | None, ours: Sequence[Result], unit: str) -> str:
    """The line that every table of published figures has; `unit` is what only one machine and model can be asked."""
    here = dict.fromkeys(f"{result['model']['name']} ({result['model']['dtype']}) on {result['machine']['name']}"
                         for result in ours)
    when = f", {theirs['date']}" if theirs["date"] else ""
    return (f"Theirs: {theirs['source']}{when}, {model or 'a model not named beside the table'} on "
            f"{theirs['machine']}; reported by its authors on their machine, not measured again here. "
            f"Ours: {'; '.join(here) or 'nothing measured'}. Ratios within a column can be compared, {unit} "
            "across the two columns cannot: another machine, another model.")


def _their_workload(theirs: Result) -> str:
    return (f"Their workload: ISL {theirs['isl']}, OSL {theirs['osl']}, {theirs['latency_prompts']} latency and "
            f"{theirs['throughput_prompts']} throughput prompts, {theirs['decoding']}.")


def _their_ratios(theirs: Result) -> str:
    ratios = theirs["ratios"]
    return (f"Their ratios are computed from their rounded figures; their page gives {ratios['row']} "
            f"{ratios['vs_base']:.2f}x {ratios['base']}, {ratios['vs_first']:.2f}x the first row and "
            f"{ratios['vs_vllm']:.2f}x vLLM in tok/s.")


def _sides(headings: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{heading} {side}" for heading in headings for side in ("theirs", "ours"))


def published_memory_table(book: Book) -> Table:
    """Contiguous preallocation against blocks, by output length."""
    result, source = book.of_kind("kv_memory"), published()["mini_infer"]
    table = source["kv_memory"]
    theirs, ours = ({line["output"]: line for line in lines} for lines in (table["lengths"], result["lengths"]))
    rows = []
    for output in sorted({*theirs, *ours}):
        there, here = theirs.get(output), ours.get(output, {})
        rows.append((f"{output:,}", f"{table['contiguous_mb']:,} MB" if there else DASH,
                     size(here.get("contiguous_bytes")), f"{there['paged_mb']:,} MB" if there else DASH,
                     size(here.get("paged_bytes")), number(there and there["saved"], ".1%"),
                     number(here.get("saved"), ".1%"), number(there and there["streams_paged"], ",d"),
                     number(here.get("streams_paged"), ",d")))
    taken = ", ".join(f"{line['streams_paged'] * line['paged_mb']:,}" for line in table["lengths"])
    notes = [_whose(source, table["model"], [result], "bytes"),
             f"Contiguous: {table['max_model_len']:,} tokens theirs, {result['max_model_len']:,} ours; paged in blocks "
             f"of {table['block_size']} theirs, {result['block_size']} ours. Streams, paged: in {table['budget_gb']} "
             f"GB theirs, in {result['budget_bytes'] / 2**30:,.4g} GiB ours. Their streams times the bytes of one come "
             f"to {taken} MB.",
             _bytes_per_token(table, result)]
    return Table("Published KV memory: mini-infer's figures (theirs) beside ours",
                 ("output tokens", *_sides(("contiguous", "paged", "saved", "streams"))), rows,
                 [*notes, *ends(book, result)])


def _bytes_per_token(table: Result, ours: Result) -> str:
    """What their bytes come to a token, and what configurations give."""
    given = [f"{one['model']} {2 * one['layers'] * one['kv_heads'] * one['head_size'] * one['bytes_per_value'] / KB:g} "
             f"KB (2 x {one['layers']} layers x {one['kv_heads']} kv heads x {one['head_size']} x "
             f"{one['bytes_per_value']} bytes, {one['dtype']})" for one in table["configurations"]]
    return (f"{table['contiguous_mb']:,} MB for {table['max_model_len']:,} tokens is "
            f"{table['contiguous_mb'] * KB / table['max_model_len']:g} KB a token, KB and MB being powers of 1,024. "
            f"Published configurations give: {', '.join(given)}. Ours is computed from the model's own configuration "
            f"and measured: {ours['model']['kv_bytes_per_token'] / KB:g} KB a token in {ours['model']['dtype']}; our "
            "MB in the table are powers of ten.")


def published_radix_table(book: Book) -> Table:
    """The time to the first token after a shared prefix, by its length."""
    result, source = book.of_kind("radix"), published()["mini_infer"]
    theirs = {line["prefix"]: line for line in source["radix"]["prefixes"]}
    several = len({row["name"] for row in result["rows"]}) > 1
    rows = []
    for prefix in sorted({*theirs, *(row["prefix"] for row in result["rows"])}):
        there = theirs.get(prefix, {})
        for here in [row for row in result["rows"] if row["prefix"] == prefix] or [{}]:
            rows.append((*((here.get("name", DASH),) if several else ()), f"{prefix:,}",
                         number(there.get("standard_ms"), ",.1f"), number(here.get("cold_ms"), ",.1f"),
                         number(there.get("cached_ms"), ",.1f"), number(here.get("cached_ms"), ",.1f"),
                         *(f"{side['speedup']:,.1f}x" if side else DASH for side in (there, here))))
    header = (*(("row",) if several else ()), "prefix tokens", *_sides(("standard ms", "cached ms", "speed-up")))
    return Table("Published radix: mini-infer's time to first token (theirs) beside ours", header, rows,
                 [_whose(source, source["radix"]["model"], [result], "milliseconds"), *ends(book, result)])


def published_speculative_table(book: Book) -> Table:
    """What a draft gains by kind of prompt: their draft model, and the draft of our row at width 1."""
    result, source = book.of_kind("speculative"), published()["mini_infer"]
    table = source["speculative"]
    theirs, ours = {line["kind"]: line for line in table["kinds"]}, _shipped(result)
    rows = []
    for kind in dict.fromkeys((*theirs, *(row["prompts_kind"] for row in ours))):
        there = theirs.get(kind, {})
        for here in [row for row in ours if row["prompts_kind"] == kind] or [{}]:
            accepted = share(here.get("accepted_tokens"), here.get("drafted_tokens"))
            rows.append((kind, *(number(side.get(key), ",.1f") for key in ("baseline_tok_s", "tok_s")
                                 for side in (there, here)), number(there.get("acceptance"), ".1%"), accepted,
                         *(str(Ratio(side["speedup"])) if side else DASH for side in (there, here))))
    used = ", ".join(dict.fromkeys(f"{draft(row)}, K = {row['k']}" for row in ours)) or DASH
    notes = [_whose(source, f"{table['model']} with {table['draft']} as its draft, K = {table['k']},", [result],
                    "tok/s"),
             f"Ours: the draft of {SPECULATIVE} at width 1 ({used}). Speed-up: of tok/s."]
    return Table("Published speculative: mini-infer's figures (theirs) beside ours",
                 ("kind", *_sides(("baseline tok/s", "tok/s", "acceptance", "speed-up"))), rows,
                 [*notes, *ends(book, result)])


def _shipped(result: Result) -> list[Result]:
    """The lines of our row's own draft at width 1; of any other draft of that row where its own was not run."""
    from liteinfer.speculative.choose import SHIPPED  # loads engines

    found = [row for row in result["rows"] if row["name"] == SPECULATIVE and row["width"] == 1]
    return [row for row in found if row["draft"] == SHIPPED] or found
