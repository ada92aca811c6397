"""Result files as tables: the ratios, when they carry a `~`, and the two forms of a table."""

from __future__ import annotations

import copy
import io
import json

import pytest
from rich.console import Console

from benchmarks.compare import Book, Entry, current_hash
from benchmarks.measured import LATENCY, NO_REFERENCE, THROUGHPUT, measured_table
from benchmarks.report import build_tables, load, markdown, print_tables
from benchmarks.table import BLOCKS, bar, size, to_markdown
from tests.results import FIXTURE, no_hash, row


def pair(*results: dict, top: str = "eager", bottom: str = "nocache", current=no_hash) -> tuple[Book, Entry, Entry]:
    """A book, the last entry named `top`, and the first named `bottom`."""
    book = Book(results, current)
    return book, book.named(top)[-1], book.named(bottom)[0]


def doubts(*results: dict, current=no_hash) -> tuple[str, ...]:
    book, top, bottom = pair(*results, current=current)
    return book.doubts(top, bottom)


def split(result: dict) -> tuple[dict, dict]:
    """The same measurement as two files: nocache in one, the rest in the other."""
    rest = copy.deepcopy(result)
    first = {**copy.deepcopy(result), "rows": [row(result, "nocache")]}
    rest["rows"] = [r for r in rest["rows"] if r["name"] != "liteinfer-nocache"]
    return first, rest


# Ratios

def test_a_ratio_is_the_median_over_rounds_of_the_ratio_of_each_round(result):
    rounds = [(400.0, 100.0), (600.0, 120.0), (500.0, 250.0)]   # per round 4, 5, 2; of the medians 500 / 120
    for name, side in (("nocache", 0), ("eager", 1)):
        row(result, name)["rounds"] = [{"latency": {"itl_p50_ms": both[side]}} for both in rounds]
        row(result, name)["latency"]["itl_p50_ms"] = sorted(both[side] for both in rounds)[1]
    book, eager, nocache = pair(result)
    assert str(book.gain(eager, nocache, "latency.itl_p50_ms", True)) == "4.00x"


def test_above_one_is_better_in_both_tables(result):
    book, eager, nocache = pair(result)
    assert str(book.gain(eager, nocache, "latency.itl_p50_ms", True)) == "4.50x"    # 400/100 and 600/120
    assert str(book.gain(eager, nocache, "throughput.tok_s", False)) == "4.50x"     # 10/2 and 8/2
    assert str(book.gain(nocache, eager, "throughput.tok_s", False)) == "0.23x"     # 2/10 and 2/8


def test_rounds_where_one_side_has_no_value_are_left_out(result):
    row(result, "eager")["rounds"][0]["latency"]["itl_p50_ms"] = None
    book, eager, nocache = pair(result)
    assert str(book.gain(eager, nocache, "latency.itl_p50_ms", True)) == "5.00x"


def test_no_rounds_in_common_gives_the_ratio_of_medians_with_a_mark(result):
    row(result, "eager")["rounds"] = []
    book, eager, nocache = pair(result)
    assert str(book.gain(eager, nocache, "latency.itl_p50_ms", True)) == "~4.55x"   # 500 / 110


def test_a_value_that_is_missing_or_zero_gives_no_ratio(result):
    row(result, "nocache")["latency"]["itl_p50_ms"] = None
    row(result, "nocache")["throughput"]["tok_s"] = 0.0
    book, eager, nocache = pair(result)
    assert book.gain(eager, nocache, "latency.itl_p50_ms", True) is None
    assert book.gain(eager, nocache, "throughput.tok_s", False) is None
    assert book.gain(eager, None, "throughput.tok_s", False) is None


def test_the_row_compared_with_is_of_the_same_width_then_of_the_same_run(result):
    wide = {**copy.deepcopy(row(result, "nocache")), "width": 4}
    other = copy.deepcopy(result)
    result["rows"].append(wide)
    book = Book([other, result], no_hash)
    eager = next(e for e in book.named("eager") if e.result is result)

    def base(width: int, same_width: bool = False) -> dict | None:
        found = book.beside(Entry({**eager.row, "width": width}, result), "liteinfer-nocache", same_width)
        return found.row if found else None

    assert base(1) is row(result, "nocache")
    assert base(4) is wide
    assert base(32) is wide
    assert base(32, same_width=True) is None


# The ~ mark, a case for each rule

