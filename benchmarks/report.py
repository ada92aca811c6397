"""Result files as tables, for the terminal (rich) and for pages (Markdown).

Every table is built once, as a `Table` of strings, and then shown in either
form. A ratio above 1.00x is always better; `compare` says what it means.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from benchmarks.compare import Book, Entry, HashOf, Result, current_hash, load
from liteinfer.lineage import LADDER

__all__ = ["Table", "build_tables", "load", "markdown", "print_tables", "to_markdown"]

DASH = "-"
BLOCKS = "▏▎▍▌▋▊▉█"   # one to eight eighths
LEFT = {"row", "chapter", "what it is", "improves on", "standing", "bound", "note"}   # columns of words
NO_REFERENCE = "vs vLLM: no vLLM reference was measured in this run, hence the dashes."


@dataclass(frozen=True)
class Table:
    """A title, a header, rows of ready text, and the lines that belong below. Without a header: lines only."""

    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    notes: Sequence[str]


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


def bar(share: float, cells: int = 8) -> str:
    """`share` of a full bar, in eighths of a cell; never empty, so that a slow row still shows."""
    full, rest = divmod(max(1, round(share * cells * 8)), 8)
    return BLOCKS[-1] * full + (BLOCKS[rest - 1] if rest else "")


def size(n: float | None) -> str:
    """Bytes in the unit that leaves one to three digits before the point."""
    if n is None:
        return DASH
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000 or unit == "GB":
            break
        n /= 1000
    return f"{n:,.0f} B" if unit == "B" else f"{n:,.1f} {unit}"


def number(value: float | None, spec: str) -> str:
    """A figure, a dash for none; from 1,000 on a decimal says nothing and is left out."""
    if value is None:
        return DASH
    return format(value, ",.0f" if value >= 1000 and spec.endswith("f") else spec)


def ranged(entry: Entry, path: str, spec: str) -> str:
    """A metric's median, with the least and the most over rounds if there were several."""
    table, key = path.split(".")
    ends = entry.get(f"{table}_range.{key}")
    text = number(entry.get(path), spec)
    if len(entry.row.get("rounds", ())) < 2 or text == DASH or not ends:
        return text
    return f"{text} ({number(ends[0], spec)}..{number(ends[1], spec)})"


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
        share = 0.0 if not value else best / value if kind.lower_is_better else value / best
        cells = [ranged(entry, path, spec) if path == kind.headline else number(entry.get(path), spec)
                 for _, path, spec in kind.columns]
        rows.append((book.label(entry, kind.what), *cells, *(str(gain or DASH) for gain in gains),
                     bar(share) if share else DASH))
    notes = []
    if any(book.reference(e) is None for e in shown):
        names = {e.row.get("reference") for e in shown}
        none_at_all = not any(e.name in names for e in book.entries)
        notes.append(NO_REFERENCE if none_at_all else "vs vLLM: a dash where no reference of that width was measured.")
    notes += [f"~ not measured alike ({why}): {', '.join(dict.fromkeys(pairs))}." for why, pairs in uneven.items()]
    header = ("row", *(heading for heading, _, _ in kind.columns), "vs base", "vs first", "vs vLLM", "standing")
    return Table(kind.title, header, rows, notes + remarks(book, shown))


def remarks(book: Book, shown: Sequence[Entry]) -> list[str]:
    """What a reader has to know about single rows: stale, failed, different, left out."""
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
    left_out = [skip for result in book.results for skip in result.get("skipped", ())]
    return notes + [f"{skip['name']} was not run: {skip['reason']}." for skip in left_out]


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
    rows = [(book.label(e), number(e.get("counters.forward_passes"), ",d"),
             number(e.get("counters.tokens_computed"), ",d"), size(e.get("counters.kv_bytes_copied")),
             size(e.get("counters.kv_bytes_peak"))) for e in shown]
    header = ("row", "forward passes", "tokens computed", "KV bytes copied", "KV bytes held")
    return Table("Counters: one throughput pass, the same on every machine", header, rows, [])


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
        model, work, machine = result["model"], result["workload"], result["machine"]
        lines.append(" · ".join((
            f"{model['name']} ({model['parameters'] / 1e6:,.1f} M parameters, {model['dtype']})",
            f"ISL {work['isl']}", f"OSL {work['osl']}",
            f"prompts {work['latency_prompts']} latency, {work['throughput_prompts']} throughput",
            work["decoding"], f"{machine['name']}, {machine['threads']} threads",
            f"{result['date']}, {result['rounds']} rounds" if result["rounds"] > 1 else result["date"],
            ", ".join(f"{package} {version}" for package, version in result["versions"].items()))))
    return Table("", (), [], list(dict.fromkeys(lines)))


