"""What is compared of each kind of result when two sets stand side by side: a line of `KINDS` for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from benchmarks.draft_tables import draft
from benchmarks.measured import LATENCY, THROUGHPUT
from benchmarks.pieces import title
from benchmarks.result_file import Result, dig
from benchmarks.table import DASH

Ends = tuple[float, float]   # the least and the most over rounds


@dataclass(frozen=True)
class Metric:
    """A timed figure of a row: its heading, the path to it, whether less is better, its format.

    `each` is its path in a round, where that is another one. `drafting` limits it to rows that draft, or to
    rows that do not.
    """

    heading: str
    path: str
    lower_is_better: bool = True
    spec: str = ",.1f"
    each: str | None = None
    drafting: bool | None = None

    def ends(self, row: Result) -> Ends | None:
        """The least and the most over rounds, None where there are not several."""
        rounds = (dig(one, self.each or self.path) for one in row.get("rounds", ()))
        values = [value for value in rounds if value is not None]
        return (min(values), max(values)) if len(values) > 1 else None


def _rows(result: Result) -> list[Result]:
    return list(result["rows"])


@dataclass(frozen=True)
class Kind:
    """How results of one kind are compared.

    keys: what tells its rows apart, heading -> field. settings and same: fields of the result and of a row;
    where one of them differs, two rows were not measured alike. exact: counts, of which one that grew is a
    regression whatever the noise. told: counts that are only told when they change; a path to a dict means
    all that is in it. rows: the rows of a result, each a dict.
    """

    keys: Mapping[str, str]
    metrics: tuple[Metric, ...] = ()
    settings: tuple[str, ...] = ()
    same: tuple[str, ...] = ()
    exact: tuple[str, ...] = ()
    told: tuple[str, ...] = ()
    rows: Callable[[Result], list[Result]] = field(default=_rows)

    def key(self, row: Result) -> tuple[str, ...]:
        """The cells that say which row it is."""
        cells = (row.get(name) for name in self.keys.values())
        return tuple(DASH if cell is None else f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in cells)

    def counts(self, row: Result) -> dict[str, int]:
        """The exact counts of a row and those that are only told, by path."""
        found: dict[str, int] = {}
        for path in (*self.exact, *self.told):
            value = dig(row, path)
            inside = value.items() if isinstance(value, dict) else [("", value)]
            found |= {f"{path}.{name}".rstrip("."): one for name, one in inside if isinstance(one, int)}
        return found


def _ladder(result: Result) -> list[Result]:
    return [{"width": 1, **row} for row in result["rows"]]


def _points(result: Result) -> list[Result]:
    return [{**row, **point} for row in result["rows"] for point in row["widths"]]


def _caches(result: Result) -> list[Result]:
    return [*result["lengths"], *result["waste"]["by_block_size"]]


def _drafts(result: Result) -> list[Result]:
    return [{**row, "draft": draft(row)} for row in result["rows"]]


def _variants(result: Result) -> list[Result]:
    return [{**row, "variant": title(row["without"])} for row in result["rows"]]


def _workloads(result: Result) -> list[Result]:
    hashes = {work["name"]: work["prompt_hash"] for work in result["workloads"]}
    return [{**row, "prompt_hash": hashes[row["workload"]]} for row in result["rows"]]


LADDER = Kind({"row": "name", "width": "width"}, (
    Metric("ITL p50 ms, one request in flight", LATENCY.headline, drafting=False),
    Metric("TPOT p50 ms, one request in flight", "latency.tpot_p50_ms", drafting=True),
    Metric("TTFT p50 ms, one request in flight", "latency.ttft_p50_ms"),
    Metric("E2E p50 ms, one request in flight", "latency.e2e_p50_ms"),
    Metric("tok/s, all prompts at once", THROUGHPUT.headline, THROUGHPUT.lower_is_better)),
    same=("prompts.latency", "prompts.throughput", "draft"), told=("counters",),
    exact=("counters.forward_passes", "counters.tokens_computed"), rows=_ladder)

KINDS: dict[str | None, Kind] = {
    None: LADDER,
    "kv_memory": Kind({"output tokens": "output", "block size": "block_size"},
                      settings=("isl", "block_size", "max_model_len", "budget_bytes", "waste.shape"), rows=_caches,
                      exact=("contiguous_bytes", "paged_bytes", "held_slots", "tail_slots"),
                      told=("streams_contiguous", "streams_paged")),
    "widths": Kind({"row": "name", "width": "width"}, (Metric("ITL p50 ms", "itl_p50_ms", each="itl_ms"),),
                   settings=("isl", "osl"), rows=_points),
    "radix": Kind({"row": "name", "prefix": "prefix"}, (
        Metric("TTFT ms, nothing cached", "cold_ms"), Metric("TTFT ms, prefix cached", "cached_ms")),
        settings=("question",), exact=("cold_tokens", "cached_tokens")),
    "sharing": Kind({"workload": "workload", "row": "name"}, (Metric("wall s", "wall_s", spec=",.2f"),),
                    same=("prompt_hash",), exact=("forward_passes", "tokens_computed"),
                    told=("prefix_hit_tokens", "preemptions"), rows=_workloads),
    "overhead": Kind({"row": "name"}, (Metric("step µs", "step_us", spec=",.0f"),),
                     settings=("sequences", "isl", "osl")),
    "speculative": Kind({"kind": "prompts_kind", "draft": "draft", "K": "k", "width": "width"}, (
        Metric("speed-up over the same engine without drafts", "speedup", lower_is_better=False, spec=",.2f"),
        Metric("tok/s", "tok_s", lower_is_better=False)), settings=("max_tokens", "prompt_hash"),
        same=("prompts",), told=("decode_passes", "drafted_tokens", "accepted_tokens"), rows=_drafts),
    "heads": Kind({"head": "name"}, (Metric("ms of a guess", "guess_ms", spec=",.2f"),), settings=("k", "isl", "osl"),
                  same=("parameters",)),
    "pieces": Kind({"variant": "variant", "width": "width"}, (
        Metric("ITL p50 ms", "itl_p50_ms", each="itl_ms"), Metric("prefill ms", "prefill_ms")),
        settings=("isl", "osl"), rows=_variants),
    "profile": Kind({"row": "name", "width": "width"}, (Metric("step ms", "step_ms"),), settings=("isl", "osl")),
    "shapes": Kind({"row": "name", "ISL": "isl", "OSL": "osl"}, (
        Metric("TTFT ms", "ttft_ms"), Metric("TPOT ms", "tpot_ms"), Metric("E2E ms", "e2e_ms")),
        settings=("prompts",), same=("prompt_hash",)),
}
