"""The published figures: consistent among themselves, labelled as theirs, and beside ours as they were measured."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from benchmarks import radix
from benchmarks.compare import Book
from benchmarks.published_tables import published
from benchmarks.report import build_tables
from benchmarks.result_file import load
from benchmarks.table import DASH, Table, to_markdown
from liteinfer.lineage import LADDER
from tests.results import no_hash, row

STORED = Path(__file__).parents[1] / "benchmarks" / "results"
NAMES = {"published_latency": "course", "published_throughput": "course", "published_memory": "memory",
         "published_radix": "radix", "published_speculative": "speculative"}   # and a result with ours


def build(name: str, *results: dict, rows: list[str] | None = None) -> Table:
    return next(build_tables(Book(results, no_hash), (name,), rows))


def cells(table: Table, first: str) -> dict[str, str]:
    """A row's cells by heading; `first` is how its first cell begins."""
    line = next(line for line in table.rows if line[0].split(" ")[0] == first)
    return dict(zip(table.header, line, strict=True))


def rounds_to(quotient: tuple[float, float], ratio: float, digits: tuple[int, int], ratio_digits: int) -> bool:
    """Whether two rounded figures can have this rounded ratio: what each may have been before allows it."""
    (top, bottom), halves = quotient, [0.5 * 10.0**-digit for digit in digits]
    slack = 0.5 * 10.0**-ratio_digits + 1e-9
    least, most = (top - halves[0]) / (bottom + halves[1]), (top + halves[0]) / (bottom - halves[1])
    return least - slack <= ratio <= most + slack


# Their figures among themselves

def test_their_ratios_follow_from_their_figures():
    page = published()["liteinfer"]
    rows, ratios = {row["name"]: row for row in page["rows"]}, page["ratios"]
    mine = rows[ratios["row"]]
    for key, other in (("vs_base", ratios["base"]), ("vs_first", page["rows"][0]["name"]),
                       ("vs_vllm", mine["reference"])):
        assert rounds_to((mine["tok_s"], rows[other]["tok_s"]), ratios[key], (1, 1), 2), key
    assert not rounds_to((mine["tok_s"], rows["liteinfer-eager"]["tok_s"]), ratios["vs_first"], (1, 1), 2)


def test_their_rows_agree_with_the_shape_they_were_measured_with():
    """A request takes the time to its first token and a gap for each other; tokens over their length are requests."""
    page = published()["liteinfer"]
    for one in page["rows"]:
        assert one["e2e_p50_ms"] == pytest.approx(one["ttft_p50_ms"] + (page["osl"] - 1) * one["itl_p50_ms"], rel=0.01)
        assert one["req_s"] == pytest.approx(one["tok_s"] / page["osl"], abs=0.051)


def test_their_rows_are_rows_of_the_ladder_or_references_of_some():
    names, references = {row.name for row in LADDER}, {row.reference for row in LADDER}
    for one in published()["liteinfer"]["rows"]:
        assert one["name"] in (references if one["reference"] is None else names)
        assert one["reference"] in (None, next((r.reference for r in LADDER if r.name == one["name"]), None))


