"""The table across shapes: timed by a scripted clock on a tiny model, with a reference that counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks import __main__ as cli
from benchmarks import command
from benchmarks.loop import Trace
from benchmarks.report import markdown
from benchmarks.result_file import load
from benchmarks.shapes import Shapes, chosen, grid
from liteinfer import lineage
from liteinfer.loading import LoadedModel, tiny_model
from liteinfer.request import Request
from tests.results import no_hash

MACHINE = {"name": "Toy CPU", "threads": 2}
NAMES = "nocache,eager,paged,ngram"
MS_PER_PASS = {"liteinfer-nocache": 40, "liteinfer-eager": 20, "liteinfer-paged": 10, "liteinfer-ngram": 10}


class Noted:
    def __init__(self) -> None:
        self.passes: list[tuple[str, int]] = []
        self.reasons: list[str] = []

    def passed(self, name: str, width: int, round_: int, what: str, headline: float | None) -> None:
        self.passes.append((name, round_))

    def stopped(self, name: str, width: int, reason: str) -> None:
        self.reasons.append(f"{name}: {reason}")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Elsewhere:
    """In the place of a reference's process: the first token after 100 ms, each later one after 5."""

    started: ClassVar[list[dict[str, Any]]] = []
    fault: ClassVar[str | None] = None

    def __init__(self, python: Path, engine: str, settings: dict[str, Any], variables: object, log: Path) -> None:
        self.versions, self.open = {"fake": "1"}, True
        Elsewhere.started.append(settings)

    def drive(self, requests: list[Request], max_in_flight: int) -> list[Trace]:
        assert self.open and max_in_flight == 1
        if Elsewhere.fault:
            raise RuntimeError(Elsewhere.fault)
        return [Trace(one.request_id, 0.0, [(0.1 + 0.005 * i, 1) for i in range(one.params.max_tokens or 0)],
                      [0] * (one.params.max_tokens or 0), "length") for one in requests]

    def close(self) -> None:
        self.open = False


