"""Two result sets side by side: what is a regression, what is only told, and the exit code."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.compare_kinds import KINDS
from benchmarks.compare_sets import Findings, compare
from benchmarks.result_file import REQUIRED
from benchmarks.table import Table, to_markdown
from tests.results import FIXTURE, row

ROOT = Path(__file__).parents[1]
HEAD = {"schema": 1, "date": "2026-12-01", "rounds": 2, "machine": {"name": "Toy", "threads": 2},
        "versions": {"torch": "2"}, "model": {"name": "toy", "parameters": 1e6, "dtype": "float32"}, "skipped": [],
        "code_hash": "a"}
ITL = "ITL p50 ms, one request in flight"
TOK_S = "tok/s, all prompts at once"

Both = Callable[..., Findings]


@pytest.fixture
def a() -> dict:
    return json.loads(FIXTURE.read_text(encoding="utf-8"))


@pytest.fixture
def b(a: dict) -> dict:
    return copy.deepcopy(a)


@pytest.fixture
def both(tmp_path: Path) -> Both:
    """Compare two results, written to files first."""
    def compared(a: dict, b: dict, noise: float = 0.1) -> Findings:
        for name, result in (("a", a), ("b", b)):
            write(tmp_path / f"{name}.json", result)
        return compare(tmp_path / "a.json", tmp_path / "b.json", noise)
    return compared


def write(path: Path, result: dict) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result), encoding="utf-8")
    return path


def scale(result: dict, name: str, path: str, factors: list[float]) -> None:
    """Multiply a metric, in each round by its own factor and as a whole by the mean of them."""
    table, key = path.split(".")
    for one, factor in zip(row(result, name)["rounds"], factors, strict=True):
        one[table][key] *= factor
    row(result, name)[table][key] *= sum(factors) / len(factors)


def table(found: Findings, title: str) -> Table:
    return next(each for each in found.tables if each.title.endswith(title))


def cells(found: Findings, title: str, *key: str) -> tuple[str, ...]:
    """A row's cells behind its key."""
    return next(line[len(key):] for line in table(found, title).rows if line[:len(key)] == key)


# Figures of the ladder

def test_a_set_compared_with_itself_has_no_regression(a, b, both):
    found = both(a, b)
    assert found.regressions == [] and found.unlike == 0
    # 3 rows, of each 4 timed figures and 4 counts
    assert found.summary == "24 figures of 3 rows compared, 0 more shown with a ~; no regressions."
    assert [each.title for each in found.tables if each.rows] == [
        ITL, "TTFT p50 ms, one request in flight", "E2E p50 ms, one request in flight", TOK_S]
    assert cells(found, ITL, "liteinfer-eager", "1") == ("110.0 (100.0..120.0)", "110.0 (100.0..120.0)", "1.00x", "")
    assert found.tables[0].notes[0].startswith("A and B: toy")


@pytest.mark.parametrize(("path", "heading", "half"), [
    ("latency.itl_p50_ms", ITL, "0.50x"), ("latency.ttft_p50_ms", "TTFT p50 ms, one request in flight", "0.50x"),
    ("latency.e2e_p50_ms", "E2E p50 ms, one request in flight", "0.50x"), ("throughput.tok_s", TOK_S, "2.00x")])
def test_above_one_is_better_whatever_the_metric(a, b, both, path, heading, half):
    scale(b, "eager", path, [2, 2])
    back = "2.00x" if half == "0.50x" else "0.50x"
    assert cells(both(a, b), heading, "liteinfer-eager", "1")[2] == half
    assert cells(both(b, a), heading, "liteinfer-eager", "1")[2] == back
    worse = both(a, b) if half == "0.50x" else both(b, a)
    better = both(b, a) if half == "0.50x" else both(a, b)
    assert len(worse.regressions) == 1 and worse.regressions[0].startswith(f"liteinfer-eager, width 1: {heading}: ")
    assert cells(worse, heading, "liteinfer-eager", "1")[3] == "regression" and better.regressions == []


