"""Result files as tables, for the terminal (rich) and for pages (Markdown).

Every table is built once, as a `Table` of strings, and then shown in either
form. A ratio above 1.00x is always better; `compare` says what it means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from rich.console import Console

from benchmarks.compare import Book, Entry, HashOf, current_hash
from benchmarks.draft_tables import draft_costs_table, heads_table, loops_table, speculative_table
from benchmarks.kinds import kv_memory_table, waste_table, widths_table
from benchmarks.measured import LATENCY, PER_EVENT, THROUGHPUT, drafts, measured_table, throughput_table
from benchmarks.prefix_tables import overhead_table, radix_table, sharing_table
from benchmarks.profile_tables import pieces_table, profile_table
from benchmarks.published_tables import (
    published_latency_table,
    published_memory_table,
    published_radix_table,
    published_speculative_table,
    published_throughput_table,
)
from benchmarks.result_file import Result, load
from benchmarks.shape_tables import shapes_split_table, shapes_table, shapes_vllm_table
from benchmarks.table import DASH, Table, number, print_table, share, size, to_markdown, without_empty
from benchmarks.workloads import SHAPES
from liteinfer.lineage import LADDER

__all__ = ["build_tables", "load", "markdown", "print_tables"]

TABLES: dict[str | None, tuple[str, ...]] = {   # by kind of result
    None: ("latency", "throughput", "counters", "ceilings"),
    "kv_memory": ("kv_memory", "waste"),
    "widths": ("widths",),
    "radix": ("radix",),
    "sharing": ("sharing",),
    "overhead": ("overhead",),
    "speculative": ("speculative", "loops", "draft_costs"),
    "heads": ("heads",),
    "pieces": ("pieces",),
    "profile": ("profile",),
    "shapes": ("shapes", "shapes_vllm", "shapes_split"),
}
OF_THE_LADDER = (*TABLES[None], "published_latency", "published_throughput")
TELLS_SKIPPED = ("latency", "throughput", "widths", "radix", "sharing", "overhead", "speculative", "heads",
                 "pieces", "profile", "shapes")


def counters_table(book: Book, shown: Sequence[Entry]) -> Table:
    """What the rows did. A column in which every row shown has a dash is left out."""
    def cells(e: Entry) -> tuple[str, ...]:
        count = {key: e.get(f"counters.{key}") for key in (
            "forward_passes", "tokens_computed", "kv_bytes_copied", "kv_bytes_peak", "blocks_peak", "held_slots",
            "tail_slots", "batch_slots", "idle_slots", "prompt_tokens", "prefix_hit_tokens", "preemptions",
            "drafted_tokens", "accepted_tokens")}
        return (book.label(e), number(count["forward_passes"], ",d"), number(count["tokens_computed"], ",d"),
                size(count["kv_bytes_copied"]), size(count["kv_bytes_peak"]),
                number(count["blocks_peak"] or None, ",d"), share(count["tail_slots"], count["held_slots"]),
                share(count["idle_slots"], count["batch_slots"]),
                share(count["prefix_hit_tokens"], count["prompt_tokens"]),
                number(count["preemptions"] if count["prompt_tokens"] else None, ",d"),   # others can do neither
                number(count["drafted_tokens"] or None, ",d"), share(count["accepted_tokens"], count["drafted_tokens"]))

    header = ("row", "forward passes", "tokens computed", "KV bytes copied", "KV bytes held", "KV blocks peak",
              "tail waste", "idle slots", "prefix hits", "preemptions", "drafted", "acceptance")
    same = "the first round's, and the clock had a say" if any(e.rate for e in shown) else "the same on every machine"
    pools = [f"{book.name(e)}: {e.row['pool']}." for e in shown if e.row.get("pool")]
    return without_empty(Table(f"Counters: one throughput pass, {same}", header, [cells(e) for e in shown], pools))


def ceilings_table(book: Book, shown: Sequence[Entry]) -> Table:
    columns = (("itl_ms", ",.1f"), ("measured_itl_ms", ",.1f"), ("ratio", ".2f"), ("linear_ms", ",.1f"),
               ("rest_ms", ",.1f"))
    rows = [(book.label(e, "latency"), e.get("ceiling.bound") or DASH,
             *(number(e.get(f"ceiling.{key}"), spec) for key, spec in columns), e.get("ceiling.note") or "")
            for e in shown]
    header = ("row", "bound", "ceiling ms", "measured ms", "ceiling/measured", "linear layers ms", "rest ms", "note")
    paths = [f"{book.name(e)}: linear layers by {e.row['linear_path']}." for e in shown if e.row.get("linear_path")]
    return Table("Ceilings: what this machine allows a decode step", header, rows, paths)


def facts(result: Result) -> dict[str, str]:
    """What was run, where and when: a label and its text each."""
    model, machine, rounds = result["model"], result["machine"], result.get("rounds", 1)
    work = result.get("workload") or {}   # rows of the ladder have a workload
    found = {"model": f"{model['name']} ({model['parameters'] / 1e6:,.1f} M parameters, {model['dtype']})",
             **{key.upper(): str(value) for key in ("isl", "osl") if (value := (work or result).get(key))}}
    if work:
        found["prompts"] = _prompts(result)
        found |= {"arrivals": f"Poisson, {work['rate']:g} requests/s"} if work.get("rate") else {}
        found["decoding"] = work["decoding"]
    return found | {
        "machine": f"{machine['name']}, {machine['threads']} threads",
        "date": f"{result['date']}, {rounds} rounds" if rounds > 1 else result["date"],
        "versions": ", ".join(f"{package} {version}" for package, version in result["versions"].items())}


def _prompts(result: Result) -> str:
    """How many prompts each pass had, by width where that differs, and the shape's own numbers where they were more."""
    work = result["workload"]
    by_width = {row.get("width", 1): row["prompts"]["throughput"] for row in result["rows"]}
    several = len(set(by_width.values())) > 1
    found = f"{work['latency_prompts']} latency, " + (
        f"throughput {', '.join(f'{by_width[width]} at width {width}' for width in sorted(by_width))}" if several
        else f"{work['throughput_prompts']} throughput")
    shape = SHAPES.get(work["shape"])
    fewer = shape and (work["latency_prompts"] < shape.latency_prompts
                       or any(count < shape.prompts_at(width) for width, count in by_width.items()))
    return found + (f" (fewer than the {shape.latency_prompts} and {max(shape.throughput_prompts.values())} of the "
                    f"shape {shape.name}, for want of time)" if shape and fewer else "")