def test_their_memory_follows_from_blocks():
    memory = published()["mini_infer"]["kv_memory"]
    assert memory["max_model_len"] % memory["block_size"] == 0
    for line in memory["lengths"]:
        blocks = -(-line["output"] // memory["block_size"])
        share = blocks * memory["block_size"] / memory["max_model_len"]
        assert line["paged_mb"] == pytest.approx(share * memory["contiguous_mb"])
        assert line["saved"] == pytest.approx(1 - share, abs=0.001)   # 97.66 % is given as 97.6


def test_their_speedups_follow_from_their_times_and_rates():
    for line in published()["mini_infer"]["radix"]["prefixes"]:
        assert rounds_to((line["standard_ms"], line["cached_ms"]), line["speedup"], (1, 1), 1)
    for line in published()["mini_infer"]["speculative"]["kinds"]:
        assert rounds_to((line["tok_s"], line["baseline_tok_s"]), line["speedup"], (1, 1), 2)


def test_the_radix_table_s_own_published_figures_are_these():
    lines = published()["mini_infer"]["radix"]["prefixes"]
    assert {line["prefix"]: (line["standard_ms"], line["cached_ms"]) for line in lines} == radix.PUBLISHED
    for line in lines:
        mine = radix.published(line["prefix"])
        assert mine is not None and mine["speedup"] == line["speedup"]


# The tables

@pytest.mark.parametrize("name", NAMES)
def test_every_table_says_whose_figures_are_theirs_and_what_can_be_compared(name):
    stored = load(STORED / f"{NAMES[name]}.json")
    table = build(name, stored)
    source = published()["liteinfer" if NAMES[name] == "course" else "mini_infer"]
    note = table.notes[0]
    assert "(theirs) beside ours" in table.title
    for part in (f"Theirs: {source['source']}", f"on {source['machine']}", "not measured again here",
                 f"Ours: {stored['model']['name']} ({stored['model']['dtype']}) on {stored['machine']['name']}.",
                 "Ratios within a column can be compared", "across the two columns cannot"):
        assert part in note
    theirs = {heading.removesuffix(" theirs") for heading in table.header if heading.endswith(" theirs")}
    assert theirs and theirs == {heading.removesuffix(" ours") for heading in table.header if heading.endswith(" ours")}
    assert all(len(line) == len(table.header) for line in table.rows) and to_markdown(table)


@pytest.mark.parametrize("name", NAMES)
def test_a_result_that_is_not_there_raises_the_usual_error(name, result):
    wrong = load(STORED / "overhead.json") if NAMES[name] == "course" else result
    kind = {"memory": "kv_memory"}.get(NAMES[name], NAMES[name])
    message = ("shows rows of the ladder, and none" if kind == "course" else
               f"none of these results is of the kind '{kind}'")
    with pytest.raises(ValueError, match=message):
        build(name, wrong)


def test_the_rows_of_both_sides_stand_in_ladder_order(result):
    table = build("published_latency", result)
    names = [line[0].split(" ")[0] for line in table.rows]
    assert names[:4] == ["liteinfer-nocache", "liteinfer-eager", "liteinfer-native-eager", "liteinfer-native-packed"]
    assert names[-3:] == ["vllm", "vllm-b4", "vllm-continuous"] and len(names) == len(set(names)) == 12
    eager, theirs_only, ours_only = (cells(table, name) for name in names[1:4])
    assert (eager["ITL p50 ms theirs"], eager["ITL p50 ms ours"]) == ("13.7", "110.0")
    assert (eager["TTFT p50 ms ours"], eager["E2E p50 ms ours"]) == ("330.0", "1,100")
    assert (eager["vs first theirs"], eager["vs first ours"]) == ("1.20x", "4.50x")   # 16.5 / 13.7; by rounds
    assert (eager["vs vLLM theirs"], eager["vs vLLM ours"]) == ("0.38x", DASH)
    assert {theirs_only[heading] for heading in table.header if heading.endswith("ours")} == {DASH}
    assert {ours_only[heading] for heading in table.header if heading.endswith("theirs")} == {DASH}


def test_ours_are_taken_from_the_result_and_compared_with_our_reference(result):
    reference = copy.deepcopy(row(result, "native-packed")) | {"name": "vllm", "chapter": None, "reference": None,
                                                               "improves_on": None}
    result["rows"].append(reference)
    throughput = build("published_throughput", result)
    eager, vllm = cells(throughput, "liteinfer-eager"), cells(throughput, "vllm")
    assert (eager["tok/s theirs"], eager["tok/s ours"], eager["req/s theirs"], eager["req/s ours"]) == (
        "73.4", "9.0", "0.3", "1.12")
    assert (eager["vs vLLM theirs"], eager["vs vLLM ours"]) == ("0.39x", "0.50x")
    assert (vllm["tok/s theirs"], vllm["tok/s ours"], vllm["vs first theirs"], vllm["vs first ours"]) == (
        "188.4", "18.0", "3.11x", "9.00x")
    for place in (row(result, "eager"), *row(result, "eager")["rounds"]):
        place["throughput"]["tok_s"] *= 2
    eager = cells(build("published_throughput", result), "liteinfer-eager")
    assert (eager["tok/s ours"], eager["vs vLLM ours"], eager["vs first ours"]) == ("18.0", "1.00x", "9.00x")


def test_a_ratio_of_ours_that_was_not_measured_alike_has_its_mark(result):
    other = copy.deepcopy(result)
    other["rows"] = [copy.deepcopy(row(result, "eager")) | {"name": "vllm", "reference": None, "improves_on": None}]
    other["machine"]["threads"] = 1
    table = build("published_latency", result, other)
    assert cells(table, "liteinfer-native-packed")["vs vLLM ours"] == "~2.00x"
    assert any(note.startswith("~ not measured alike (separate runs, different machines): ") and
               "liteinfer-native-packed / vllm" in note for note in table.notes)


def test_a_row_that_drafts_is_compared_by_its_time_per_token(result):
    packed = row(result, "native-packed")
    packed["counters"]["drafted_tokens"] = 8
    for place in (packed, *packed["rounds"]):
        place["latency"]["tpot_p50_ms"] = place["latency"]["itl_p50_ms"] / 2
    table = build("published_latency", result)
    assert cells(table, "liteinfer-native-packed")["vs first ours"] == "18.00x"   # by ITL 9.00x
    assert "vs first and vs vLLM of a row that drafts: by TPOT." in table.notes
    assert not any("TPOT" in note for note in build("published_throughput", result).notes)


def test_chosen_rows_leave_the_others_of_both_sides_out(result):
    table = build("published_latency", result, rows=["liteinfer-eager", "vllm"])
    assert [line[0] for line in table.rows] == ["liteinfer-eager", "vllm"]


def test_the_memory_table_computes_what_a_token_takes():
    stored = load(STORED / "memory.json")
    table = build("published_memory", stored)
    assert cells(table, "256") == {
        "output tokens": "256", "contiguous theirs": "1,280 MB", "contiguous ours": "94.4 MB", "paged theirs": "160 MB",
        "paged ours": "11.8 MB", "saved theirs": "87.5%", "saved ours": "87.5%", "streams theirs": "18",
        "streams ours": "91"}
    text = " ".join(table.notes)
    for part in ("1,280 MB for 2,048 tokens is 640 KB a token", "Qwen2.5-0.5B 12 KB (2 x 24 layers x 2 kv heads x 64 x "
                 "2 bytes, bfloat16)", "Qwen2.5-1.5B 28 KB", "45 KB a token in float32", "come to 1,260, 2,880, 3,840"):
        assert part in text
    stored["model"]["kv_bytes_per_token"] *= 2
    stored["lengths"] = [stored["lengths"][1] | {"output": 512, "paged_bytes": 2_000_000}]
    table = build("published_memory", stored)
    assert "90 KB a token" in " ".join(table.notes)
    assert cells(table, "256")["paged ours"] == cells(table, "512")["paged theirs"] == DASH
    assert cells(table, "512")["paged ours"] == "2.0 MB"


def test_the_radix_table_lines_prefixes_up():
    stored = load(STORED / "radix.json")
    stored["rows"] = [stored["rows"][0] | {"cold_ms": 80.0, "cached_ms": 10.0, "speedup": 8.04},
                      stored["rows"][1] | {"prefix": 64}]
    table = build("published_radix", stored)
    assert [line[0] for line in table.rows] == ["64", "256", "512", "1,024", "2,048"]
    assert table.rows[1] == ("256", "48.2", "80.0", "6.1", "10.0", "7.9x", "8.0x")
    assert table.rows[0][1::2] == (DASH,) * 3 and table.rows[2][2::2] == (DASH,) * 3
    stored["rows"][1] |= {"name": "liteinfer-other", "prefix": 256}
    table = build("published_radix", stored)
    assert table.header[0] == "row"
    assert [line[0] for line in table.rows[:2]] == ["liteinfer-radix", "liteinfer-other"] and table.rows[2][0] == DASH


def test_the_speculative_table_shows_the_draft_of_our_row_at_width_1():
    stored = load(STORED / "speculative.json")
    ours = {row["prompts_kind"]: row for row in stored["rows"]
            if row["draft"] == "ngram+draft-head" and row["width"] == 1}
    table = build("published_speculative", stored)
    assert [line[0] for line in table.rows] == ["code", "json", "conversation"]
    for kind, one in ours.items():
        line = cells(table, kind)
        assert (line["tok/s ours"], line["speed-up ours"]) == (f"{one['tok_s']:,.1f}", f"{one['speedup']:,.2f}x")
        assert line["acceptance ours"] == f"{one['accepted_tokens'] / one['drafted_tokens']:.1%}"
    assert (cells(table, "code")["acceptance theirs"], cells(table, "code")["speed-up theirs"]) == ("84.2%", "2.21x")
    assert any("width 1 (ngram+draft-head, K = 4)" in note for note in table.notes)
    stored["rows"] = [one for one in stored["rows"] if one["draft"] != "ngram+draft-head"]   # a model of one's own
    for one in stored["rows"]:
        if one["draft"] == "draft-head":
            one["draft"] = "a-model"
    table = build("published_speculative", stored)
    assert any("early-exit:15, K = 4, a-model, K = 4" in note for note in table.notes) and len(table.rows) == 6


def test_the_file_is_plain_data_with_a_source_and_a_machine_for_each_project():
    assert json.loads(json.dumps(published())) == published()
    for project in published().values():
        assert project["source"] and project["machine"]
