"""Comparing the rows of result files.

A ratio whose two rows were measured in one interleaved run is the median over
rounds of the per-round ratio, so that a slow minute of the machine hits both
sides. Any other ratio, and any ratio of two rows that were not measured alike,
has doubts; it is shown with a `~`, and a note says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.result_file import Result, dig
from liteinfer.lineage import LADDER, REFERENCES, reference_at

HashOf = Callable[[str], str | None]   # the name of a row or of a kind -> the hash of its code now, None if not known

MACHINE = ("name", "cpu", "cores", "threads", "gpu")   # what makes two machines the same one


@dataclass(frozen=True)
class Entry:
    """One row of one result file."""

    row: Result
    result: Result

    @property
    def rate(self) -> float | None:
        """Requests per second that arrived by themselves; None where all were there at once."""
        return dig(self.result, "workload.rate")

    @property
    def name(self) -> str:
        return str(self.row["name"])

    @property
    def width(self) -> int:
        return int(self.row.get("width", 1))

    def get(self, path: str) -> Any:
        """The value at a dotted path of the row, None where there is none."""
        return dig(self.row, path)


@dataclass(frozen=True)
class Ratio:
    """A quotient, and why it should not be trusted to the last digit (empty: measured alike)."""

    value: float
    doubts: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{'~' if self.doubts else ''}{self.value:,.2f}x"


def current_hash(name: str) -> str | None:
    """The hash of the code of a row, or of a kind of result, as it is now; None for a row that is not the ladder's."""
    from benchmarks.codehash import KINDS, kind_hash, row_hash

    if name in KINDS:
        return kind_hash(name)
    row = next((row for row in (*LADDER, *REFERENCES) if row.name == name), None)
    return row_hash(row) if row else None


