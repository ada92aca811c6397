"""The generated parts of the pages: tables, quoted code and numbers inside prose.

An HTML comment, which GitHub does not show, says what belongs in a place:

    <!-- table: latency results=course rows=nocache,eager -->     a table of benchmarks/results/course.json
    <!-- table: waste results=memory -->                          a table of another kind of result (radix, ...)
    <!-- table: speculative results=speculative drafts=ngram -->  only these drafts, NAME or NAME@K
    <!-- code: liteinfer/sampling.py sample -->                   a function, class or method, verbatim
    <!-- code: liteinfer/lineage.py from="text" to="text" -->     the lines from one text to the other
    <!-- end -->                                                  closes each of these

    <!--v: results=course row=eager latency.itl_p50_ms .0f-->61<!--/v-->
    <!--v: results=course machine.bandwidth_gb_s .1f-->18.0<!--/v-->
    <!--v: results=memory lengths.0.saved .1%-->97.7%<!--/v-->
    <!--v: results=course ratio=throughput.tok_s row=eager over=nocache .1f-->5.2<!--/v-->

A number's last word is a Python format or a unit of bytes (MB, MiB, .2fMB).
Markers inside a fenced block are text like any other.
"""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.compare import Book, Entry, HashOf, current_hash
from benchmarks.draft_tables import only_drafts
from benchmarks.excerpt import between, definition
from benchmarks.page import MARKDOWN, render_page
from benchmarks.report import build_tables, ladder_table
from benchmarks.result_file import dig
from benchmarks.stored import stale_lines, stored
from benchmarks.table import to_markdown
from liteinfer.lineage import find

PAGES = ("README.md", "chapters/**/*.md", "docs/**/*.md", "benchmarks/*.md")
BLOCK = re.compile(r"<!--\s*(table|code):\s*(.*?)\s*-->\s*")
END = re.compile(r"<!--\s*end\s*-->\s*")
VALUE = re.compile(r"(<!--\s*v:\s*(.*?)\s*-->)(.*?)(<!--\s*/v\s*-->)")
STRAY = re.compile(r"<!--\s*/?v\b")
LANGUAGES = {".py": "python", ".cpp": "cpp"}
UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def render(root: Path, check: bool, current: HashOf = current_hash) -> list[str]:
    """Bring the generated parts of all pages up to date (with `check`, write nothing).

    Returns "file:line what" for each part that was not up to date, the file for each form of the
    benchmark page that was not, and, with `check`, a line for each stored row whose code is no
    longer the code here.

    Raises:
        ValueError: a marker that means nothing (unknown table, row, path or name; no such
            results file; never closed); the message starts with file and line. What the benchmark
            page needs and is not there.
    """
    changed: list[str] = []
    for path in sorted({path for pattern in PAGES for path in root.glob(pattern)} - {root / MARKDOWN}):
        page = _Page(root, path, current, check)
        text = page.render()
        changed += page.changed
        if page.changed and not check:
            path.write_text(text, encoding="utf-8", newline="\n")
    return changed + [line for line in render_page(root, check, current) if line not in changed]


