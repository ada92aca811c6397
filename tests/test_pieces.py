"""The table of pieces: every variant is built without what it says, and timed by a scripted clock."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import __main__ as cli
from benchmarks import command
from benchmarks.pieces import ALL, PIECES, Pieces, title, variants, without
from benchmarks.report import markdown
from benchmarks.result_file import load
from liteinfer import lineage
from liteinfer.lineage import Row
from liteinfer.loading import LoadedModel, tiny_model
from tests.results import no_hash

pytestmark = pytest.mark.ch09

MACHINE = {"name": "Toy CPU", "threads": 1}
FAST = lineage.find("fast")


@pytest.fixture
def talker() -> LoadedModel:
    return tiny_model(max_position_embeddings=64)


def missing(row: Row) -> tuple[str, ...]:
    return tuple(name for name, plain in PIECES.items() if row.parts[name] == plain)


def test_every_variant_lacks_what_it_says_and_the_last_is_rung_6() -> None:
    assert [missing(without(FAST, each)) for each in variants()] == variants()
    assert variants()[0] == () and variants()[-1] == ALL and set(ALL) == set(FAST.parts)
    plain = without(FAST, ALL).parts
    assert lineage.find("continuous").parts.items() <= plain.items()
    assert [title(each) for each in variants()] == [
        "all pieces", "without our linear layers", "without attention in place", "without the fused forward",
        "without batched sampling", "none of them"]


def test_a_table_by_hand(talker: LoadedModel, tmp_path: Path) -> None:
    """A step takes 10 ms, and 10 more for each missing piece; the first one ten times as long."""
    clock = SimpleNamespace(now=0.0)
    told: list[Any] = []

    def build(row: Row, *args: Any, **kwargs: Any) -> Any:
        engine: Any = lineage.build(row, *args, **kwargs)
        step = engine.step

        def slow() -> Any:
            prefill = not any(request.output_token_ids for request in engine.scheduler.running)
            clock.now += 0.010 * (1 + len(missing(row))) * (10 if prefill else 1)
            return step()

        engine.step = slow
        return engine

    watch = SimpleNamespace(passed=lambda *each: told.append(each), stopped=lambda *each: pytest.fail(str(each)))
    Pieces(talker, FAST, [1, 3], 8, 5, 2, MACHINE, watch, tmp_path / "p.json", build=build,
           clock=lambda: clock.now).run()
    result = load(tmp_path / "p.json")
    assert len(result["rows"]) == 12 and len(told) == 24
    found = {(tuple(row["without"]), row["width"]): row for row in result["rows"]}
    assert (found[(), 3]["itl_p50_ms"], found[(), 3]["prefill_ms"]) == pytest.approx((10, 100))
    assert (found[ALL, 1]["itl_p50_ms"], found[ALL, 1]["prefill_ms"]) == pytest.approx((50, 500))
    table = markdown([result], ("pieces",), no_hash)
    assert "| all pieces | 1 | 10.0 (10.0..10.0) | 100.0 | 1.00x | 100.0 (100.0..100.0) | 1.00x |" in table
    assert "| without attention in place | 3 | 20.0 (20.0..20.0) | 150.0 | 2.00x |" in table
    assert "| none of them | 3 | 50.0 (50.0..50.0) | 60.0 | 5.00x | 500.0 (500.0..500.0) | 5.00x |" in table


def test_the_command(talker: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                     capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "load", lambda *_: talker)
    with pytest.raises(SystemExit) as ended:
        cli.main(["pieces", "--widths", "2", "--isl", "8", "--osl", "4", "--rounds", "1", "--out",
                  str(tmp_path / "p.json")])
    assert ended.value.code == 0 and "what each of them brings" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("asked", "words"), [
    (["--widths", "0"], "widths must be at least 1, got 0"), (["--rounds", "0"], "rounds must be at least 1, got 0"),
    (["--osl", "1"], "osl must be at least 2 to have a step after the first, got 1")])
def test_what_makes_no_table_is_refused(asked: list[str], words: str, talker: LoadedModel,
                                        monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "load", lambda *_: talker)
    with pytest.raises(SystemExit) as ended:
        cli.main(["pieces", *asked, "--out", str(tmp_path / "p.json")])
    assert ended.value.code == 2 and words in capsys.readouterr().err
