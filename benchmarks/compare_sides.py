"""Two results of one kind, row by row: the tables, the regressions, and what is no regression."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.compare import Book, Entry, Ratio
from benchmarks.compare_kinds import KINDS, Ends, Metric
from benchmarks.measured import drafts
from benchmarks.result_file import Result, dig
from benchmarks.table import DASH, Table, number, with_range

THE_POINT = ("separate runs", "different code")   # of comparing two sets
MACHINES = "different machines"


@dataclass
class Findings:
    """What came out: the tables, a line for each regression, and what else a reader has to know."""

    noise: float
    tables: list[Table] = field(default_factory=list)
    regressions: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    rows: int = 0      # that are in both sets
    figures: int = 0   # of those, compared
    unlike: int = 0    # shown with a ~

    @property
    def summary(self) -> str:
        return (f"{self.figures:,} figures of {self.rows:,} rows compared, {self.unlike:,} more shown with a ~; "
                f"{len(self.regressions) or 'no'} regression{'s'[:len(self.regressions) != 1]}.")

    def closing(self) -> Table:
        """The lines below all tables: how to read them, what could not be compared, and the regressions."""
        rule = ("B vs A: how many times better B is. A regression: A is more than "
                f"{self.noise * 100:.3g} % better and, where both have several rounds, B's best is worse than A's "
                "worst. On a machine shared with others two runs of the same code easily differ by a tenth, in a bad "
                "hour by far more: measure again, both in turn, before you believe one. Counts are exact: one of work "
                "done that grew is a regression. So is a row that was stopped or skipped in B, or failed more often, "
                "and had figures in A.")
        return Table("", (), [], [rule, *self.told, *(f"Regression: {line}" for line in self.regressions)])


def no_hash(name: str) -> str | None:
    """Two sets are compared with each other, whatever the code is now."""
    return None


class Sides:
    """Two results of one kind, row by row. What comes out goes into `found`; `place` is what its lines begin with."""

    def __init__(self, place: str, a: Result, b: Result, found: Findings) -> None:
        if a.get("kind") != b.get("kind"):
            raise ValueError(f"{place}A holds {a.get('kind') or 'rows of the ladder'}, "
                             f"B {b.get('kind') or 'rows of the ladder'}; only results of one kind can be compared")
        self.place, self.found, self.kind = place, found, KINDS[a.get("kind")]
        self.results, self.book = (a, b), Book((a, b), no_hash)
        self.a, self.b = ({self.kind.key(row): Entry(row, side) for row in self.kind.rows(side)} for side in (a, b))
        self.both = [key for key in self.a if key in self.b]

    def compare(self) -> None:
        """Everything, in the order in which it is read."""
        self.found.rows += len(self.both)
        self.found.told += [*self._versions(), *self._absent(), *self._doubted()]
        for key in self.both:
            self._regress(self._broken(key), self.doubts(self.a[key], self.b[key]), key)
        for metric in self.kind.metrics:
            if rows := [row for key in self.both for row in self._figure(metric, key)]:
                header = (*self.kind.keys, "A", "B", "B vs A", "note")
                self._table(metric.heading, header, rows)
        compared = self.found.figures
        if rows := [row for key in self.both for row in self._counts(key)]:
            self._table("counts that changed", (*self.kind.keys, "count", "A", "B", "note"), rows)
        elif same := self.found.figures - compared:
            self.found.told.append(f"{self.place}No count changed, of {same:,} compared.")

    def _table(self, title: str, header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
        self.found.tables.append(Table(f"{self.place}{title}", header, rows, [], keys=len(self.kind.keys)))

    def name(self, key: tuple[str, ...]) -> str:
        """A row in a line of text: a name stands for itself, a number behind its heading."""
        return ", ".join(cell if cell[:1].isalpha() else f"{heading} {cell}"
                         for heading, cell in zip(self.kind.keys, key, strict=True) if cell != DASH)

    def doubts(self, a: Entry, b: Entry) -> tuple[str, ...]:
        """Why two entries are not measured alike, besides what is the point."""
        ours = (*THE_POINT, "different prompts") if "kind" in a.result else THE_POINT   # a kind has no hashes there
        reasons = [doubt for doubt in self.book.doubts(a, b) if doubt not in ours]
        for x, y, paths in ((a.result, b.result, self.kind.settings), (a.row, b.row, self.kind.same)):
            reasons += [f"different {_words(path)}" for path in paths if dig(x, path) != dig(y, path)]
        return tuple(dict.fromkeys(reasons))

    def _regress(self, lines: Sequence[str], doubts: Sequence[str], key: tuple[str, ...]) -> None:
        """Lines about a row: regressions, or only told if it was not measured alike."""
        lines = [f"{self.place}{self.name(key)}: {line}." for line in lines]
        if doubts:
            self.found.told += lines
        else:
            self.found.regressions += lines

    def _versions(self) -> Iterator[str]:
        a, b = (result["versions"] for result in self.results)
        if changed := [f"{package} {a.get(package, 'none')} in A, {b.get(package, 'none')} in B"
                       for package in {**a, **b} if a.get(package) != b.get(package)]:
            yield f"{self.place}Other versions: {'; '.join(changed)}."

    def _absent(self) -> Iterator[str]:
        """Rows that only one side has. One that B could not run is a regression."""
        for key, entry in self.a.items():
            reason = None if key in self.b else self._skipped(key)
            if reason is not None:
                elsewhere = self.doubts(entry, Entry(entry.row, self.results[1]))
                self._regress([f"has figures in A, was not run in B: {reason}"], elsewhere, key)
        for side, keys in (("A", [key for key in self.a if key not in self.b and self._skipped(key) is None]),
                           ("B", [key for key in self.b if key not in self.a])):
            if keys:
                yield f"{self.place}Only in {side}: {'; '.join(map(self.name, keys))}."

    def _skipped(self, key: tuple[str, ...]) -> str | None:
        """Why B has no such row, if it says so. What was skipped goes by its name, or by several keys of its row."""
        cells = dict(zip(self.kind.keys, key, strict=True))
        parts = {*key, *(f"{heading} {cell}" for heading, cell in cells.items())}
        for skip in self.results[1].get("skipped", ()):
            if parts.issuperset(skip["name"].split(", ")) and str(skip.get("width", "")) in ("", cells.get("width")):
                return str(skip["reason"])
        return None

    def _doubted(self) -> Iterator[str]:
        reasons: dict[tuple[str, ...], list[str]] = {}
        for key in self.both:
            reasons.setdefault(self.doubts(self.a[key], self.b[key]), []).append(self.name(key))
        for doubts, names in reasons.items():
            if doubts:
                which = "every row" if len(names) == len(self.both) else "; ".join(names)
                yield f"{self.place}~ not measured alike ({', '.join(doubts)}), so no regression: {which}."

    def _broken(self, key: tuple[str, ...]) -> list[str]:
        """What went wrong in B, and did not in A."""
        a, b, lines = self.a[key].row, self.b[key].row, []
        if b.get("stopped") and not a.get("stopped"):
            lines.append(f"stopped in B: {b['stopped']}")
        if len(b.get("failed", ())) > len(a.get("failed", ())):
            lines.append(f"{len(b['failed'])} failed in B, {len(a.get('failed', ()))} in A: {b['failed'][0]}")
        return lines

    def _figure(self, metric: Metric, key: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        """One line of a metric's table; none where the row has no such figure."""
        a, b = self.a[key], self.b[key]
        before, after, doubts = a.get(metric.path), b.get(metric.path), self.doubts(a, b)
        if (before is None and after is None) or metric.drafting not in (None, drafts(a) or drafts(b)):
            return
        ends = [metric.ends(side.row) for side in (a, b)]
        cells = [with_range(number(value, metric.spec), span, metric.spec)
                 for value, span in zip((before, after), ends, strict=True)]
        gain, note = self.book.gain(b, a, metric.path, metric.lower_is_better), ""
        if after is None and not self._broken(key):
            self._regress([f"{metric.heading}: {cells[0]} in A, nothing in B"], doubts, key)
        if gain:
            self.found.figures += not doubts
            self.found.unlike += bool(doubts)
            gain = Ratio(gain.value, doubts)
            note = self._verdict(gain, metric, ends)
        if note == "regression":
            self._regress([f"{metric.heading}: {cells[0]} in A, {cells[1]} in B, {gain}"], doubts, key)
        yield (*key, *cells, str(gain or DASH), note)

    def _verdict(self, gain: Ratio, metric: Metric, ends: Sequence[Ends | None]) -> str:
        if gain.doubts or gain.value * (1 + self.found.noise) >= 1:
            return ""
        mine, theirs = ends
        if mine and theirs and (theirs[0] <= mine[1] if metric.lower_is_better else theirs[1] >= mine[0]):
            return "worse, but the rounds overlap"
        return "regression"

    def _counts(self, key: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        """A line for each count that changed. They are exact on any machine, but for arrivals by the clock."""
        a, b = self.a[key], self.b[key]
        if a.rate or b.rate or any(doubt != MACHINES for doubt in self.doubts(a, b)):
            return
        before, after = (self.kind.counts(side.row) for side in (a, b))
        for path in (path for path in before if path in after):
            self.found.figures += 1
            grown = path in self.kind.exact and after[path] > before[path]
            heading, cells = _words(path.removeprefix("counters.")), [f"{side[path]:,}" for side in (before, after)]
            if grown:
                self._regress([f"{heading}: {cells[0]} in A, {cells[1]} in B"], (), key)
            if before[path] != after[path]:
                yield (*key, heading, *cells, "regression" if grown else "")


def _words(path: str) -> str:
    """A field in a line of text; hashes and numbers of prompts both say which they are."""
    return "prompts" if "prompt" in path and "tokens" not in path else path.replace("_", " ").replace(".", " ")
