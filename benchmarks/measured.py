"""The latency and the throughput table: rows of the ladder, measured and compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.compare import Book, Entry
from benchmarks.table import DASH, Table, bar, number, with_range
from liteinfer.lineage import LADDER, REFERENCES

NO_REFERENCE = "vs vLLM: not measured in this run; `make references` and `make bench REFERENCES=1` do it."
PER_EVENT = ("ITL is the gap between two events of a request, TPOT its time per token: an event of a row that drafts "
             "may bring several tokens.")
RATES = ("throughput.tok_s", "throughput.req_s")   # of all other measured columns less is better
BY_TPOT = "Two rows of which one drafts are compared by TPOT, any others by ITL; standing is by TPOT."
OTHER_WIDTH = "vs base: a dash where the base was not measured at the row's width."


@dataclass(frozen=True)
class Measured:
    """A table of measured columns: (heading, path into the row, format), the first of them the headline.

    Columns of TPOT are left out where no row drafts. `drafting` is what stands in the headline's place
    where rows are compared of which one drafts.
    """

    what: str
    title: str
    columns: tuple[tuple[str, str, str], ...]
    headline: str
    lower_is_better: bool
    drafting: str | None = None

    def metric(self, *compared: Entry | None) -> str:
        """The path of what these rows are compared by."""
        return self.drafting if self.drafting and any(map(drafts, filter(None, compared))) else self.headline


LATENCY = Measured("latency", "Latency: one request in flight, times in ms", (
    ("ITL p50", "latency.itl_p50_ms", ",.1f"), ("ITL p95", "latency.itl_p95_ms", ",.1f"),
    ("TPOT p50", "latency.tpot_p50_ms", ",.1f"),
    ("TTFT p50", "latency.ttft_p50_ms", ",.1f"), ("TTFT p95", "latency.ttft_p95_ms", ",.1f"),
    ("E2E p50", "latency.e2e_p50_ms", ",.1f")), "latency.itl_p50_ms", lower_is_better=True,
    drafting="latency.tpot_p50_ms")
THROUGHPUT = Measured("throughput", "Throughput: all prompts at once", (
    ("tok/s", "throughput.tok_s", ",.1f"), ("req/s", "throughput.req_s", ",.2f"),
    ("wall s", "throughput.wall_s", ",.1f"), ("ITL p50 ms", "throughput.itl_p50_ms", ",.1f"),
    ("TPOT p50 ms", "throughput.tpot_p50_ms", ",.1f")), "throughput.tok_s", lower_is_better=False)
AT_A_RATE = replace(THROUGHPUT, title="Throughput: requests as they arrive, TTFT and queueing time in ms", columns=(
    *THROUGHPUT.columns, ("TTFT p50", "throughput.ttft_p50_ms", ",.1f"), ("TTFT p95", "throughput.ttft_p95_ms", ",.1f"),
    ("queue p50", "throughput.queue_p50_ms", ",.1f"), ("queue p95", "throughput.queue_p95_ms", ",.1f")))


def throughput_table(book: Book, shown: Sequence[Entry]) -> Table:
    """The throughput table; with TTFT and queueing time if some of the rows had requests arrive at a rate."""
    rates = [entry for entry in shown if entry.rate]
    if not rates:
        return measured_table(THROUGHPUT, book, shown)
    table = measured_table(AT_A_RATE, book, shown)
    notes = ["TTFT counts from when a request was due, queueing time from there to the first step that ran it; a dash "
             "where the engine does not tell. A row that keeps up has the tok/s that were asked of it."]
    if len(rates) < len(shown):
        notes.append(f"Requests arrived by themselves only for {', '.join(map(book.label, rates))}.")
    return replace(table, notes=[*notes, *table.notes])


def drafts(entry: Entry) -> bool:
    """Whether guesses were checked in this row: then an event may bring several tokens."""
    return bool(entry.get("counters.drafted_tokens"))


def ranged(entry: Entry, path: str, spec: str) -> str:
    """A metric's median, with the least and the most over rounds if there were several."""
    table, key = path.split(".")
    ends = entry.get(f"{table}_range.{key}")
    text = number(entry.get(path), spec)
    several = len(entry.row.get("rounds", ())) > 1 and text != DASH
    return with_range(text, ends if several else None, spec)


