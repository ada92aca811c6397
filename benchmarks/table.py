"""A table of ready text, and its two forms: Markdown for pages, rich for the terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

DASH = "-"
BLOCKS = "▏▎▍▌▋▊▉█"   # one to eight eighths
LEFT = {"row", "workload", "kind", "draft", "head", "variant", "chapter", "what it is", "improves on", "standing",
        "bound", "note"}   # columns of words


@dataclass(frozen=True)
class Table:
    """A title, a header, rows of ready text, and the lines that belong below. Without a header: lines only.

    The first `keys` columns say what a row is about. The benchmark page also shows `about`, the same in words
    for each row (or for none), and marks the cells in `best`, each a row's number and a column's.
    """

    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    notes: Sequence[str]
    keys: int = 1
    about: Sequence[tuple[str, ...]] = ()
    best: frozenset[tuple[int, int]] = frozenset()


class Bar(str):
    """A bar of block characters which remembers its exact share, for pages that can draw it."""

    share: float

    def __new__(cls, blocks: str, share: float) -> Bar:
        self = super().__new__(cls, blocks)
        self.share = share
        return self


def bar(share: float, cells: int = 8) -> Bar:
    """`share` of a full bar, in eighths of a cell; never empty, so that a slow row still shows."""
    full, rest = divmod(max(1, round(share * cells * 8)), 8)
    return Bar(BLOCKS[-1] * full + (BLOCKS[rest - 1] if rest else ""), share)


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


def with_range(text: str, ends: Sequence[float] | None, spec: str) -> str:
    """A figure, and behind it the least and the most over rounds."""
    return f"{text} ({number(ends[0], spec)}..{number(ends[1], spec)})" if ends else text


def share(part: float | None, whole: float | None, spec: str = ".1%") -> str:
    """part / whole in per cent; a dash where there is no whole."""
    return DASH if part is None or not whole else format(part / whole, spec)


def without_empty(table: Table) -> Table:
    """The table without the columns that are dashes in every row."""
    kept = [i for i in range(len(table.header)) if not table.rows or any(row[i] != DASH for row in table.rows)]
    best = frozenset((row, kept.index(i)) for row, i in table.best)   # a dash is never the best
    return replace(table, header=tuple(table.header[i] for i in kept),
                   rows=[tuple(row[i] for i in kept) for row in table.rows], best=best)


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


def print_table(table: Table, console: Console) -> None:
    """The table in the terminal; in a narrow one short row names, and cells of two lines.

    What is still too wide is shown in pieces below each other, each with the key columns.
    """
    narrow = console.width < 110
    header, rows = (_narrow_header(table.header), [_narrow(table.header, row) for row in table.rows]
                    ) if narrow else (table.header, table.rows)
    least = {heading: 13 if narrow else 23 for heading in ("row", "note")}   # columns that wrap
    widths = [least.get(heading) or max(len(line) for cell in cells for line in cell.split("\n"))
              for heading, *cells in zip(table.header, header, *rows, strict=True)]
    for number, columns in enumerate(pieces(widths, table.keys, console.width)):
        grid = RichTable(title=None if number else table.title, title_justify="left", title_style="bold",
                         box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
        for i in columns:
            grid.add_column(_text(header[i], console), justify="left" if table.header[i] in LEFT else "right",
                            no_wrap=table.header[i] not in least, min_width=least.get(table.header[i]))
        for row in rows:
            grid.add_row(*(_text(row[i], console) for i in columns))
        console.print(grid)
    for note in table.notes:
        console.print(_text(note, console))
    console.print()


def pieces(widths: Sequence[int], keys: int, room: int) -> list[list[int]]:
    """Which columns stand side by side in so much room: the keys in every piece, the others in order.

    >>> pieces([4, 3, 3, 3], 1, 12)
    [[0, 1, 2], [0, 3]]
    """
    found: list[list[int]] = []
    for i in range(keys, len(widths)):
        if not found or sum(widths[column] + 1 for column in found[-1]) + widths[i] > room:
            found.append(list(range(keys)))
        found[-1].append(i)
    return found


def _narrow_header(header: Sequence[str]) -> tuple[str, ...]:
    return tuple(re.sub("/(?=[mp])", "/\n", heading.replace(" ", "\n")) for heading in header)


def _narrow(header: Sequence[str], row: Sequence[str]) -> tuple[str, ...]:
    return tuple(cell.removeprefix("liteinfer-") if heading == "row" else re.sub(r" \((.*)\)$", r"\n\1", cell)
                 for heading, cell in zip(header, row, strict=True))


def _text(cell: str, console: Console) -> Text:
    """Plain text, never rich markup; a terminal that is not UTF-8 gets # for a bar."""
    return Text(cell.translate(dict.fromkeys(map(ord, BLOCKS), "#")) if console.options.ascii_only else cell)
