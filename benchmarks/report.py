"""Result files as tables, for the terminal (rich) and for pages (Markdown).

Every table is built once, as a `Table` of strings, and then shown in either
form. A ratio above 1.00x is always better; `compare` says what it means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from rich.console import Console

from benchmarks.compare import Book, Entry, HashOf, current_hash
from benchmarks.kinds import kv_memory_table, waste_table, widths_table
from benchmarks.prefix_tables import overhead_table, radix_table, sharing_table
from benchmarks.result_file import Result, load
from benchmarks.table import (
    DASH,
    Table,
    bar,
    number,
    print_table,
    share,
    size,
    to_markdown,
    with_range,
    without_empty,
)
from liteinfer.lineage import LADDER

__all__ = ["build_tables", "load", "markdown", "print_tables"]

NO_REFERENCE = "vs vLLM: no vLLM reference was measured in this run, hence the dashes."
TABLES: dict[str | None, tuple[str, ...]] = {   # by kind of result
    None: ("latency", "throughput", "counters", "ceilings"),
    "kv_memory": ("kv_memory", "waste"),
    "widths": ("widths",),
    "radix": ("radix",),
    "sharing": ("sharing",),
    "overhead": ("overhead",),
}
TELLS_SKIPPED = ("latency", "throughput", "widths", "radix", "sharing", "overhead")


@dataclass(frozen=True)
class Measured:
    """A table of measured columns: (heading, path into the row, format), the first of them the headline."""

    what: str
    title: str
    columns: tuple[tuple[str, str, str], ...]
    headline: str
    lower_is_better: bool


LATENCY = Measured("latency", "Latency: one request in flight, times in ms", (
    ("ITL p50", "latency.itl_p50_ms", ",.1f"), ("ITL p95", "latency.itl_p95_ms", ",.1f"),
    ("TTFT p50", "latency.ttft_p50_ms", ",.1f"), ("TTFT p95", "latency.ttft_p95_ms", ",.1f"),
    ("E2E p50", "latency.e2e_p50_ms", ",.1f")), "latency.itl_p50_ms", lower_is_better=True)
THROUGHPUT = Measured("throughput", "Throughput: all prompts at once", (
    ("tok/s", "throughput.tok_s", ",.1f"), ("req/s", "throughput.req_s", ",.2f"),
    ("wall s", "throughput.wall_s", ",.1f"), ("ITL p50 ms", "throughput.itl_p50_ms", ",.1f")),
    "throughput.tok_s", lower_is_better=False)
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


def ranged(entry: Entry, path: str, spec: str) -> str:
    """A metric's median, with the least and the most over rounds if there were several."""
    table, key = path.split(".")
    ends = entry.get(f"{table}_range.{key}")
    text = number(entry.get(path), spec)
    several = len(entry.row.get("rounds", ())) > 1 and text != DASH
    return with_range(text, ends if several else None, spec)


def measured_table(kind: Measured, book: Book, shown: Sequence[Entry]) -> Table:
    """The latency or the throughput table: measured columns, three ratios, and a bar for the headline."""
    values = [v for e in shown if (v := e.get(kind.headline))]
    best = (min if kind.lower_is_better else max)(values, default=0)
    rows, uneven = [], dict[str, list[str]]()
    for entry in shown:
        others = (book.beside(entry, entry.row.get("improves_on")), book.beside(entry, LADDER[0].name),
                  book.reference(entry))
        gains = [book.gain(entry, other, kind.headline, kind.lower_is_better) for other in others]
        for other, gain in zip(others, gains, strict=True):
            if other and gain and gain.doubts:
                uneven.setdefault(", ".join(gain.doubts), []).append(f"{entry.name} / {other.name}")
        value = entry.get(kind.headline)
        part = 0.0 if not value else best / value if kind.lower_is_better else value / best
        cells = [ranged(entry, path, spec) if path == kind.headline else number(entry.get(path), spec)
                 for _, path, spec in kind.columns]
        rows.append((book.label(entry, kind.what), *cells, *(str(gain or DASH) for gain in gains),
                     bar(part) if part else DASH))
    notes = []
    if any(book.reference(e) is None for e in shown):
        names = {e.row.get("reference") for e in shown}
        none_at_all = not any(e.name in names for e in book.entries)
        notes.append(NO_REFERENCE if none_at_all else "vs vLLM: a dash where no reference of that width was measured.")
    notes += [f"~ not measured alike ({why}): {', '.join(dict.fromkeys(pairs))}." for why, pairs in uneven.items()]
    header = ("row", *(heading for heading, _, _ in kind.columns), "vs base", "vs first", "vs vLLM", "standing")
    return Table(kind.title, header, rows, notes + remarks(book, shown))