@pytest.fixture
def talker(monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    monkeypatch.setattr("benchmarks.references.bench.adapter_settings", lambda row, width, model, shape: {
        "width": width, "isl": shape.isl, "osl": shape.osl})
    monkeypatch.setattr(lineage, "finished", lambda row: True)
    monkeypatch.setattr(Elsewhere, "started", [])
    monkeypatch.setattr(Elsewhere, "fault", None)
    return tiny_model(max_position_embeddings=128)


def measured(talker: LoadedModel, names: str = NAMES, references: bool = True, **settings: Any) -> tuple[Shapes, Noted]:
    """Every pass of an engine takes what its row says, however long its prompt is."""
    clock, watch = Clock(), Noted()

    def build(row: lineage.Row, *args: Any, **kwargs: Any) -> Any:
        engine: Any = lineage.build(row, *args, **kwargs)
        step = engine.step

        def slow() -> Any:
            clock.now += MS_PER_PASS[row.name] / 1000
            return step()

        engine.step = slow
        return engine

    rows = [row for row in chosen(names, references) if row.name != "transformers"]
    bench = Shapes(talker, rows, grid([8, 32], [4, 6], 2), machine=MACHINE, watch=watch, build=build, clock=clock,
                   start=Elsewhere, **({"rounds": 2} | settings))
    return bench, watch


def test_every_row_at_every_shape_and_what_it_gains(talker: LoadedModel, tmp_path: Path) -> None:
    bench, watch = measured(talker, out=tmp_path / "shapes.json")
    bench.run()
    result = load(tmp_path / "shapes.json")
    rows = {(row["name"].removeprefix("liteinfer-"), row["isl"], row["osl"]): row for row in result["rows"]}
    assert not watch.reasons and result["prompts"] == 2
    assert {key for key in rows if key[0] == "nocache"} == {("nocache", 8, 4), ("nocache", 8, 6)}
    assert len(rows) == 2 + 4 * 4 and len(watch.passes) == 2 * len(rows)
    eager = rows["eager", 32, 6]
    assert (eager["ttft_ms"], eager["tpot_ms"], eager["e2e_ms"]) == pytest.approx((20, 20, 120))
    assert (rows["vllm", 8, 4]["ttft_ms"], rows["vllm", 8, 4]["e2e_ms"]) == pytest.approx((100, 115))
    assert eager["prompt_hash"] == rows["vllm", 32, 6]["prompt_hash"] != rows["vllm", 8, 6]["prompt_hash"]
    assert sorted(map(repr, Elsewhere.started)) == sorted(
        repr({"width": 1, "isl": isl, "osl": osl}) for isl in (8, 32) for osl in (4, 6) for _ in range(2))

    seconds, against, split = (markdown([result], (name,), no_hash) for name in ("shapes", "shapes_vllm",
                                                                                 "shapes_split"))
    assert "| liteinfer-nocache | 0.16 | 0.24 | - | - |" in seconds
    assert "| liteinfer-eager | 0.08 (2.00x) | 0.12 (2.00x) | 0.08 | 0.12 |" in seconds
    assert "| liteinfer-paged | 0.04 (2.00x) |" in seconds   # its base's base's base
    assert "liteinfer-nocache computes the whole text again for every token" in seconds
    assert "| vllm | 0.11 |" in seconds or "| vllm | 0.12 |" in seconds
    assert "| liteinfer-eager | 1.44x | 1.04x | 1.44x | 1.04x |" in against and "| vllm | 1.00x |" in against
    assert "| row | TTFT ms, 8 in | TTFT ms, 32 in | TPOT ms, 8 in | TPOT ms, 32 in |" in split
    assert "| vllm | 100.0 | 100.0 | 5.0 | 5.0 |" in split and "Outputs of 6 tokens." in split


def test_a_drafting_row_s_gain_is_over_the_nearest_base_that_was_run(talker: LoadedModel) -> None:
    bench, _ = measured(talker, "eager,ngram", references=False)
    table = markdown([bench.run()], ("shapes", "shapes_vllm"), no_hash)
    line = next(line for line in table.splitlines() if line.startswith("| liteinfer-ngram |"))
    assert "x)" in line   # over eager: paged, continuous and radix are not here
    assert "| liteinfer-eager | - | - | - | - |" in table   # no vLLM to compare with


def test_a_reference_that_fails_and_one_that_is_not_there_cost_their_points(
        talker: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Elsewhere, "fault", "it died")
    bench, watch = measured(talker, "eager", rounds=1)
    result = bench.run()
    assert {row["name"] for row in result["rows"]} == {"liteinfer-eager"} and len(watch.reasons) == 4
    assert {"name": "vllm 8 in, 4 out", "reason": "RuntimeError: it died"} in result["skipped"]

    monkeypatch.setattr(lineage, "finished", lambda row: False)
    bench, watch = measured(talker, "eager", rounds=1)
    result = bench.run()
    assert not watch.reasons and len(result["rows"]) == 4
    assert "vllm was not run: needs make references." in markdown([result], ("shapes",), no_hash)


def test_what_is_finished_is_saved_before_the_run_ends(talker: LoadedModel, tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    bench, watch = measured(talker, "nocache,eager", references=False, rounds=1, out=tmp_path / "shapes.json")

    def killed(name: str, *told: Any) -> None:
        if name.startswith("liteinfer-eager"):
            raise SystemExit(1)

    monkeypatch.setattr(watch, "passed", killed)
    with pytest.raises(SystemExit):
        bench.run()
    assert [row["name"] for row in load(tmp_path / "shapes.json")["rows"]] == ["liteinfer-nocache"]


def test_the_command(talker: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                     capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "load", lambda *_: talker)
    with pytest.raises(SystemExit) as ended:
        cli.main(["shapes", "--rows", "eager,paged", "--isl", "8,16", "--osl", "3", "--out", str(tmp_path / "s.json")])
    assert ended.value.code == 0
    assert "each one after it" in " ".join(capsys.readouterr().out.split())
    assert [(row["name"], row["isl"]) for row in load(tmp_path / "s.json")["rows"]] == [
        ("liteinfer-eager", 8), ("liteinfer-paged", 8), ("liteinfer-eager", 16), ("liteinfer-paged", 16)]


@pytest.mark.parametrize(("asked", "words"), [
    (["--rounds", "0"], "rounds must be at least 1, got 0"),
    (["--prompts", "0"], "prompts must be at least 1, got 0"),
    (["--osl", "1,64"], "osl must be at least 2 to have a token after the first, got 1"),
    (["--isl", "8000"], "isl must be at most 4096, got 8000"),
    (["--isl", "8,x"], "isl must be whole numbers separated by commas, got '8,x'"),
    (["--rows", "radix"], "liteinfer-radix is measured at width 32; shapes are for those of width 1: lite"),
    (["--isl", "127", "--osl", "2"], "isl 127 + osl 2 = 129 tokens is over the model's 128")])
def test_what_makes_no_table_is_refused(asked: list[str], words: str, talker: LoadedModel,
                                        monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "load", lambda *_: talker)
    monkeypatch.setattr(command, "LOCAL", tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main(["shapes", *asked, "--out", str(tmp_path / "s.json")])
    assert ended.value.code == 2 and words in capsys.readouterr().err


def test_the_rows_that_can_be_asked_for() -> None:
    assert [row.name for row in chosen("paged,nocache", True)] == [
        "liteinfer-nocache", "liteinfer-paged", "vllm", "transformers"]
    assert [shape.osl for shape in grid([8], [4, 6], 1)] == [4, 6]