def ladder_table(book: Book, link: Callable[[int], str]) -> Table:
    """Every row of the ladder, measured or not; `link` writes a chapter's number."""
    header = ("row", "chapter", "what it is", "improves on", "tok/s", "ITL p50 ms", "vs first")
    rows = []
    for row in LADDER:
        entry = max(book.named(row.name), key=lambda e: e.width, default=None)
        gain, figures = None, [DASH, DASH]
        if entry:
            first = book.beside(entry, LADDER[0].name)
            gain = book.gain(entry, first, THROUGHPUT.headline, THROUGHPUT.lower_is_better)
            figures = [number(entry.get(path), ",.1f") for path in (THROUGHPUT.headline, LATENCY.headline)]
        rows.append((book.label(entry) if entry else row.name, link(row.chapter), row.what,
                     row.improves_on or "reference point", *figures, str(gain or DASH)))
    return Table("", header, rows, [])


def build_tables(book: Book, names: Iterable[str], shown: Sequence[Entry] | None = None) -> Iterator[Table]:
    """Build the named tables. A note is given once, below the first table that has it.

    Raises:
        ValueError: a name that no table has.
    """
    rows = book.entries if shown is None else shown
    makers: dict[str, Callable[[], Table]] = {
        "facts": lambda: facts_table(book),
        "latency": lambda: measured_table(LATENCY, book, rows),
        "throughput": lambda: measured_table(THROUGHPUT, book, rows),
        "counters": lambda: counters_table(book, rows),
        "ceilings": lambda: ceilings_table(book, rows),
    }
    given: set[str] = set()
    for name in names:
        if name not in makers:
            raise ValueError(f"unknown table {name!r}; the tables are {', '.join(makers)}")
        table = makers[name]()
        yield Table(table.title, table.header, table.rows, [note for note in table.notes if note not in given])
        given.update(table.notes)


def to_markdown(table: Table) -> str:
    lines = [f"**{table.title}**", ""] if table.title else []
    if table.header:
        lines += [_pipes(table.header), "|" + "|".join(":--" if h in LEFT else "--:" for h in table.header) + "|"]
        lines += [*map(_pipes, table.rows), ""]
    for note in table.notes:
        lines += [note, ""]
    return "\n".join(lines[:-1]) + "\n"


def _pipes(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def markdown(results: Sequence[Result], tables: Sequence[str] = ("facts", "latency", "throughput"),
             current: HashOf = current_hash) -> str:
    """The named tables as Markdown; the facts strip is a table too."""
    return "\n".join(to_markdown(table) for table in build_tables(Book(results, current), tables))


def print_tables(results: Sequence[Result], console: Console, current: HashOf = current_hash) -> None:
    """All tables in the terminal; in a narrow one short row names, and cells of two lines."""
    narrow = console.width < 110
    for table in build_tables(Book(results, current), ("facts", "latency", "throughput", "counters", "ceilings")):
        if table.header:
            grid = RichTable(title=table.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD,
                             padding=0, pad_edge=False, show_edge=False)
            for heading in table.header:
                wraps = heading in ("row", "note")
                grid.add_column(_text(heading.replace(" ", "\n").replace("/m", "/\nm") if narrow else heading, console),
                                justify="left" if heading in LEFT else "right", no_wrap=not wraps,
                                min_width=(13 if narrow else 23) if wraps else None)
            for row in table.rows:
                short = [row[0].removeprefix("liteinfer-"), *(re.sub(r" \((.*)\)$", r"\n\1", c) for c in row[1:])]
                grid.add_row(*(_text(cell, console) for cell in (short if narrow else row)))
            console.print(grid)
        for note in table.notes:
            console.print(_text(note, console))
        console.print()


def _text(cell: str, console: Console) -> Text:
    """Plain text, never rich markup; a terminal that is not UTF-8 gets # for a bar."""
    return Text(cell.translate(dict.fromkeys(map(ord, BLOCKS), "#")) if console.options.ascii_only else cell)