def remarks(book: Book, shown: Sequence[Entry]) -> list[str]:
    """What a reader has to know about single rows: stale, failed, stopped, different."""
    stale = ", ".join(dict.fromkeys(e.name for e in shown if book.stale(e)))
    notes = [f"stale: the code of {stale} has changed since it was measured."] if stale else []
    for entry in shown:
        if failed := entry.row.get("failed"):
            more = f"; and {len(failed) - 3} more" if len(failed) > 3 else ""
            notes.append(f"{entry.name}: {len(failed)} failed and left out of every figure: "
                         f"{'; '.join(map(str, failed[:3]))}{more}.")
        if stopped := entry.row.get("stopped"):
            notes.append(f"{entry.name} was stopped after {len(entry.row['rounds'])} rounds: {stopped}.")
    notes += _same_tokens(shown)
    if any(result.get("interrupted") for result in book.results):
        notes.append("The run was interrupted: the rows have the rounds that were finished by then.")
    return notes


def _same_tokens(shown: Sequence[Entry]) -> list[str]:
    """In how many of the prompts that both ran a row's tokens were those of the first row of its run."""
    found: dict[str, list[str]] = {}
    for entry in shown:
        first, prompts = entry.result["rows"][0], entry.get("differs_from_first.prompts")
        if entry.row is not first and prompts:
            same = prompts - entry.get("differs_from_first.differ")
            found.setdefault(first["name"], []).append(f"{entry.name} in {same} of {prompts} prompts")
    return [f"The same tokens as {first}: {', '.join(rows)}." for first, rows in found.items()]


def counters_table(book: Book, shown: Sequence[Entry]) -> Table:
    """What the rows did. A column in which every row shown has a dash is left out."""
    def cells(e: Entry) -> tuple[str, ...]:
        count = {key: e.get(f"counters.{key}") for key in (
            "forward_passes", "tokens_computed", "kv_bytes_copied", "kv_bytes_peak", "blocks_peak", "held_slots",
            "tail_slots", "batch_slots", "idle_slots", "prompt_tokens", "prefix_hit_tokens", "preemptions")}
        return (book.label(e), number(count["forward_passes"], ",d"), number(count["tokens_computed"], ",d"),
                size(count["kv_bytes_copied"]), size(count["kv_bytes_peak"]),
                number(count["blocks_peak"] or None, ",d"), share(count["tail_slots"], count["held_slots"]),
                share(count["idle_slots"], count["batch_slots"]),
                share(count["prefix_hit_tokens"], count["prompt_tokens"]),
                number(count["preemptions"] if count["prompt_tokens"] else None, ",d"))   # others can do neither

    header = ("row", "forward passes", "tokens computed", "KV bytes copied", "KV bytes held", "KV blocks peak",
              "tail waste", "idle slots", "prefix hits", "preemptions")
    same = "the first round's, and the clock had a say" if any(e.rate for e in shown) else "the same on every machine"
    pools = [f"{e.name}: {e.row['pool']}." for e in shown if e.row.get("pool")]
    return without_empty(Table(f"Counters: one throughput pass, {same}", header, [cells(e) for e in shown], pools))


def ceilings_table(book: Book, shown: Sequence[Entry]) -> Table:
    columns = (("itl_ms", ",.1f"), ("measured_itl_ms", ",.1f"), ("ratio", ".2f"), ("linear_ms", ",.1f"),
               ("rest_ms", ",.1f"))
    rows = [(book.label(e, "latency"), e.get("ceiling.bound") or DASH,
             *(number(e.get(f"ceiling.{key}"), spec) for key, spec in columns), e.get("ceiling.note") or "")
            for e in shown]
    header = ("row", "bound", "ceiling ms", "measured ms", "ceiling/measured", "linear layers ms", "rest ms", "note")
    paths = [f"{e.name}: linear layers by {e.row['linear_path']}." for e in shown if e.row.get("linear_path")]
    return Table("Ceilings: what this machine allows a decode step", header, rows, paths)


