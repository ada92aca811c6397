"""The tables of the prefix cache: what it saves, what it finds, what it costs."""

from __future__ import annotations

from benchmarks.compare import Book
from benchmarks.kinds import stale
from benchmarks.result_file import Result
from benchmarks.table import DASH, Table, number, with_range


def radix_table(book: Book) -> Table:
    """TTFT cold and cached by prefix length, beside what mini-infer publishes."""
    result = book.of_kind("radix")
    several = len({row["name"] for row in result["rows"]}) > 1
    rows = [(*((row["name"],) if several else ()), f"{row['prefix']:,}", ranged(result, row, "cold_ms", "cold_range"),
             ranged(result, row, "cached_ms", "cached_range"), f"{row['cold_tokens']:,}", f"{row['cached_tokens']:,}",
             f"{row['speedup']:,.1f}x", f"{row['published']['speedup']:,.1f}x" if row["published"] else DASH)
            for row in result["rows"]]
    header = (*(("row",) if several else ()), "prefix tokens", "cold ms", "cached ms", "tokens cold", "tokens cached",
              "speed-up", "published speed-up")
    names = ", ".join(dict.fromkeys(row["name"] for row in result["rows"]))
    theirs = {row["prefix"]: row["published"] for row in result["rows"] if row["published"]}
    notes = [f"{names}: a prefix and {result['question']} tokens after it, first in an empty tree, then another "
             f"question after the same prefix. Speed-up: the median of the rounds' ratios.", f"{result['pool']}."]
    if theirs:
        notes.insert(1, "Published: mini-infer's own figures on its authors' machine (RTX 3050 6 GB laptop GPU), not "
                     "measured here: " + ", ".join(f"{prefix:,} tokens {each['cold_ms']} and {each['cached_ms']} ms"
                                                   for prefix, each in theirs.items()) + ".")
    return Table("Radix: time to first token after a shared prefix", header, rows, notes + ends(book, result))


def sharing_table(book: Book) -> Table:
    """What a prefix cache finds in three workloads, and what that is worth."""
    result = book.of_kind("sharing")
    rows = [(row["workload"], row["name"], f"{row['prompts']:,}", f"{row['prompt_tokens']:,}",
             f"{row['hit_rate']:.1%}", f"{row['tokens_computed']:,}",
             ranged(result, row, "ttft_p50_ms", "ttft_range"), ranged(result, row, "wall_s", "wall_range"),
             f"{row['wall_gain']:,.2f}x") for row in result["rows"]]
    header = ("workload", "row", "prompts", "prompt tokens", "hit rate", "tokens computed", "TTFT p50 ms", "wall s",
              "vs first")
    notes = [" ".join(f"{work['name']}: {work['what']}." for work in result["workloads"])]
    notes += [f"With nothing to share {row['name']} spends {row['kv_ms']:,.1f} ms in its KV manager, "
              f"{row['kv_share']:.2%} of the wall." for row in result["rows"] if row["workload"] == "distinct"]
    different = [f"{row['name']} in {row['differs_from_first']['differ']} of {row['differs_from_first']['prompts']} "
                 f"prompts of {row['workload']}" for row in result["rows"] if row["differs_from_first"]["differ"]]
    if different:
        notes.append(f"Other tokens than the first row: {', '.join(different)}.")
    return Table("Sharing: what a prefix cache finds", header, rows,
                 [*notes, f"{result['pool']}.", *ends(book, result)])


def overhead_table(book: Book) -> Table:
    """Microseconds of Python in a decode step, by part."""
    result = book.of_kind("overhead")
    parts = ("schedule_us", "layout_us", "sampling_us", "update_us", "kv_us")
    rows = [(row["name"], ranged(result, row, "step_us", "step_range", ",.0f"),
             *(number(row[part], ",.0f") for part in parts)) for row in result["rows"]]
    header = ("row", "step µs", "schedule", "layout and tables", "sampling", "update", "in the KV manager")
    notes = [f"{result['sequences']} sequences decode; a runner that does no arithmetic, a vocabulary of 64, ISL "
             f"{result['isl']} and up. In the KV manager: of schedule and update."]
    if result["tree_us"] is not None and result["real_step_ms"]:
        notes.append(f"A real step of {result['sequences']} sequences takes {result['real_step_ms']:,.1f} ms, so the "
                     f"tree's {result['tree_us']:,.0f} µs more are {result['tree_share']:.3%} of it.")
    return Table("Overhead: what Python costs in a step", header, rows, notes + ends(book, result))


def ranged(result: Result, row: Result, key: str, ends: str, spec: str = ",.1f") -> str:
    """A median, and the least and the most if there were several rounds."""
    return with_range(number(row[key], spec), row[ends] if result["rounds"] > 1 else None, spec)


def ends(book: Book, result: Result) -> list[str]:
    """What a reader has to know about the run as a whole."""
    cut = ["The run was interrupted: the rows have the rounds that were finished by then."]
    return (cut if result.get("interrupted") else []) + stale(book, result)
