"""References: a process that answers, dies, hangs or fails, and what each costs a run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import entries
from benchmarks.codehash import row_hash
from benchmarks.compare import Book
from benchmarks.references.__main__ import needed
from benchmarks.references.bench import WithReferences, adapter_settings
from benchmarks.references.process import Process, ProcessFailed
from benchmarks.report import build_tables
from benchmarks.run import Entry
from benchmarks.workloads import Shape
from liteinfer import lineage
from liteinfer.loading import tiny_model
from liteinfer.request import Request, SamplingParams

ROOT = Path(__file__).parent.parent
ENGINE = "tests.fake_reference:Engine"
SETTINGS = {"model": "counts", "dtype": "float64", "device": "cpu", "max_num_seqs": 1, "max_model_len": 64,
            "enforce_eager": True}
SHAPE = Shape("tiny", 4, (3, 3), 1, {1: 2})
MACHINE = {"name": "test", "threads": 1, "bandwidth_gb_s": 1e6, "peak_gflop_s": 1e9}
FAKE = lineage.Row("vllm", 0, ENGINE, "a fake", environment="here")


class Silent:
    def __init__(self) -> None:
        self.reasons: list[str] = []

    def passed(self, *_: object) -> None: ...

    def stopped(self, name: str, width: int, reason: str) -> None:
        self.reasons.append(f"{name} {reason}")


def process(tmp_path: Path, model: str = "counts", patience: float = 60.0) -> Process:
    return Process(Path(sys.executable), ENGINE, SETTINGS | {"model": model}, {}, tmp_path / "log", patience)


def requests(*names: str) -> list[Request]:
    return [Request(name, [1, 2, 3], SamplingParams(max_tokens=4)) for name in names]


def test_a_pass_over_there_returns_the_traces_of_the_one_loop(tmp_path: Path) -> None:
    running = process(tmp_path)
    try:
        first, second = running.drive(requests("a", "b"), max_in_flight=1)
        again = running.drive(requests("a"))[0]
    finally:
        running.close()
    assert running.versions == {"fake": "1.0"}
    assert first.token_ids == second.token_ids == again.token_ids == [4, 5, 6, 7]
    assert [tokens for _, tokens in first.events] == [1, 1, 1, 1] and first.finish_reason == "length"
    assert first.added_at <= first.events[0][0] <= first.events[-1][0] <= second.added_at
    assert (tmp_path / "log").read_text() == "a library prints what it likes\n"


@pytest.mark.parametrize(("fault", "reason"), [
    ("dies", "ended with exit status 9; the last line of .*: out of memory"), ("hangs", "no sign of life for 2 s"),
    ("raises", "ValueError: a fault of its own")])
def test_a_process_that_cannot_go_on_says_why(tmp_path: Path, fault: str, reason: str) -> None:
    running = process(tmp_path, fault, patience=2.0 if fault == "hangs" else 60.0)
    try:
        with pytest.raises(ProcessFailed, match=reason):
            running.drive(requests("latency-0"))
    finally:
        running.close()
    assert running.process.poll() is not None


def test_an_engine_that_cannot_be_built_and_a_python_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ProcessFailed, match="FileNotFoundError: no such model"):
        process(tmp_path, "absent")
    with pytest.raises(ProcessFailed, match="nowhere/python cannot be started"):
        Process(tmp_path / "nowhere" / "python", ENGINE, SETTINGS, {}, tmp_path / "log")


def test_a_killed_parent_leaves_no_process_behind(tmp_path: Path) -> None:
    script = (f"import sys, time; from pathlib import Path; from benchmarks.references.process import Process\n"
              f"p = Process(Path(sys.executable), {ENGINE!r}, {SETTINGS!r}, {{}}, Path({str(tmp_path / 'log')!r}))\n"
              "print(p.process.pid, flush=True); time.sleep(1000)")
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until = time.monotonic() + 30
    while alive(child):
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            pytest.fail("the process outlived its parent by 30 s")
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str, out: Path | None = None) -> tuple[Any, Silent]:
    settings = SETTINGS | {"model": fault}
    monkeypatch.setattr("benchmarks.references.bench.adapter_settings", lambda *_: settings)
    watch, patience = Silent(), 2.0 if fault == "hangs" else 60.0
    rows = [Entry(lineage.find("nocache")), Entry(FAKE), Entry(lineage.find("eager"))]
    bench = WithReferences(tiny_model(), rows, SHAPE, 1, MACHINE, watch, out, logs=tmp_path,
                           start=lambda *arguments: Process(*arguments, patience=patience))
    return bench.run(), watch


def test_a_reference_takes_its_turn_and_is_compared_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result, watch = ran(monkeypatch, tmp_path, "counts")
    assert not watch.reasons
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == ["liteinfer-nocache", "vllm", "liteinfer-eager"]
    mine = rows["vllm"]
    assert mine["versions"] == {"fake": "1.0"} and mine["counters"] == {} and mine["throughput"]["tok_s"] > 0
    assert mine["ceiling"]["tokens_per_step"] == 1 and mine["ceiling"]["linear_ms"] is None
    latency, throughput = build_tables(Book([result]), ["latency", "throughput"])
    for table in (latency, throughput):
        against = {row[0].split(" ")[0]: row[table.header.index("vs vLLM")] for row in table.rows}
        assert against["vllm"] == "1.00x" and all(cell.endswith("x") for cell in against.values())
        assert not any("make references" in note for note in table.notes)


@pytest.mark.parametrize("fault", ["dies", "hangs", "raises"])
def test_a_reference_that_fails_costs_its_row_and_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                               fault: str) -> None:
    out = tmp_path / "out.json"
    result, watch = ran(monkeypatch, tmp_path, fault, out)
    assert [row["name"] for row in result["rows"]] == ["liteinfer-nocache", "liteinfer-eager"]
    skipped, = result["skipped"]
    assert skipped["name"] == "vllm" and skipped["reason"].startswith("ProcessFailed: ")
    assert len(watch.reasons) == 1
    assert json.loads(out.read_text())["rows"] == json.loads(json.dumps(result["rows"]))


def test_a_model_without_a_folder_is_no_model_for_another_library() -> None:
    with pytest.raises(ValueError, match="vllm needs the folder of a model in Hugging Face form; 'tiny-llama' has no"):
        adapter_settings(FAKE, 1, tiny_model(), SHAPE)


def test_references_are_run_when_asked_for() -> None:
    names = {entry.row.name for entry in entries("")}
    assert names == {row.name for row in lineage.LADDER}
    assert {entry.row.name for entry in entries("", references=True)} - names == {
        row.name for row in lineage.REFERENCES}
    assert [entry.row.name for entry in entries("transformers,nocache")] == ["liteinfer-nocache", "transformers"]
    with pytest.raises(ValueError, match="unknown row 'vllm'"):
        lineage.find("vllm")   # nobody generates text with a reference


def test_a_reference_that_was_not_built_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineage, "ROOT", tmp_path)
    assert lineage.missing(lineage.find("vllm", lineage.REFERENCES)) == "needs make references"
    assert lineage.missing(lineage.find("transformers", lineage.REFERENCES)) is None
    there = lineage.python_of(lineage.find("vllm", lineage.REFERENCES)).parent.parent
    there.mkdir(parents=True)
    assert lineage.missing(lineage.find("vllm", lineage.REFERENCES)) is not None   # cut short: no mark yet
    (there / ".installed").touch()
    assert lineage.missing(lineage.find("vllm", lineage.REFERENCES)) is None


@pytest.mark.parametrize(("width", "name"), [(1, "vllm"), (4, "vllm-b4"), (32, "vllm-continuous")])
def test_every_width_has_its_reference(width: int, name: str) -> None:
    assert lineage.reference_at(width) == name
    assert max(lineage.find(name, lineage.REFERENCES).widths) == width
    assert replace(FAKE, widths=(1, width)).reference == name


def test_what_vllm_needs_of_its_requirements() -> None:
    told = ["regex", "torch==2.13.0+cpu; platform_machine == 'x86_64'", "torchaudio", "numpy>=2",
            "six; python_version < '3'", 'ray; extra == "ray"', "setuptools==78.1.1"]
    assert needed(told) == ["regex", "numpy>=2", "setuptools==78.1.1"]


@pytest.mark.parametrize("name", ["worker", "contract", "bench", "vllm_engine"])
def test_what_runs_a_reference_is_in_its_hash(tmp_path: Path, name: str) -> None:
    for folder in ("benchmarks", "liteinfer"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("results", "__pycache__"))
    row, mine = lineage.find("vllm", lineage.REFERENCES), lineage.find("eager")
    before = row_hash(row, tmp_path), row_hash(mine, tmp_path)
    with (tmp_path / "benchmarks" / "references" / f"{name}.py").open("a") as file:
        file.write("CHANGED = 1\n")
    assert row_hash(row, tmp_path) != before[0] and row_hash(mine, tmp_path) == before[1]