def test_one_interleaved_run_has_no_doubts(result):
    assert doubts(result) == ()


def test_two_runs_are_doubtful_even_if_all_else_is_equal(result):
    first, rest = split(result)
    assert doubts(first, rest) == ("separate runs",)
    book, eager, nocache = pair(first, rest)
    assert str(book.gain(eager, nocache, "latency.itl_p50_ms", True)) == "~4.55x"   # of the medians


@pytest.mark.parametrize(("section", "key", "value", "reason"), [
    ("machine", "cpu", "Another CPU", "different machines"),
    ("machine", "gpu", "H200", "different machines"),
    ("machine", "threads", 1, "different machines"),
    ("model", "dtype", "bfloat16", "different models"),
    ("workload", "isl", 17, "different shapes"),
    ("workload", "osl", 9, "different shapes"),
    ("versions", "torch", "2.9.0", "different code"),
])
def test_what_differs_between_two_runs_is_named(result, section, key, value, reason):
    first, rest = split(result)
    rest[section][key] = value
    assert doubts(first, rest) == ("separate runs", reason)


def test_a_bandwidth_measured_anew_is_no_other_machine(result):
    first, rest = split(result)
    rest["machine"]["bandwidth_gb_s"] = 17.2
    assert doubts(first, rest) == ("separate runs",)


@pytest.mark.parametrize(("hashes", "reasons"), [
    (["p1"], ()), (["p1", "p2"], ()), (["p1", "p2", "p3", "p4", "p5"], ()),
    (["p2", "p1"], ("different prompts",)), (["p1", "p2", "p3", "p5"], ("different prompts",)),
    ([], ("different prompts",)),
])
def test_prompts_are_alike_if_one_list_starts_with_the_other(result, hashes, reasons):
    row(result, "nocache")["prompts"]["hashes"] = hashes
    assert doubts(result) == reasons


def test_a_row_whose_code_has_changed_is_marked_and_its_ratios_doubted(result):
    def current(name):
        return "bbbb" if name == "liteinfer-eager" else "aaaa"

    assert doubts(result, current=current) == ("different code",)
    text = markdown([result], ("latency",), current)
    assert "| liteinfer-eager stale |" in text and "| liteinfer-native-packed |" in text
    assert "stale: the code of liteinfer-eager has changed since it was measured." in text
    assert "~ not measured alike (different code): liteinfer-eager / liteinfer-nocache." in text
    assert "~4.50x | ~4.50x |" in text and "| 9.00x |" in text
    assert "stale" not in markdown([result], ("latency",), lambda name: "aaaa")


def test_two_rows_of_one_run_that_have_both_changed_since_were_still_measured_alike(result):
    assert doubts(result, current=lambda name: "bbbb") == ()


def test_the_present_hash_is_that_of_the_row_references_included():
    from benchmarks.codehash import row_hash
    from liteinfer.lineage import REFERENCES, find

    assert current_hash("liteinfer-eager") == row_hash(find("eager"))
    assert current_hash("vllm") == row_hash(find("vllm", REFERENCES))
    assert current_hash("somebody-else") is None


# Tables

def test_without_a_reference_there_is_a_dash_and_one_line(result):
    text = markdown([result], current=no_hash)
    assert text.count(NO_REFERENCE) == 1
    table = measured_table(LATENCY, Book([result], no_hash), Book([result], no_hash).entries)
    assert [cells[table.header.index("vs vLLM")] for cells in table.rows] == ["-", "-", "-"]


def test_a_reference_of_the_same_width_is_compared_with_and_stands_last(result):
    vllm = copy.deepcopy(row(result, "native-packed"))
    vllm.update(name="vllm", chapter=None, improves_on=None)
    result["rows"].insert(0, vllm)
    book = Book([result], no_hash)
    table = measured_table(LATENCY, book, book.entries)
    assert [(cells[0], cells[-2]) for cells in table.rows] == [
        ("liteinfer-nocache (1 prompt)", "0.11x"), ("liteinfer-eager", "0.50x"),
        ("liteinfer-native-packed", "1.00x"), ("vllm", "1.00x")]
    assert table.notes == []


def test_rows_stand_in_ladder_order_whatever_the_order_in_the_file(result):
    assert result["rows"][0]["name"] == "liteinfer-eager"
    assert [e.name for e in Book([result], no_hash).entries] == [
        "liteinfer-nocache", "liteinfer-eager", "liteinfer-native-packed"]