class Book:
    """The entries of some result files in ladder order, and how they compare."""

    def __init__(self, results: Sequence[Result], current: HashOf = current_hash) -> None:
        order = {row.name: i for i, row in enumerate((*LADDER, *REFERENCES))}
        entries = [Entry(row, result) for result in results if "kind" not in result for row in result["rows"]]
        self.results = results
        self.entries = sorted(entries, key=lambda e: (e.row.get("chapter") or 99, order.get(e.name, 999), e.width))
        hashed = [(e.name, e.row) for e in entries]
        hashed += [(name, part) for result in results for name, part in _hashed_parts(result)]
        hashes = {name: current(name) for name, _ in hashed}
        self._stale = {id(part) for name, part in hashed if hashes[name] not in (None, part.get("code_hash"))}

    @property
    def skipped(self) -> list[Result]:
        """The entries that were not run, each with its name, width and reason."""
        return [skip for result in self.results for skip in result.get("skipped", ())]

    def of_kind(self, kind: str) -> Result:
        """The first result of this kind. Raises ValueError if there is none."""
        for result in self.results:
            if result.get("kind") == kind:
                return result
        raise ValueError(f"none of these results is of the kind {kind!r}")

    def named(self, name: str) -> list[Entry]:
        """All entries of a row, whose name may be short ("eager")."""
        return [e for e in self.entries if name in (e.name, e.name.removeprefix("liteinfer-"))]

    def beside(self, entry: Entry, name: str | None, same_width: bool = False) -> Entry | None:
        """The row of this name to compare with: of the same width, then of the same run, then the widest."""
        found = [e for e in self.entries if e.name == name and (e.width == entry.width or not same_width)]
        return min(found, key=lambda e: (e.width != entry.width, e.result is not entry.result, -e.width), default=None)

    def base(self, entry: Entry, what: str) -> Entry | None:
        """The row it improves on; for the throughput of a row of several widths, only one of the same width."""
        several = any(row.name == entry.name and len(row.widths) > 1 for row in LADDER)
        return self.beside(entry, entry.row.get("improves_on"), same_width=several and what == "throughput")

    def reference(self, entry: Entry, what: str) -> Entry | None:
        """vLLM: for latency with one request at a time, for throughput with as many as the row."""
        return self.beside(entry, reference_at(1 if what == "latency" else entry.width))

    def stale(self, entry: Entry) -> bool:
        """Whether the code this entry measured is no longer the code here."""
        return id(entry.row) in self._stale

    def stale_result(self, result: Result) -> bool:
        """The same of a result that has a kind."""
        return any(id(part) in self._stale for _, part in _hashed_parts(result))

    def doubts(self, a: Entry, b: Entry) -> tuple[str, ...]:
        """Why two entries are not measured alike; empty if they are."""
        mine, other = a.result, b.result
        hashes = sorted((a.get("prompts.hashes") or [], b.get("prompts.hashes") or []), key=len)
        checks = {
            "separate runs": mine is not other,
            "different machines": any(dig(mine, f"machine.{k}") != dig(other, f"machine.{k}") for k in MACHINE),
            "different models": any(dig(mine, f"model.{k}") != dig(other, f"model.{k}") for k in ("name", "dtype")),
            "different shapes": any(dig(mine, f"workload.{k}") != dig(other, f"workload.{k}") for k in ("isl", "osl")),
            "different arrivals": a.rate != b.rate,
            "different code": self.stale(a) != self.stale(b) or mine["versions"] != other["versions"],
            "different prompts": not hashes[0] or hashes[1][:len(hashes[0])] != hashes[0],
        }
        return tuple(reason for reason, holds in checks.items() if holds)

    def ratio(self, top: Entry | None, bottom: Entry | None, path: str) -> Ratio | None:
        """top / bottom of the value at `path`; None where either is missing or the divisor is zero."""
        if top is None or bottom is None or top.get(path) is None or not bottom.get(path):
            return None
        if top is bottom:
            return Ratio(1.0)
        doubts, whole = self.doubts(top, bottom), float(top.get(path) / bottom.get(path))
        if top.result is not bottom.result or not path.startswith(("latency.", "throughput.")):
            return Ratio(whole, doubts)
        rounds = zip(top.row.get("rounds", ()), bottom.row.get("rounds", ()), strict=False)   # Ctrl-C: fewer of one
        pairs = [(dig(a, path), dig(b, path)) for a, b in rounds]
        each = [a / b for a, b in pairs if a is not None and b]
        return Ratio(median(each), doubts) if each else Ratio(whole, (*doubts, "no rounds in common"))

    def gain(self, entry: Entry, other: Entry | None, path: str, lower_is_better: bool) -> Ratio | None:
        """How many times better `entry` is than `other` on the metric at `path`."""
        return self.ratio(other, entry, path) if lower_is_better else self.ratio(entry, other, path)

    def name(self, entry: Entry) -> str:
        """The row's name in a note, with its width if it is here at several."""
        several = any(e.name == entry.name and e.width != entry.width for e in self.entries)
        return f"{entry.name} at width {entry.width}" if several else entry.name

    def label(self, entry: Entry, what: str = "throughput") -> str:
        """The row's cell: its name, and whatever sets it apart from the strip on top."""
        prompts, usual = entry.get(f"prompts.{what}"), dig(entry.result, f"workload.{what}_prompts")
        twin = any(e is not entry and (e.name, e.width) == (entry.name, entry.width) for e in self.entries)
        apart = [f"width {entry.width}" if entry.width > 1 else "",
                 f"draft {draft}" if (draft := entry.get("draft")) else "",
                 f"{prompts} prompt{'s'[:prompts != 1]}" if prompts not in (None, usual) else "",
                 str(entry.result.get("source", "")) if twin else ""]
        inside = ", ".join(part for part in apart if part)
        return entry.name + (f" ({inside})" if inside else "") + (" stale" if self.stale(entry) else "")


def _hashed_parts(result: Result) -> list[tuple[str, Result]]:
    """What carries a hash in a result that has a kind: the whole, and the rows of the ladder in it."""
    if "kind" not in result:
        return []
    return [(result["kind"], result), *((row["name"], row) for row in result.get("rows", ()))]