def measured_table(kind: Measured, book: Book, shown: Sequence[Entry]) -> Table:
    """The latency or the throughput table: measured columns, three ratios, and a bar for the headline."""
    drafting, standing = any(map(drafts, shown)), kind.metric(*shown)
    columns = [column for column in kind.columns if drafting or not column[1].endswith(".tpot_p50_ms")]
    values = [v for e in shown if (v := e.get(standing))]
    best = (min if kind.lower_is_better else max)(values, default=0)
    rows, uneven = [], dict[str, list[str]]()
    for entry in shown:
        others = (book.base(entry, kind.what), book.beside(entry, LADDER[0].name), book.reference(entry, kind.what))
        gains = [book.gain(entry, other, kind.metric(entry, other), kind.lower_is_better) for other in others]
        for other, gain in zip(others, gains, strict=True):
            if other and gain and gain.doubts:
                uneven.setdefault(", ".join(gain.doubts), []).append(f"{entry.name} / {other.name}")
        value = entry.get(standing)
        part = 0.0 if not value else best / value if kind.lower_is_better else value / best
        cells = [ranged(entry, path, spec) if path in (kind.headline, standing) else number(entry.get(path), spec)
                 for _, path, spec in columns]
        rows.append((book.label(entry, kind.what), *cells, *(str(gain or DASH) for gain in gains),
                     bar(part) if part else DASH))
    notes = [PER_EVENT] if drafting else []
    if standing != kind.headline:
        notes.append(BY_TPOT)
    if any(book.base(e, kind.what) is None and book.beside(e, e.row.get("improves_on")) for e in shown):
        notes.append(OTHER_WIDTH)
    if any(book.reference(e, kind.what) is None for e in shown):
        names = {row.name for row in REFERENCES}
        none_at_all = not any(e.name in names for e in book.entries)
        notes.append(NO_REFERENCE if none_at_all else "vs vLLM: a dash where no reference of that width was measured.")
    notes += [f"~ not measured alike ({why}): {', '.join(dict.fromkeys(pairs))}." for why, pairs in uneven.items()]
    header = ("row", *(heading for heading, _, _ in columns), "vs base", "vs first", "vs vLLM", "standing")
    return Table(kind.title, header, rows, notes + remarks(book, shown), about=[about(e) for e in shown],
                 best=best_cells(columns, shown))


def about(entry: Entry) -> tuple[str, ...]:
    """What a row is, and what it improves on."""
    base = entry.row.get("improves_on")
    return (*filter(None, [entry.row.get("what")]), f"improves on {base}" if base else "reference point")


def best_cells(columns: Sequence[tuple[str, str, str]], shown: Sequence[Entry]) -> frozenset[tuple[int, int]]:
    """The cells that read like the best of their measured column; the row's name is column 0.

    A wall is compared only among the rows that ran the most prompts: fewer are done sooner.
    """
    found: set[tuple[int, int]] = set()
    most = max((e.get("prompts.throughput") or 0 for e in shown), default=0)
    for column, (_, path, spec) in enumerate(columns, 1):
        values = {i: v for i, e in enumerate(shown) if (v := e.get(path)) is not None
                  and (path != "throughput.wall_s" or e.get("prompts.throughput") == most)}
        best = number((max if path in RATES else min)(values.values(), default=None), spec)
        found |= {(i, column) for i, value in values.items() if number(value, spec) == best}
    return frozenset(found)


def remarks(book: Book, shown: Sequence[Entry]) -> list[str]:
    """What a reader has to know about single rows: stale, failed, stopped, different."""
    stale = ", ".join(dict.fromkeys(e.name for e in shown if book.stale(e)))
    notes = [f"stale: the code of {stale} has changed since it was measured."] if stale else []
    for entry in shown:
        if failed := entry.row.get("failed"):
            more = f"; and {len(failed) - 3} more" if len(failed) > 3 else ""
            notes.append(f"{book.name(entry)}: {len(failed)} failed and left out of every figure: "
                         f"{'; '.join(map(str, failed[:3]))}{more}.")
        if stopped := entry.row.get("stopped"):
            notes.append(f"{book.name(entry)} was stopped after {len(entry.row['rounds'])} rounds: {stopped}.")
    notes += _same_tokens(book, shown)
    if any(result.get("interrupted") for result in book.results):
        notes.append("The run was interrupted: the rows have the rounds that were finished by then.")
    return notes


def _same_tokens(book: Book, shown: Sequence[Entry]) -> list[str]:
    """In how many of the prompts that both ran a row's tokens were those of the first row of its run."""
    found: dict[str, list[str]] = {}
    for entry in shown:
        first, prompts = entry.result["rows"][0], entry.get("differs_from_first.prompts")
        if entry.row is not first and prompts:
            same = prompts - entry.get("differs_from_first.differ")
            found.setdefault(first["name"], []).append(f"{book.name(entry)} in {same} of {prompts} prompts")
    return [f"The same tokens as {first}: {', '.join(rows)}." for first, rows in found.items()]