def test_worse_by_no_more_than_the_noise_is_no_regression(a, b, both):
    for result in (a, b):
        for each in result["rows"]:
            each["rounds"] = each["rounds"][:1]   # one round: only the noise decides
    row(b, "eager")["latency"]["itl_p50_ms"] = 1.09 * 110
    assert both(a, b).regressions == []
    assert len(both(a, b, noise=0.05).regressions) == 1
    row(b, "eager")["latency"]["itl_p50_ms"] = 1.11 * 110
    found = both(a, b)
    assert found.regressions == [f"liteinfer-eager, width 1: {ITL}: 110.0 in A, 122.1 in B, 0.90x."]
    assert "A is more than 10 % better" in found.tables[-1].notes[0]
    assert both(a, b, noise=0.2).regressions == []


def test_rounds_that_overlap_are_no_regression(a, b, both):
    """A's rounds take 100 and 120 ms. B's best of 119 is better than A's worst, however bad the other is."""
    scale(b, "eager", "latency.itl_p50_ms", [1.19, 3])
    found = both(a, b)
    assert cells(found, ITL, "liteinfer-eager", "1")[2:] == ("0.48x", "worse, but the rounds overlap")
    assert found.regressions == []
    scale(b, "eager", "latency.itl_p50_ms", [1.02, 1])   # 121.4
    assert len(both(a, b).regressions) == 1
    scale(b, "eager", "throughput.tok_s", [0.81, 0.1])   # A's rounds: 10 and 8; B's 8.1 and 0.8
    assert len(both(a, b).regressions) == 1
    scale(b, "eager", "throughput.tok_s", [0.97, 1])     # 7.9
    assert len(both(a, b).regressions) == 2


def test_one_round_on_a_side_leaves_the_noise_alone_to_decide(a, b, both):
    scale(b, "eager", "latency.itl_p50_ms", [1.19, 3])
    del row(b, "eager")["rounds"][1]
    assert len(both(a, b).regressions) == 1


def test_a_row_that_drafts_is_compared_by_its_time_per_token(a, b, both):
    row(b, "eager")["counters"]["drafted_tokens"] = 8   # in one of them is enough
    for each in row(b, "eager")["rounds"]:
        each["latency"]["tpot_p50_ms"] = each["latency"]["itl_p50_ms"]
    scale(b, "eager", "latency.itl_p50_ms", [9, 9])
    scale(b, "eager", "latency.tpot_p50_ms", [0.5, 0.5])
    found = both(a, b)
    assert cells(found, "TPOT p50 ms, one request in flight", "liteinfer-eager", "1")[2] == "2.00x"
    assert "liteinfer-eager" not in [line[0] for line in table(found, ITL).rows] and found.regressions == []
    assert [line[0] for line in table(found, "TPOT p50 ms, one request in flight").rows] == ["liteinfer-eager"]


def test_the_same_row_at_another_width_is_another_row(a, b, both):
    row(b, "eager")["width"] = 4
    found = both(a, b)
    assert {"Only in A: liteinfer-eager, width 1.", "Only in B: liteinfer-eager, width 4."} <= {*found.told}
    assert found.rows == 2 and found.regressions == []
    del row(b, "eager")["width"]   # means 1
    assert both(a, b).rows == 3


# What was not measured alike

def different(result: dict, how: str) -> None:
    match how:
        case "machines":
            result["machine"]["threads"] = 1
        case "models":
            result["model"]["dtype"] = "bfloat16"
        case "shapes":
            result["workload"]["osl"] = 9
        case "arrivals":
            result["workload"]["rate"] = 2.0
        case "prompts":
            row(result, "eager")["prompts"]["hashes"][0] = "other"
        case "fewer prompts":
            row(result, "eager")["prompts"] |= {"throughput": 3, "hashes": ["p1", "p2", "p3"]}
        case "draft":
            row(result, "eager")["draft"] = "another"


@pytest.mark.parametrize(("how", "reason", "whose"), [
    ("machines", "different machines", "every row"), ("models", "different models", "every row"),
    ("shapes", "different shapes", "every row"), ("arrivals", "different arrivals", "every row"),
    ("prompts", "different prompts", "liteinfer-eager, width 1"),
    ("fewer prompts", "different prompts", "liteinfer-eager, width 1"),
    ("draft", "different draft", "liteinfer-eager, width 1")])