def facts_table(book: Book) -> Table:
    """The strip on top: one line for each different run."""
    lines = [" · ".join(f"{label} {text}" if label in ("ISL", "OSL", "prompts", "arrivals") else text
                        for label, text in facts(result).items()) for result in book.results]
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
    return Table("", header, rows, [PER_EVENT] if any(map(drafts, book.entries)) else [])


def build_tables(book: Book, names: Iterable[str], rows: Sequence[str] | None = None) -> Iterator[Table]:
    """Build the named tables, of all rows or of some. A note is given once, below the first table that has it.

    Raises:
        ValueError: a name that no table has, or a table of a kind of result that is not in the book.
    """
    shown = [e for e in book.entries if rows is None or e.name in rows]
    skipped = dict.fromkeys(f"{skip['name']} was not run: {skip['reason']}." for skip in book.skipped
                            if rows is None or skip["name"] in rows)   # once for all widths
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
        "speculative": lambda: speculative_table(book),
        "loops": lambda: loops_table(book),
        "draft_costs": lambda: draft_costs_table(book),
        "heads": lambda: heads_table(book),
        "pieces": lambda: pieces_table(book),
        "profile": lambda: profile_table(book),
        "shapes": lambda: shapes_table(book),
        "shapes_vllm": lambda: shapes_vllm_table(book),
        "shapes_split": lambda: shapes_split_table(book),
        "published_latency": lambda: published_latency_table(book, rows),
        "published_throughput": lambda: published_throughput_table(book, rows),
        "published_memory": lambda: published_memory_table(book),
        "published_radix": lambda: published_radix_table(book),
        "published_speculative": lambda: published_speculative_table(book),
    }
    given: set[str] = set()
    for name in names:
        if name not in makers:
            raise ValueError(f"unknown table {name!r}; the tables are {', '.join(makers)}")
        if name in OF_THE_LADDER and all("kind" in result for result in book.results):
            raise ValueError(f"table {name!r} shows rows of the ladder, and none of these results holds any")
        table = makers[name]()
        notes = [*table.notes, *(skipped if name in TELLS_SKIPPED else [])]
        yield replace(table, notes=[note for note in notes if note not in given])
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