@pytest.mark.parametrize(("share", "eighths"), [(1.0, 64), (0.5, 32), (0.25, 16), (0.11, 7), (0.02, 1), (0.0001, 1)])
def test_a_bar_is_as_long_as_its_share(share, eighths):
    assert sum(BLOCKS.index(block) + 1 for block in bar(share)) == eighths


@pytest.mark.parametrize(("what", "shares"), [("latency", [0.11, 0.5, 1.0]), ("throughput", [2 / 18, 9 / 18, 1.0])])
def test_the_bars_of_a_table_match_its_numbers(result, what, shares):
    lines = markdown([result], (what,), no_hash).splitlines()[4:7]
    assert [line.split("|")[-2].strip() for line in lines] == [bar(share) for share in shares]


def test_a_single_round_has_no_range(result):
    for each in result["rows"]:
        each["rounds"] = each["rounds"][:1]
    assert ".." not in markdown([result], ("latency", "throughput"), no_hash)


def test_failed_different_and_skipped_rows_are_told_once(result):
    result["rows"].sort(key=lambda row: row["chapter"])
    row(result, "nocache").update(differs_from_first={"prompts": 20, "differ": 0})   # itself: nothing to say
    row(result, "eager").update(failed=[f"r{i}: NaN logits" for i in range(5)],
                                differs_from_first={"prompts": 20, "differ": 1})
    row(result, "native-packed").update(differs_from_first={"prompts": 0, "differ": 0},   # no prompt in common
                                        stopped="OutOfMemoryError: 6 GB")
    result["skipped"] = [{"name": "liteinfer-paged-triton", "width": 1, "reason": "needs CUDA"}]
    text = markdown([result], current=no_hash)
    for note in ("liteinfer-eager: 5 failed and left out of every figure: "
                 "r0: NaN logits; r1: NaN logits; r2: NaN logits; and 2 more.",
                 "The same tokens as liteinfer-nocache: liteinfer-eager in 19 of 20 prompts.",
                 "liteinfer-native-packed was stopped after 2 rounds: OutOfMemoryError: 6 GB.",
                 "liteinfer-paged-triton was not run: needs CUDA."):
        assert text.count(note) == 1
    assert text.count("The same tokens") == 1
    result["rows"] = []                                             # a run that measured nothing still says why
    assert "liteinfer-paged-triton was not run: needs CUDA." in markdown([result], current=no_hash)


def test_a_table_of_chosen_rows_tells_only_what_was_left_out_of_those(result):
    result["skipped"] = [{"name": "liteinfer-paged-triton", "width": 1, "reason": "needs CUDA"}]

    def notes(*rows: str) -> str:
        return "".join(map(to_markdown, build_tables(Book([result], no_hash), ("latency",), rows)))

    assert "paged-triton" not in notes("liteinfer-eager")
    assert "liteinfer-paged-triton was not run: needs CUDA." in notes("liteinfer-eager", "liteinfer-paged-triton")


def test_the_ceilings_name_the_linear_path(result):
    row(result, "native-packed")["linear_path"] = "oneDNN packed"
    text = markdown([result], ("ceilings",), no_hash)
    assert text.endswith("|\n\nliteinfer-native-packed: linear layers by oneDNN packed.\n")


def test_a_row_without_measurements_shows_dashes(result):
    eager = row(result, "eager")
    eager["latency"] = dict.fromkeys(eager["latency"])
    del eager["ceiling"], eager["counters"]
    text = markdown([result], ("latency", "counters", "ceilings"), no_hash)
    assert "| liteinfer-eager | - | - | - | - | - | - | - | - | - |" in text
    assert "| liteinfer-eager | - | - | - | - |\n" in text.split("**Counters")[1]


def with_blocks(result: dict) -> dict:
    """The fixture, with what a paged row in batches would have counted."""
    row(result, "native-packed")["counters"] |= {"blocks_peak": 2304, "held_slots": 3200, "tail_slots": 100,
                                                 "batch_slots": 400, "idle_slots": 90}
    row(result, "native-packed")["pool"] = "KV pool: 2,304 blocks of 16 tokens, 1,698.7 MB (as given)"
    row(result, "eager")["counters"] |= {"blocks_peak": 0, "held_slots": 0, "tail_slots": 0, "batch_slots": 400,
                                         "idle_slots": 0}
    return result