def test_what_was_not_measured_alike_has_a_mark_and_is_no_regression(a, b, both, how, reason, whose):
    scale(b, "eager", "latency.itl_p50_ms", [2, 2])
    row(b, "eager")["failed"] = ["r0: NaN"]
    assert len(both(a, b).regressions) == 2
    different(b, how)
    found = both(a, b)
    assert cells(found, ITL, "liteinfer-eager", "1")[2:] == ("~0.50x", "") and found.regressions == []
    assert f"~ not measured alike ({reason}), so no regression: {whose}." in found.told
    assert "liteinfer-eager, width 1: 1 failed in B, 0 in A: r0: NaN." in found.told
    assert found.unlike == (12 if whose == "every row" else 4)


def test_other_versions_and_other_code_are_the_point_and_no_reason_for_doubt(a, b, both):
    b["versions"]["torch"] = "2.14.0"
    row(b, "eager")["code_hash"] = "bbbb"
    scale(b, "eager", "latency.itl_p50_ms", [2, 2])
    found = both(a, b)
    assert len(found.regressions) == 1 and found.unlike == 0
    assert "Other versions: torch 2.13.0 in A, 2.14.0 in B." in found.told


# Counts

@pytest.mark.parametrize("name", ["forward_passes", "tokens_computed"])
def test_work_that_grew_by_one_is_a_regression_on_any_machine(a, b, both, name):
    row(b, "eager")["counters"][name] += 1
    b["machine"]["name"] = "Another"
    found = both(a, b)
    before = row(a, "eager")["counters"][name]
    words = name.replace("_", " ")
    assert found.regressions == [f"liteinfer-eager, width 1: {words}: {before} in A, {before + 1} in B."]
    assert cells(found, "counts that changed", "liteinfer-eager", "1") == (
        words, str(before), str(before + 1), "regression")
    back = both(b, a)
    assert back.regressions == [] and cells(back, "counts that changed", "liteinfer-eager", "1")[3] == ""


def test_any_other_count_that_changed_is_only_listed(a, b, both):
    row(b, "eager")["counters"]["kv_bytes_copied"] = 10_000
    found = both(a, b)
    assert found.regressions == []
    assert [line for line in table(found, "counts that changed").rows] == [
        ("liteinfer-eager", "1", "kv bytes copied", "1,536", "10,000", "")]
    assert "No count changed, of 12 compared." in both(a, a).told


@pytest.mark.parametrize("how", ["models", "shapes", "arrivals", "prompts", "fewer prompts", "draft"])
def test_counts_of_other_work_are_not_compared(a, b, both, how):
    row(b, "eager")["counters"]["forward_passes"] += 1
    different(b, how)
    assert both(a, b).regressions == []


def test_counts_of_requests_that_arrived_by_the_clock_are_not_compared(a, b, both):
    for result in (a, b):
        result["workload"]["rate"] = 2.0
    row(b, "eager")["counters"]["forward_passes"] += 1
    found = both(a, b)
    assert found.regressions == [] and found.unlike == 0 and found.figures == 12


# Rows that are missing or broken

def test_a_row_that_b_could_not_run_is_a_regression(a, b, both):
    b["rows"].remove(row(b, "eager"))
    assert "Only in A: liteinfer-eager, width 1." in both(a, b).told and both(a, b).regressions == []
    b["skipped"] = [{"name": "liteinfer-eager", "width": 4, "reason": "needs CUDA"}]   # another width
    assert both(a, b).regressions == []
    b["skipped"][0]["width"] = 1
    found = both(a, b)
    assert found.regressions == ["liteinfer-eager, width 1: has figures in A, was not run in B: needs CUDA."]
    assert not any(line.startswith("Only in") for line in found.told)
    b["machine"]["name"] = "Another"
    found = both(a, b)
    assert found.regressions == []
    assert "liteinfer-eager, width 1: has figures in A, was not run in B: needs CUDA." in found.told