def facts_table(book: Book) -> Table:
    """The strip on top: one line for each different run."""
    lines = []
    for result in book.results:
        model, machine = result["model"], result["machine"]
        work, rounds = result.get("workload"), result.get("rounds", 1)   # rows of the ladder have a workload
        prompts = [f"prompts {work['latency_prompts']} latency, {work['throughput_prompts']} throughput",
                   *([f"arrivals Poisson, {work['rate']:g} requests/s"] if work.get("rate") else []),
                   work["decoding"]] if work else []
        lengths = [f"{key.upper()} {value}" for key in ("isl", "osl") if (value := (work or result).get(key))]
        lines.append(" · ".join((
            f"{model['name']} ({model['parameters'] / 1e6:,.1f} M parameters, {model['dtype']})",
            *lengths, *prompts, f"{machine['name']}, {machine['threads']} threads",
            f"{result['date']}, {rounds} rounds" if rounds > 1 else result["date"],
            ", ".join(f"{package} {version}" for package, version in result["versions"].items()))))
    return Table("", (), [], list(dict.fromkeys(lines)))


def ladder_table(book: Book, link: Callable[[int], str]) -> Table:
    """Every row of the ladder, measured or not; `link` writes a chapter's number."""
    header = ("row", "chapter", "what it is", "improves on", "tok/s", "ITL p50 ms", "vs first")
    rows = []
    for row in LADDER:
        entry = max(book.named(row.name), key=lambda e: e.width, default=None)
        gain, figures = None, [f"needs {row.needs}" if row.needs else DASH, DASH]   # the same on every machine
        if entry:
            first = book.beside(entry, LADDER[0].name)
            gain = book.gain(entry, first, THROUGHPUT.headline, THROUGHPUT.lower_is_better)
            figures = [number(entry.get(path), ",.1f") for path in (THROUGHPUT.headline, LATENCY.headline)]
        rows.append((book.label(entry) if entry else row.name, link(row.chapter), row.what,
                     row.improves_on or "reference point", *figures, str(gain or DASH)))
    return Table("", header, rows, [])


def build_tables(book: Book, names: Iterable[str], rows: Sequence[str] | None = None) -> Iterator[Table]:
    """Build the named tables, of all rows or of some. A note is given once, below the first table that has it.

    Raises:
        ValueError: a name that no table has, or a table of a kind of result that is not in the book.
    """
    shown = [e for e in book.entries if rows is None or e.name in rows]
    skipped = [f"{skip['name']} was not run: {skip['reason']}." for skip in book.skipped
               if rows is None or skip["name"] in rows]
    makers: dict[str, Callable[[], Table]] = {
        "facts": lambda: facts_table(book),
        "latency": lambda: measured_table(LATENCY, book, shown),
        "throughput": lambda: throughput_table(book, shown),
        "counters": lambda: counters_table(book, shown),
        "ceilings": lambda: ceilings_table(book, shown),
        "kv_memory": lambda: kv_memory_table(book),
        "waste": lambda: waste_table(book),
        "widths": lambda: widths_table(book),
        "radix": lambda: radix_table(book),
        "sharing": lambda: sharing_table(book),
        "overhead": lambda: overhead_table(book),
    }
    given: set[str] = set()
    for name in names:
        if name not in makers:
            raise ValueError(f"unknown table {name!r}; the tables are {', '.join(makers)}")
        if name in TABLES[None] and all("kind" in result for result in book.results):
            raise ValueError(f"table {name!r} shows rows of the ladder, and none of these results holds any")
        table = makers[name]()
        notes = [*table.notes, *(skipped if name in TELLS_SKIPPED else [])]
        yield Table(table.title, table.header, table.rows, [note for note in notes if note not in given])
        given.update(notes)


def _usual(results: Sequence[Result], but: Iterable[str] = ()) -> list[str]:
    """The tables of results of these kinds, in the order of the files."""
    kinds = dict.fromkeys(result.get("kind") for result in results)
    return ["facts", *(name for kind in kinds for name in TABLES[kind] if name not in but)]


def markdown(results: Sequence[Result], tables: Sequence[str] = (), current: HashOf = current_hash) -> str:
    """The named tables as Markdown, or those that a page usually shows; the facts strip is a table too."""
    names = tables or _usual(results, but=("counters", "ceilings"))
    return "\n".join(to_markdown(table) for table in build_tables(Book(results, current), names))


def print_tables(results: Sequence[Result], console: Console, current: HashOf = current_hash) -> None:
    """All tables in the terminal."""
    for table in build_tables(Book(results, current), _usual(results)):
        print_table(table, console)