def test_what_only_some_rows_count_is_a_column_with_dashes(result):
    assert markdown([with_blocks(result)], ("counters",), no_hash) == """\
**Counters: one throughput pass, the same on every machine**

| row | forward passes | tokens computed | KV bytes copied | KV bytes held | KV blocks peak | tail waste | idle slots |
|:--|--:|--:|--:|--:|--:|--:|--:|
| liteinfer-nocache (2 prompts) | 16 | 316 | 0 B | 0 B | - | - | - |
| liteinfer-eager | 32 | 76 | 1.5 kB | 2.5 MB | - | - | 0.0% |
| liteinfer-native-packed | 32 | 76 | 0 B | 1.2 MB | 2,304 | 3.1% | 22.5% |

liteinfer-native-packed: KV pool: 2,304 blocks of 16 tokens, 1,698.7 MB (as given).
"""


def test_hits_and_preemptions_are_shown_of_rows_that_count_prompts(result):
    for name, hits, preemptions in (("eager", 0, 0), ("native-packed", 48, 3)):
        row(result, name)["counters"] |= {"prompt_tokens": 64, "prefix_hit_tokens": hits, "preemptions": preemptions}
    row(result, "nocache")["counters"] |= {"prompt_tokens": 0, "prefix_hit_tokens": 0, "preemptions": 0}
    lines = markdown([result], ("counters",), no_hash).splitlines()
    assert lines[2].endswith("| KV bytes held | prefix hits | preemptions |")
    assert [line.split(" | ")[-2:] for line in lines[4:7]] == [["-", "- |"], ["0.0%", "0 |"], ["75.0%", "3 |"]]


# Rows that draft

def drafting(result: dict) -> dict:
    """The fixture, with a packed row that drafts: its ITL is per event, its TPOT half of that."""
    for each in result["rows"]:
        for place in (each, *each["rounds"]):
            place["latency"]["tpot_p50_ms"] = place["latency"]["itl_p50_ms"]
    packed = row(result, "native-packed")
    packed["counters"] |= {"drafted_tokens": 80, "accepted_tokens": 20}
    for place in (packed, *packed["rounds"]):
        place["latency"]["tpot_p50_ms"] = place["latency"]["itl_p50_ms"] / 2
    return result


def test_a_row_that_drafts_is_compared_by_its_time_per_token(result):
    plain = measured_table(LATENCY, Book([copy.deepcopy(result)], no_hash), Book([result], no_hash).entries)
    assert "TPOT p50" not in plain.header and not any("TPOT" in note for note in plain.notes)
    book = Book([drafting(result)], no_hash)
    table = measured_table(LATENCY, book, book.entries)
    at = {heading: i for i, heading in enumerate(table.header)}
    assert table.header[1:4] == ("ITL p50", "ITL p95", "TPOT p50")
    _, eager, packed = table.rows
    assert (eager[at["vs first"]], packed[at["vs first"]]) == ("4.50x", "18.00x")   # by ITL it is 9.00x
    assert [cells[at["TPOT p50"]].split()[0] for cells in table.rows] == ["500.0", "110.0", "27.5"]
    assert [cells[at["standing"]] for cells in table.rows] == [bar(0.055), bar(0.25), bar(1)]
    assert "Two rows of which one drafts are compared by TPOT, any others by ITL; standing is by TPOT." in table.notes
    eagers = [e for e in book.entries if e.name != "liteinfer-native-packed"]
    assert "TPOT p50" not in measured_table(LATENCY, book, eagers).header


def test_the_throughput_of_rows_that_draft_shows_the_time_per_token_too(result):
    packed = row(drafting(result), "native-packed")
    packed["throughput"]["tpot_p50_ms"] = 30.0
    book = Book([result], no_hash)
    table = measured_table(THROUGHPUT, book, book.entries)
    assert table.header[4:6] == ("ITL p50 ms", "TPOT p50 ms")
    assert [cells[5] for cells in table.rows] == ["-", "-", "30.0"]
    assert [cells[-2] for cells in table.rows] == ["-"] * 3 and table.rows[2][table.header.index("vs first")] == "9.00x"
    assert not any("compared by TPOT" in note for note in table.notes)