def test_a_row_that_was_stopped_in_b_is_a_regression(a, b, both):
    row(b, "eager")["stopped"] = "OutOfMemoryError: 6 GB"
    assert both(a, b).regressions == ["liteinfer-eager, width 1: stopped in B: OutOfMemoryError: 6 GB."]
    row(a, "eager")["stopped"] = "OutOfMemoryError: 5 GB"
    assert both(a, b).regressions == []


def test_more_failed_requests_than_before_are_a_regression(a, b, both):
    row(a, "eager")["failed"] = ["r1: NaN"]
    row(b, "eager")["failed"] = ["r1: NaN"]
    assert both(a, b).regressions == []
    row(b, "eager")["failed"] = ["r0: NaN", "r1: NaN"]
    assert both(a, b).regressions == ["liteinfer-eager, width 1: 2 failed in B, 1 in A: r0: NaN."]


def test_a_figure_that_is_gone_is_a_regression_once(a, b, both):
    row(b, "eager")["throughput"]["tok_s"] = None
    assert both(a, b).regressions == [f"liteinfer-eager, width 1: {TOK_S}: 9.0 (8.0..10.0) in A, nothing in B."]
    row(b, "eager")["stopped"] = "OutOfMemoryError: 6 GB"
    assert both(a, b).regressions == ["liteinfer-eager, width 1: stopped in B: OutOfMemoryError: 6 GB."]
    assert both(b, a).regressions == []


# Other kinds

def of(kind: str, **more: object) -> dict:
    return {**copy.deepcopy(HEAD), "kind": kind, **dict.fromkeys(REQUIRED.get(kind, ()), 1), **HEAD, **more}


