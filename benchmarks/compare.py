"""Result files: reading them, and comparing their rows.

A ratio whose two rows were measured in one interleaved run is the median over
rounds of the per-round ratio, so that a slow minute of the machine hits both
sides. Any other ratio, and any ratio of two rows that were not measured alike,
has doubts; it is shown with a `~`, and a note says why.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from liteinfer.lineage import LADDER

Result = dict[str, Any]
HashOf = Callable[[str], str | None]   # a row's name -> the hash of its code as it is now, None if not known

SCHEMA = 1
ROW = {"name", "latency", "throughput", "prompts"}   # what every row of a result has
MACHINE = ("name", "cpu", "cores", "threads", "gpu")   # what makes two machines the same one


@dataclass(frozen=True)
class Entry:
    """One row of one result file."""

    row: Result
    result: Result

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


def dig(tree: Any, path: str) -> Any:
    """Follow a dotted path through nested dicts; None where it leads nowhere."""
    for key in path.split("."):
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def load(path: str | Path) -> Result:
    """Read one result file.

    Raises:
        ValueError: no such file, not JSON, or another schema; the message names the file.
    """
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; `python -m benchmarks run --out {path}` makes it") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:   # not JSON, or not UTF-8
        raise ValueError(f"{path}: not a JSON file: {error}") from None
    schema = result.get("schema") if isinstance(result, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"{path}: result schema is {schema!r}, this version reads {SCHEMA}")
    missing = [key for key in ("machine", "versions", "model", "workload", "rows") if key not in result]
    if missing:
        raise ValueError(f"{path}: not a whole result, {', '.join(missing)} missing")
    rows = result["rows"]
    if not isinstance(rows, list) or not all(isinstance(row, dict) and row.keys() >= ROW for row in rows):
        raise ValueError(f"{path}: not a whole result, rows is not a list of rows with {', '.join(sorted(ROW))}")
    return {**result, "source": Path(path).stem}


def current_hash(name: str) -> str | None:
    """The hash of a row's code as it is now; None for a row the ladder does not have (a reference)."""
    from benchmarks.codehash import row_hash

    row = next((row for row in LADDER if row.name == name), None)
    return row_hash(row) if row else None


class Book:
    """The entries of some result files in ladder order, and how they compare."""

    def __init__(self, results: Sequence[Result], current: HashOf = current_hash) -> None:
        order = {row.name: i for i, row in enumerate(LADDER)}
        entries = [Entry(row, result) for result in results for row in result["rows"]]
        self.results = results
        self.entries = sorted(entries, key=lambda e: (e.row.get("chapter") or 99, order.get(e.name, 999), e.width))
        hashes = {name: current(name) for name in {e.name for e in entries}}
        self._stale = {id(e.row) for e in entries if hashes[e.name] not in (None, e.row.get("code_hash"))}

    def named(self, name: str) -> list[Entry]:
        """All entries of a row, whose name may be short ("eager")."""
        return [e for e in self.entries if name in (e.name, e.name.removeprefix("liteinfer-"))]

    def beside(self, entry: Entry, name: str | None, same_width: bool = False) -> Entry | None:
        """The row of this name to compare with: of the same width, then of the same run, then the widest."""
        found = [e for e in self.entries if e.name == name and (e.width == entry.width or not same_width)]
        return min(found, key=lambda e: (e.width != entry.width, e.result is not entry.result, -e.width), default=None)

    def reference(self, entry: Entry) -> Entry | None:
        return self.beside(entry, entry.row.get("reference"), same_width=True)

    def stale(self, entry: Entry) -> bool:
        """Whether the code this entry measured is no longer the code here."""
        return id(entry.row) in self._stale

    def doubts(self, a: Entry, b: Entry) -> tuple[str, ...]:
        """Why two entries are not measured alike; empty if they are."""
        mine, other = a.result, b.result
        hashes = sorted((a.get("prompts.hashes") or [], b.get("prompts.hashes") or []), key=len)
        checks = {
            "separate runs": mine is not other,
            "different machines": any(dig(mine, f"machine.{k}") != dig(other, f"machine.{k}") for k in MACHINE),
            "different models": any(dig(mine, f"model.{k}") != dig(other, f"model.{k}") for k in ("name", "dtype")),
            "different shapes": any(dig(mine, f"workload.{k}") != dig(other, f"workload.{k}") for k in ("isl", "osl")),
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

    def label(self, entry: Entry, what: str = "throughput") -> str:
        """The row's cell: its name, and whatever sets it apart from the strip on top."""
        prompts, usual = entry.get(f"prompts.{what}"), dig(entry.result, f"workload.{what}_prompts")
        twin = any(e is not entry and (e.name, e.width) == (entry.name, entry.width) for e in self.entries)
        apart = [f"width {entry.width}" if entry.width > 1 else "",
                 f"{prompts} prompt{'s'[:prompts != 1]}" if prompts not in (None, usual) else "",
                 str(entry.result.get("source", "")) if twin else ""]
        inside = ", ".join(part for part in apart if part)
        return entry.name + (f" ({inside})" if inside else "") + (" stale" if self.stale(entry) else "")
