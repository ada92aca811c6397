"""The benchmark page: the same sections as HTML (`report.html`) and as Markdown (`report.md`).

Both are written whole, from stored results, by `python -m benchmarks render`; the HTML through the template
beside this file. What they show, and in which order, is `topics.py`. Results of another machine lie in a
subfolder of benchmarks/results named after it (h200/paper.json) and get the same sections below a heading of
their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from benchmarks.compare import Book, HashOf, current_hash
from benchmarks.draft_tables import only_drafts
from benchmarks.report import build_tables, facts
from benchmarks.stored import RESULTS, stale_lines, stored
from benchmarks.table import LEFT, Table, to_markdown
from benchmarks.topics import INTRO, NO_GPU, PUBLISHED, THEIRS, TOPICS, Shown, Topic

TEMPLATE, HTML, MARKDOWN = "benchmarks/page.html.j2", "benchmarks/report.html", "benchmarks/report.md"
LOCAL = "local"   # the subfolder of results that nobody commits


@dataclass(frozen=True)
class Part:
    """A table, the sentence that introduces it, and the chapter it belongs to."""

    table: Table
    says: str
    chapter: int
    link: str


@dataclass(frozen=True)
class Section:
    """The tables of one result; `facts` are those that differ from the strip on top of the machine's sections."""

    title: str
    anchor: str
    facts: dict[str, str]
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Group:
    """What was measured on one machine, or published by others; `absent` names topics that have no result here."""

    title: str
    anchor: str
    says: str
    facts: dict[str, str]
    sections: tuple[Section, ...]
    absent: tuple[str, ...] = ()


def render_page(root: Path, check: bool, current: HashOf = current_hash) -> list[str]:
    """Bring both forms of the page up to date (with `check`, write nothing); without a template there is no page.

    Returns the files that were not up to date, and, with `check`, a line for each stored row whose code is no
    longer the code here.

    Raises:
        ValueError: a result that the page needs is not stored, or a chapter it links has no folder.
    """
    if not (root / TEMPLATE).is_file():
        return []
    builder = _Builder(root, current)
    groups = builder.groups()
    changed = []
    for name, text in ((HTML, html(root, groups)), (MARKDOWN, markdown(groups))):
        path = root / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            changed.append(name)
            if not check:
                path.write_text(text, encoding="utf-8", newline="\n")
    return changed + (list(dict.fromkeys(builder.stale)) if check else [])


class _Builder:
    """Stored results -> groups of sections. `stale` collects what was measured with other code than that here."""

    def __init__(self, root: Path, current: HashOf) -> None:
        self.root, self.current = root, current
        self.stale: list[str] = []

    def groups(self) -> list[Group]:
        machines = [self.machine(), *map(self.machine, self.folders())]
        theirs = tuple(self.section(topic, topic.result, machines[0].facts) for topic in PUBLISHED)
        return [*machines, Group("Published by others", "published", THEIRS, {}, theirs)]

    def folders(self) -> list[str]:
        """The subfolders of results, each a machine's."""
        folder = self.root / RESULTS
        return sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name != LOCAL)

    def machine(self, folder: str = "") -> Group:
        """All topics of the machine that stands first; of another one those that have a result."""
        there = [topic for topic in TOPICS
                 if not folder or (self.root / RESULTS / folder / f"{topic.result}.json").is_file()]
        if not there:
            raise ValueError(f"{RESULTS}/{folder} has no result that the page shows; "
                             f"it shows {', '.join(dict.fromkeys(f'{topic.result}.json' for topic in TOPICS))}")
        first = stored(self.root, self.path(folder, there[0]))
        strip = facts(first)
        sections = tuple(self.section(topic, self.path(folder, topic), strip) for topic in there)
        absent = tuple(topic.title for topic in TOPICS if topic not in there)
        return Group(first["machine"]["name"], folder or "here", "", strip, sections, absent)

    @staticmethod
    def path(folder: str, topic: Topic) -> str:
        return f"{folder}/{topic.result}" if folder else topic.result

    def section(self, topic: Topic, name: str, strip: dict[str, str]) -> Section:
        result = stored(self.root, name)
        if topic.drafts:
            result = only_drafts(result, set(topic.drafts))
        book = Book([result], self.current)
        self.stale += stale_lines(book, name)
        tables = build_tables(book, [shown.table for shown in topic.shows])
        parts = tuple(self.part(shown, table) for shown, table in zip(topic.shows, tables, strict=True))
        differ = {label: text for label, text in facts(result).items() if strip.get(label) != text}
        anchor = re.sub(r"\W+", "-", f"{name.rpartition('/')[0]} {topic.title}".strip().lower())
        return Section(topic.title, anchor, differ, parts)

    def part(self, shown: Shown, table: Table) -> Part:
        found = next(self.root.glob(f"chapters/{shown.chapter:02d}_*"), None)
        if found is None:
            raise ValueError(f"table {shown.table!r} links chapter {shown.chapter}, which has no folder in chapters/")
        return Part(table, shown.says, shown.chapter, f"../chapters/{found.name}/")


def html(root: Path, groups: list[Group]) -> str:
    """The page as one HTML file that needs no other."""
    environment = Environment(loader=FileSystemLoader(root / Path(TEMPLATE).parent), autoescape=True, trim_blocks=True,
                              lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined)
    environment.filters |= {"code": _code, "split": _split}
    template = environment.get_template(Path(TEMPLATE).name)
    return template.render(intro=INTRO, groups=groups, no_gpu=NO_GPU if one_machine(groups) else "", words=LEFT)


def one_machine(groups: list[Group]) -> bool:
    return sum(bool(group.facts) for group in groups) == 1


def _code(text: str) -> Markup:
    """The text with what stands between backticks as code."""
    pieces = text.split("`")
    return Markup("").join(Markup("<code>{}</code>").format(piece) if i % 2 else piece
                           for i, piece in enumerate(pieces))


def _split(cell: str) -> tuple[str, str]:
    """A figure or a name, and what stands behind it in brackets."""
    match = re.fullmatch(r"(.+?) (\(.*\))", cell)
    return (match[1], match[2]) if match else (cell, "")


def markdown(groups: list[Group]) -> str:
    """The page as Markdown; best cells are bold."""
    lines = ["<!-- Written by `python -m benchmarks render`: changes made here are lost. -->", "# Benchmarks",
             *INTRO, *([NO_GPU] if one_machine(groups) else []), *(line for group in groups for line in _group(group))]
    return "\n\n".join(lines) + "\n"


def _group(group: Group) -> Iterator[str]:
    yield f"## {group.title}"
    if group.says:
        yield group.says
    if group.facts:
        yield _line(group.facts)
    for section in group.sections:
        yield f"### {section.title}"
        if section.facts:
            yield f"Unlike above: {_line(section.facts)}."
        for part in section.parts:
            yield f"#### {part.table.title}"
            yield f"{part.says} [Chapter {part.chapter}]({part.link})"
            yield to_markdown(replace(_plain(part.table), title="")).rstrip("\n")
    if group.absent:
        yield f"Not measured on this machine: {', '.join(group.absent)}."


def _line(strip: dict[str, str]) -> str:
    return " · ".join(f"{label} {text}" for label, text in strip.items())


def _plain(table: Table) -> Table:
    """The table with its best cells in bold and, below each row's name, what the row is."""
    rows = [[f"**{cell}**" if (i, j) in table.best else str(cell) for j, cell in enumerate(row)]
            for i, row in enumerate(table.rows)]
    for row, about in zip(rows, table.about, strict=False):
        row[0] += f"<br>{'; '.join(about)}"
    return replace(table, rows=[tuple(row) for row in rows])