OTHERS: dict[str, tuple[dict, dict, str, list[str]]] = {   # a result, what changes in its row, and what that is
    "widths": (of("widths", rows=[{"name": "liteinfer-x", "linear_path": "plain", "code_hash": "a", "widths": [
        {"width": 1, "itl_p50_ms": 10.0}, {"width": 2, "itl_p50_ms": 20.0, "rounds": [{"itl_ms": 19}, {"itl_ms": 21}]},
    ]}]), {"widths": [{"width": 1, "itl_p50_ms": 5.0}, {"width": 2, "itl_p50_ms": 40.0, "rounds": [
        {"itl_ms": 39.0}, {"itl_ms": 41.0}]}]},
        "", ["liteinfer-x, width 2: ITL p50 ms: 20.0 (19.0..21.0) in A, 40.0 (39.0..41.0) in B, 0.50x."]),
    "radix": (of("radix", rows=[
        {"name": "liteinfer-x", "prefix": 1024, "cold_ms": 90.0, "cached_ms": 10.0, "speedup": 9, "cold_tokens": 1032,
         "cached_tokens": 8, "code_hash": "a"}]),
              {"cold_ms": 45.0, "cached_ms": 20.0, "cached_tokens": 9}, "question",
              ["liteinfer-x, prefix 1,024: TTFT ms, prefix cached: 10.0 in A, 20.0 in B, 0.50x.",
               "liteinfer-x, prefix 1,024: cached tokens: 8 in A, 9 in B."]),
    "sharing": (of("sharing", workloads=[{"name": "multiturn", "what": "", "prompt_hash": "p"}], rows=[
        {"name": "liteinfer-x", "workload": "multiturn", "hit_rate": 0.5, "ttft_p50_ms": 1.0, "wall_s": 2.0,
         "tokens_computed": 5, "code_hash": "a"}]), {"wall_s": 4.0, "tokens_computed": 4}, "",
        ["multiturn, liteinfer-x: wall s: 2.00 in A, 4.00 in B, 0.50x."]),
    "overhead": (of("overhead", rows=[{"name": "liteinfer-x", "step_us": 1000.0, "kv_us": 1.0, "code_hash": "a"}]),
                 {"step_us": 2000.0}, "sequences", ["liteinfer-x: step µs: 1,000 in A, 2,000 in B, 0.50x."]),
    "speculative": (of("speculative", rows=[
        {"name": "liteinfer-x", "prompts_kind": "code", "draft": "ngram", "pause": {"cost": 0.1}, "k": 2, "width": 1,
         "prompts": 3, "tok_s": 30.0, "speedup": 1.5, "code_hash": "a"}]), {"tok_s": 60.0, "speedup": 0.75},
        "prompt_hash", ["code, ngram (pause), K 2, width 1: speed-up over the same engine without drafts: "
                        "1.50 in A, 0.75 in B, 0.50x."]),
    "heads": (of("heads", rows=[{"name": "small", "parameters": 10, "acceptance": {}, "guess_ms": 2.0, "cost": 0.1}]),
              {"guess_ms": 4.0}, "k", ["small: ms of a guess: 2.00 in A, 4.00 in B, 0.50x."]),
    "pieces": (of("pieces", rows=[{"name": "liteinfer-fast", "without": ["linear"], "width": 4, "itl_p50_ms": 50.0,
                                   "prefill_ms": 90.0, "code_hash": "a"}]), {"itl_p50_ms": 100.0}, "isl",
               ["without our linear layers, width 4: ITL p50 ms: 50.0 in A, 100.0 in B, 0.50x."]),
    "profile": (of("profile", rows=[{"name": "liteinfer-x", "width": 4, "step_ms": 50.0, "profiled_ms": 52.0,
                                     "parts_ms": {}, "ceilings_ms": {}, "code_hash": "a"}]),
                {"step_ms": 100.0}, "isl", ["liteinfer-x, width 4: step ms: 50.0 in A, 100.0 in B, 0.50x."]),
    "shapes": (of("shapes", rows=[{"name": "liteinfer-x", "isl": 1024, "osl": 64, "ttft_ms": 90.0, "tpot_ms": 10.0,
                                   "e2e_ms": 720.0, "prompt_hash": "p", "code_hash": "a"}]),
               {"ttft_ms": 180.0, "tpot_ms": 5.0}, "prompts",
               ["liteinfer-x, ISL 1,024, OSL 64: TTFT ms: 90.0 in A, 180.0 in B, 0.50x."]),
    "kv_memory": (of("kv_memory", waste={"shape": "ragged", "by_block_size": []}, rows=[
        {"output": 48, "contiguous_bytes": 900, "paged_bytes": 100}]), {"paged_bytes": 101, "contiguous_bytes": 899},
        "block_size", ["output tokens 48: paged bytes: 100 in A, 101 in B."]),
}


def changed(result: dict, change: dict) -> dict:
    result = copy.deepcopy(result)
    result["rows"][0] |= change
    return result


def of_memory(result: dict) -> dict:
    """A kv_memory result has its rows under another name."""
    return result | {"lengths": result.pop("rows")} if result["kind"] == "kv_memory" else result


@pytest.mark.parametrize("kind", OTHERS)
def test_the_figures_of_every_kind(both, kind):
    result, change, setting, regressions = OTHERS[kind]
    a, b = of_memory(copy.deepcopy(result)), of_memory(changed(result, change))
    assert both(a, b).regressions == regressions
    assert both(a, a).regressions == []
    if setting:
        found = both(a, {**b, setting: 2})
        words = "prompts" if "prompt" in setting else setting.replace("_", " ")
        assert found.regressions == [] and found.told[0].startswith(f"~ not measured alike (different {words})")


def test_a_row_of_several_keys_that_was_not_run_is_found_by_its_name(both):
    figures = {"cold_ms": 90.0, "cached_ms": 10.0, "speedup": 9, "code_hash": "a"}
    a = of("radix", rows=[{"name": "liteinfer-x", "prefix": prefix, **figures} for prefix in (256, 1024)])
    b = changed(a, {"cached_ms": 20.0})
    assert both(a, b).regressions == [
        "liteinfer-x, prefix 256: TTFT ms, prefix cached: 10.0 in A, 20.0 in B, 0.50x."]
    c = copy.deepcopy(a)
    del c["rows"][1]
    assert both(a, c).regressions == []
    c["skipped"] = [{"name": "liteinfer-x, prefix 1,024", "reason": "gone"}]
    assert both(a, c).regressions == ["liteinfer-x, prefix 1,024: has figures in A, was not run in B: gone."]