def test_drafts_are_counted_where_there_are_any(result):
    lines = markdown([drafting(result)], ("counters",), no_hash).splitlines()
    assert lines[2].endswith("| KV bytes held | drafted | acceptance |")
    assert [line.split(" | ")[-2:] for line in lines[4:7]] == [["-", "- |"], ["-", "- |"], ["80", "25.0% |"]]


def test_the_throughput_of_a_row_of_several_widths_is_compared_at_its_own(result):
    """Its latency is one request in flight at any width; its throughput at width 1 has no base at width 32."""
    radix = copy.deepcopy(row(result, "native-packed")) | {"name": "liteinfer-radix", "width": 32, "chapter": 7}
    narrow, wide = (copy.deepcopy(row(result, "eager")) | {"name": "liteinfer-ngram", "improves_on": "liteinfer-radix",
                                                           "width": width, "chapter": 8} for width in (1, 32))
    result["rows"] += [radix, narrow, wide]
    tables = {kind.what: measured_table(kind, Book([result], no_hash), Book([result], no_hash).entries)
              for kind in (LATENCY, THROUGHPUT)}
    gains = {what: [cells[table.header.index("vs base")] for cells in table.rows if "ngram" in cells[0]]
             for what, table in tables.items()}
    assert gains == {"latency": ["0.50x", "0.50x"], "throughput": ["-", "0.50x"]}
    note = "vs base: a dash where the base was not measured at the row's width."
    assert note in tables["throughput"].notes and note not in tables["latency"].notes


