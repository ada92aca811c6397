"""The table of draft heads: counted on a tiny model, timed by a scripted clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as cli
from benchmarks import command
from benchmarks.heads import ISL, OSL, Heads, K
from benchmarks.report import markdown
from benchmarks.result_file import load
from liteinfer.loading import LoadedModel, tiny_model
from liteinfer.speculative.draft_head import DraftHeadDrafter
from liteinfer.speculative.head_files import save_head, target_hash
from tests.heads import random_head

pytestmark = pytest.mark.ch08

MACHINE = {"name": "Toy CPU", "threads": 2}


class Quiet:
    def __init__(self) -> None:
        self.lines: list[tuple[Any, ...]] = []

    def passed(self, *told: Any) -> None:
        self.lines.append(told)

    def stopped(self, *told: Any) -> None:
        self.lines.append(told)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def talker() -> LoadedModel:
    """A tiny model that benchmarks can ask something: a tokenizer that knows words by their place in the text."""
    return tiny_model(max_position_embeddings=ISL + OSL)


@pytest.fixture
def folders(tmp_path: Path, talker: LoadedModel) -> list[Path]:
    for layers, vocab_size in ((1, 48), (2, 16)):
        card = {"target": "tiny", "target_hash": target_hash(talker), "tokens": 1000 * layers, "steps": 10 * layers,
                "acceptance": {"code": 0.25 * layers, "json": 0.1}}
        save_head(tmp_path / f"l{layers}", random_head(talker, layers=layers, vocab_size=vocab_size), card)
    return [tmp_path / "l1", tmp_path / "l2"]


def measured(talker: LoadedModel, folders: list[Path], monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Heads:
    """A plain step takes 10 ms, a pass of the head with L layers L ms."""
    clock = Clock()
    feed = DraftHeadDrafter._feed

    def timed(self: DraftHeadDrafter, sequences: Any) -> torch.Tensor:
        clock.now += 0.001 * len(self.head.layers)
        return feed(self, sequences)

    def build(*args: Any, **kwargs: Any) -> Any:
        from liteinfer import lineage

        engine = lineage.build(*args, **kwargs)
        run = engine.runner.run

        def slow(chunks: Any) -> Any:
            clock.now += 0.010
            return run(chunks)

        engine.runner.run = slow
        return engine

    monkeypatch.setattr(DraftHeadDrafter, "_feed", timed)
    monkeypatch.setattr("benchmarks.heads.take", lambda model, isl, count: [[i % 60 for i in range(isl)]] * count)
    return Heads(talker, folders, machine=MACHINE, watch=Quiet(), build=build, clock=clock,
                 **({"rounds": 2} | settings))


def test_what_a_guess_costs(talker: LoadedModel, folders: list[Path], monkeypatch: pytest.MonkeyPatch,
                            tmp_path: Path) -> None:
    one, two = measured(talker, folders, monkeypatch, out=tmp_path / "heads.json").run()["rows"]
    assert one["plain_ms"] == two["plain_ms"] == pytest.approx(10)
    assert one["guess_ms"] == pytest.approx(1) and two["guess_ms"] == pytest.approx(2)
    assert one["cost"] == pytest.approx(0.1) and two["cost_range"] == pytest.approx([0.2, 0.2])
    assert (one["layers"], one["vocab_size"], two["layers"], two["vocab_size"]) == (1, 48, 2, 16)
    assert two["parameters"] - one["parameters"] == 32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * two["intermediate_size"] + 64
    assert one["acceptance"] == {"code": 0.25, "json": 0.1} and one["rounds"][0]["drafted"] > OSL / (K + 1)
    table = markdown([load(tmp_path / "heads.json")])
    assert "| l1 | 1 |" in table and "| 25.0% | 10.0% |" in table and "| 0.100 (0.100..0.100) |" in table


def test_a_head_that_fails_costs_its_turns(talker: LoadedModel, folders: list[Path],
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    bench = measured(talker, folders, monkeypatch)
    bench.heads[0].weights = dict(bench.heads[0].weights)
    del bench.heads[0].weights["fc.weight"]
    result = bench.run()
    assert [row["name"] for row in result["rows"]] == ["l2"]
    assert result["skipped"] == [{"name": "l1", "reason": "KeyError: 'fc.weight'"}]


def test_the_command(talker: LoadedModel, folders: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                     capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "load", lambda *_: talker)
    monkeypatch.setattr("benchmarks.heads.take", lambda model, isl, count: [[i % 60 for i in range(isl)]] * count)
    with pytest.raises(SystemExit) as ended:
        cli.main(["heads", *map(str, folders), "--rounds", "1", "--out", str(tmp_path / "heads.json")])
    assert ended.value.code == 0
    assert "what a draft head's size buys" in capsys.readouterr().out
    assert [row["name"] for row in load(tmp_path / "heads.json")["rows"]] == ["l1", "l2"]


@pytest.mark.parametrize(("asked", "words"), [
    (["{}", "--rounds", "0"], "rounds must be at least 1, got 0"),
    (["nowhere"], "draft head nowhere: card.json cannot be read")])
def test_what_makes_no_table_is_refused(asked: list[str], words: str, folders: list[Path], talker: LoadedModel,
                                        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "load", lambda *_: talker)
    with pytest.raises(SystemExit):
        cli.main(["heads", *(word.format(folders[0]) for word in asked)])
    assert words in capsys.readouterr().err