@dataclass
class _Page:
    root: Path
    path: Path
    current: HashOf
    check: bool
    changed: list[str] = field(default_factory=list)

    def render(self) -> str:
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        out: list[str] = []
        at, fence = 0, ""
        while at < len(lines):
            line, start = lines[at], at + 1
            at += 1
            try:
                if tick := re.match(r"\s*(```+|~~~+)", line):
                    fence = "" if fence and tick[1].startswith(fence) else fence or tick[1]
                elif not fence and (block := BLOCK.fullmatch(line.strip())):
                    end = next((i for i in range(at, len(lines)) if END.fullmatch(lines[i].strip())), None)
                    if end is None or any(BLOCK.fullmatch(old.strip()) for old in lines[at:end]):
                        raise ValueError(f"the {block[1]} has no <!-- end -->")
                    new = (self.table if block[1] == "table" else self.code)(shlex.split(block[2]))
                    self.compare(start, f"{block[1]} {block[2]}", "".join(lines[at:end]), new)
                    out += [line, new]
                    line, at = lines[end], end + 1
                elif not fence and END.fullmatch(line.strip()):
                    raise ValueError("an <!-- end --> without a table or code marker before it")
                elif not fence:
                    line = VALUE.sub(partial(self.value, line=start), line)
                    if len(STRAY.findall(line)) != 2 * len(VALUE.findall(line)):
                        raise ValueError("a value's <!--v: ...--> and <!--/v--> must be whole and on one line")
            except ValueError as error:
                raise ValueError(f"{self.path.relative_to(self.root).as_posix()}:{start} {error}") from None
            out.append(line)
        return "".join(out)

    def compare(self, line: int, what: str, old: str, new: str) -> None:
        if old != new:
            self.changed.append(f"{self.path.relative_to(self.root).as_posix()}:{line} {what}")

    def table(self, words: list[str]) -> str:
        names, options = _options(words, "results", "rows", "drafts")
        if len(names) != 1:
            raise ValueError(f"a table marker takes one table name, got {names}")
        book = Book([]) if names == ["ladder"] and "results" not in options else self.book(options)
        if names == ["ladder"]:
            return "\n" + to_markdown(ladder_table(book, self.link)) + "\n"
        rows = [_measured(book, name) for name in options["rows"].split(",")] if "rows" in options else None
        return "\n" + "\n".join(to_markdown(table) for table in build_tables(book, names, rows)) + "\n"

    def link(self, chapter: int) -> str:
        found = next(self.root.glob(f"chapters/{chapter:02d}_*"), None)
        target = found and os.path.relpath(found, self.path.parent).replace(os.sep, "/")
        return f"[{chapter}]({target}/)" if target else str(chapter)

    def code(self, words: list[str]) -> str:
        names, options = _options(words, "from", "to")
        if not names or not (path := self.root / names[0]).is_file():
            raise ValueError(f"no such file to quote from: {' '.join(names)}")
        source = path.read_text(encoding="utf-8")
        if len(names) == 2 and not options:
            code = definition(source, names[1])
        elif len(names) == 1 and set(options) == {"from", "to"}:
            code = between(source, options["from"], options["to"])
        else:
            raise ValueError('a code marker takes a file and a name, or a file and from="text" to="text"')
        fence = "````" if "```" in code else "```"
        return f"{fence}{LANGUAGES.get(path.suffix, '')}\n{code}\n{fence}\n"

    def value(self, match: re.Match[str], line: int) -> str:
        new = self.compute(shlex.split(match[2]))
        self.compare(line, f"value {match[2]}", match[3], new)
        return match[1] + new + match[4]

    def compute(self, words: list[str]) -> str:
        names, options = _options(words, "results", "row", "over", "ratio", "width")
        book = self.book(options)
        if "ratio" in options:
            if len(names) != 1 or not {"row", "over"} <= set(options):
                raise ValueError("a ratio takes ratio=path row=name over=name and a format")
            return _ratio(book, options, names[0])
        if len(names) != 2 or "over" in options:
            raise ValueError(f"a value takes a path and a format, got {names}")
        entry = _entry(book, options["row"], options.get("width")) if "row" in options else None
        value = dig(entry.row if entry else book.results[0], names[0])
        if value is None or isinstance(value, (dict, list)):
            raise ValueError(f"no value at {names[0]!r}" + (f" of row {entry.name}" if entry else ""))
        return _format(value, names[1])

    def book(self, options: dict[str, str]) -> Book:
        if "results" not in options:
            raise ValueError("results=name is missing: the name of a file in benchmarks/results")
        result = stored(self.root, options["results"])
        if "drafts" in options:
            result = only_drafts(result, set(options["drafts"].split(",")))
        book = Book([result], self.current)
        if self.check:   # a stale row is marked in tables, but a number in prose cannot carry the mark
            self.changed += [line for line in stale_lines(book, options["results"]) if line not in self.changed]
        return book


def _options(words: list[str], *known: str) -> tuple[list[str], dict[str, str]]:
    """Split a marker's words into plain ones and key=value ones."""
    pairs = dict(word.split("=", 1) for word in words if re.match(r"[a-z]+=", word))
    if unknown := sorted(set(pairs) - set(known)):
        raise ValueError(f"unknown option {unknown[0]!r}; there are {', '.join(known)}")
    return [word for word in words if not re.match(r"[a-z]+=", word)], pairs


def _entries(book: Book, name: str) -> list[Entry]:
    if found := book.named(name):
        return found
    find(name)   # raises for a row that no ladder has
    raise ValueError(f"row {name!r} was not measured in these results")


def _measured(book: Book, name: str) -> str:
    """The full name of a row that was measured, or that was skipped and so is a note."""
    skipped = [skip["name"] for skip in book.skipped
               if name in (skip["name"], skip["name"].removeprefix("liteinfer-"))]
    return str(skipped[0]) if skipped else _entries(book, name)[0].name


def _entry(book: Book, name: str, width: str | None) -> Entry:
    found = [entry for entry in _entries(book, name) if width in (None, str(entry.width))]
    if len(found) != 1:
        widths = ", ".join(str(entry.width) for entry in book.named(name))
        raise ValueError(f"row {name!r} is there at width {widths}: say which with width=")
    return found[0]


def _ratio(book: Book, options: dict[str, str], spec: str) -> str:
    top, bottom = (_entry(book, options[key], options.get("width")) for key in ("row", "over"))
    path = options["ratio"]
    a, b = (entry.get("prompts.throughput") for entry in (top, bottom))
    if path.startswith("counters.") and a != b:
        raise ValueError(f"{path} of {top.name} counts {a} prompts, of {bottom.name} {b}: no ratio")
    ratio = book.ratio(top, bottom, path)
    if ratio is None:
        raise ValueError(f"no ratio of {path!r}: {top.name} has {top.get(path)}, {bottom.name} {bottom.get(path)}")
    return ("~" if ratio.doubts else "") + _format(ratio.value, spec)


def _format(value: Any, spec: str) -> str:
    unit = next((unit for unit in UNITS if spec.endswith(unit)), "")
    try:
        return f"{value / UNITS[unit]:{spec.removesuffix(unit) or ',.1f'}} {unit}" if unit else format(value, spec)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{value!r} cannot be written as {spec!r}: {error}") from None