def test_notes_tell_the_widths_of_a_row_apart_and_a_skipped_row_is_named_once(result):
    for width in (1, 32):
        result["rows"].append(copy.deepcopy(row(result, "native-packed")) | {
            "name": "liteinfer-ngram", "width": width, "linear_path": f"path {width}", "pool": f"pool {width}",
            "failed": ["r0: NaN"], "stopped": "gone", "differs_from_first": {"prompts": 4, "differ": width // 32}})
    result["skipped"] = [{"name": "liteinfer-speculative", "width": width, "reason": "needs a draft model"}
                         for width in (1, 32)]
    text = markdown([result], ("throughput", "counters", "ceilings"), no_hash)
    for width in (1, 32):
        name = f"liteinfer-ngram at width {width}"
        assert f"{name}: linear layers by path {width}." in text and f"{name}: pool {width}." in text
        assert f"{name}: 1 failed" in text and f"{name} was stopped after 2 rounds" in text
        assert f"{name} in {4 - width // 32} of 4 prompts" in text
    assert text.count("liteinfer-speculative was not run: needs a draft model.") == 1
    assert "liteinfer-native-packed at width" not in text


def test_a_row_s_draft_is_in_its_name(result):
    row(result, "eager")["draft"] = "Qwen/Qwen2.5-0.5B"
    assert "| liteinfer-eager (draft Qwen/Qwen2.5-0.5B) |" in markdown([result], ("latency",), no_hash)


def test_rows_of_the_same_name_say_which_file_they_are_from(result):
    text = markdown([result, {**copy.deepcopy(result), "source": "other"}], ("counters",), no_hash)
    assert "| liteinfer-eager (result) |" in text and "| liteinfer-eager (other) |" in text


@pytest.mark.parametrize(("n", "text"), [
    (None, "-"), (0, "0 B"), (999, "999 B"), (1536, "1.5 kB"), (2_500_000, "2.5 MB"),
    (3_200_000_000_000, "3,200.0 GB")])
def test_bytes_are_shown_in_a_unit_for_people(n, text):
    assert size(n) == text


def test_the_markdown_of_the_fixture(result):
    names = ("facts", "throughput", "counters", "ceilings")
    assert markdown([result], names, no_hash) == """\
toy (134.5 M parameters, float32) · ISL 16 · OSL 8 · prompts 2 latency, 4 throughput \
(fewer than the 4 and 64 of the shape quick, for want of time) · greedy, forced length · \
Toy CPU, 2 cores, 2 threads · 2026-12-01, 2 rounds · python 3.11, torch 2.13.0

**Throughput: all prompts at once**

| row | tok/s | req/s | wall s | ITL p50 ms | vs base | vs first | vs vLLM | standing |
|:--|--:|--:|--:|--:|--:|--:|--:|:--|
| liteinfer-nocache (2 prompts) | 2.0 (2.0..2.0) | 0.25 | 8.0 | 500.0 | - | 1.00x | - | ▉ |
| liteinfer-eager | 9.0 (8.0..10.0) | 1.12 | 3.6 | 110.0 | 4.50x | 4.50x | - | ████ |
| liteinfer-native-packed | 18.0 (16.0..20.0) | 2.25 | 1.8 | 55.0 | - | 9.00x | - | ████████ |

vs vLLM: not measured in this run; `make references` and `make bench REFERENCES=1` do it.

**Counters: one throughput pass, the same on every machine**

| row | forward passes | tokens computed | KV bytes copied | KV bytes held |
|:--|--:|--:|--:|--:|
| liteinfer-nocache (2 prompts) | 16 | 316 | 0 B | 0 B |
| liteinfer-eager | 32 | 76 | 1.5 kB | 2.5 MB |
| liteinfer-native-packed | 32 | 76 | 0 B | 1.2 MB |

**Ceilings: what this machine allows a decode step**

| row | bound | ceiling ms | measured ms | ceiling/measured | linear layers ms | rest ms | note |
|:--|:--|--:|--:|--:|--:|--:|:--|
| liteinfer-nocache (1 prompt) | compute | 200.0 | 500.0 | 0.40 | 450.0 | 50.0 | attention |
| liteinfer-eager | bandwidth | 30.0 | 110.0 | 0.27 | 90.0 | 20.0 | 20 ms outside the linear layers |
| liteinfer-native-packed | bandwidth | 30.0 | 55.0 | 0.55 | 45.0 | 10.0 | glue |
"""


def shown(result: dict, width: int, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, newline="\n")
    print_tables([result], Console(file=stream, width=width), no_hash)
    stream.flush()
    return raw.getvalue().decode(encoding)


def test_the_terminal_shows_the_same_figures(result):
    text = shown(result, 160)
    line = next(line for line in text.splitlines() if line.startswith("liteinfer-eager"))
    assert line.split() == ["liteinfer-eager", "110.0", "(100.0..120.0)", "220.0", "330.0", "440.0", "1,100",
                            "4.50x", "4.50x", "-", "████"]
    assert text.count("not measured in this run") == 1


def test_eighty_columns_cut_no_figure(result):
    text = shown(result, 80)
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    assert "100.0..120.0" in text and "native-packed" in text


def test_eighty_columns_cut_no_counter(result):
    text = shown(with_blocks(result), 80)
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    line = next(line for line in text.splitlines() if line.startswith("native-packed") and "2,304" in line)
    assert line.split() == ["native-packed", "32", "76", "0", "B", "1.2", "MB", "2,304", "3.1%", "22.5%"]


def test_a_reason_with_brackets_is_shown_as_it_is(result):
    row(result, "eager")["failed"] = ["[bold]index[/bold]"]
    assert ": [bold]index[/bold]." in shown(result, 160)


def test_a_terminal_without_utf8_gets_bars_it_can_show(result):
    assert "########" in shown(result, 160, "cp1252")


# Loading

@pytest.mark.parametrize(("text", "message"), [
    ("{", "not a JSON file"), ('{"schema": 2}', "result schema is 2, this version reads 1"),
    ("[]", "result schema is None"), ('{"schema": 1, "machine": {}, "rows": []}', "versions, model, workload missing"),
    (None, "no such file; `python -m benchmarks run --out "),
    ('{"schema": 1, "kind": "speed"}', "result kind is 'speed', this version reads kv_memory, widths, radix, sh"),
    ('{"schema": 1, "kind": "kv_memory", "machine": {}, "versions": {}, "model": {}}', "isl, block_size"),
    ('{"schema": 1, "kind": "widths", "machine": {}, "versions": {}, "model": {}, "isl": 1, "osl": 2, "rounds": 1, '
     '"turning_point": 1, "code_hash": "a", "rows": [{"name": "x"}]}', "rows with code_hash, linear_path, name"),
])
def test_a_file_that_is_no_result_is_named(tmp_path, text, message):
    path = tmp_path / "broken.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        load(path)
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)


def test_a_folder_is_no_result(tmp_path):
    with pytest.raises(ValueError, match=r"cannot be read"):
        load(tmp_path)


def test_an_unknown_table_is_named(result):
    with pytest.raises(ValueError, match="unknown table 'latancy'; the tables are facts, latency"):
        markdown([result], ("latancy",), no_hash)


def test_loading_keeps_what_the_file_says():
    assert {**json.loads(FIXTURE.read_text()), "source": "result"} == load(FIXTURE)