def test_prompts_of_another_hash_are_not_measured_alike(both):
    result, change, _, _ = OTHERS["sharing"]
    b = changed(result, change)
    b["workloads"][0]["prompt_hash"] = "q"
    assert both(result, b).regressions == [] and both(result, b).unlike == 1


def test_every_kind_of_result_can_be_compared():
    assert REQUIRED.keys() == KINDS.keys()


def test_the_stored_results_compare_with_themselves():
    found = compare(ROOT / "benchmarks" / "results", ROOT / "benchmarks" / "results")
    assert found.regressions == [] and found.unlike == 0 and not any("Only in" in line for line in found.told)
    assert {each.title.split(":")[0] for each in found.tables if each.rows} == {
        path.stem for path in (ROOT / "benchmarks" / "results").glob("*.json")} - {"memory"}   # counts, none changed
    for each in found.tables:
        to_markdown(each)
        assert all(len(line) == len(each.header) for line in each.rows)


# Files, folders and the exit code

def test_folders_are_matched_by_file_name(tmp_path, a, b):
    scale(b, "eager", "latency.itl_p50_ms", [2, 2])
    for path, result in (("a/one.json", a), ("a/two.json", a), ("b/two.json", b), ("b/three.json", b)):
        write(tmp_path / path, result)
    found = compare(tmp_path / "a", tmp_path / "b")
    assert [line.split(" 1: ")[0] for line in found.regressions] == ["two: liteinfer-eager, width"]
    assert table(found, ITL).title == f"two: {ITL}" and found.rows == 3
    assert found.told[:2] == ["Only in A: one.json.", "Only in B: three.json."]
    assert compare(tmp_path / "a" / "two.json", tmp_path / "b").regressions == found.regressions
    assert len(compare(tmp_path / "a" / "one.json", tmp_path / "b" / "two.json").regressions) == 1


@pytest.fixture
def command() -> Callable[..., int]:
    """`python -m benchmarks compare`, as main runs it: the exit code."""
    def run(*arguments: object) -> int:
        with pytest.raises(SystemExit) as end:
            main(["compare", *map(str, arguments)])
        return int(end.value.code or 0)

    return run


def test_the_exit_code_tells_a_regression(tmp_path, a, b, command, capsys):
    scale(b, "eager", "latency.itl_p50_ms", [2, 2])
    first, second = write(tmp_path / "a.json", a), write(tmp_path / "b.json", b)
    assert command(first, second) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "24 figures of 3 rows compared, 0 more shown with a ~; 1 regression."
    assert command(second, first) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("no regressions.")
    assert command(first, second, "--noise", "0.99") == 1   # 2.00 is still more than 1.99
    assert command(first, first, "--noise", "0") == 0


@pytest.mark.parametrize(("arguments", "message"), [
    (("a.json", "a.json", "--noise", "-0.1"), "noise must be a share from 0 to below 1, such as 0.1, got -0.1"),
    (("a.json", "a.json", "--noise", "10"), "got 10.0"), (("a.json", "a.json", "--noise", "nan"), "got nan"),
    (("a.json", "none.json"), "none.json: no such file"), (("a.json", "empty"), "empty: no result file in this folder"),
    (("a.json", "folder"), "no file name in common: a.json against heads.json"),
    (("a.json", "folder/heads.json"), "A holds rows of the ladder, B heads; only results of one kind"),
    (("a.json", "other.json"), "have no row in common"),
])
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, monkeypatch, a, command, capsys, arguments, message):
    (tmp_path / "empty").mkdir()
    write(tmp_path / "a.json", a)
    write(tmp_path / "folder" / "heads.json", OTHERS["heads"][0])
    for each in a["rows"]:
        each["width"] = 4
    write(tmp_path / "other.json", a)
    monkeypatch.chdir(tmp_path)
    assert command(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
