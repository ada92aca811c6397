"""Where a step's time goes: the split by hand, on a tiny engine, and the table."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import __main__ as cli
from benchmarks import command, machine
from benchmarks.profile import MARK, PARTS, Profile, split
from benchmarks.report import markdown
from benchmarks.result_file import load
from liteinfer import lineage
from liteinfer.kernels.build import compiler
from liteinfer.loading import LoadedModel, tiny_model
from tests.results import no_hash

pytestmark = pytest.mark.ch09

LIMITS = {"bandwidth_gb_s": 10.0, "bandwidth_path": "copy", "peak_gflop_s": 100.0}
MACHINE = {"name": "Toy CPU", "threads": 1, **LIMITS}


@dataclass(eq=False)
class Event:
    """What `split` reads of the profiler's events."""

    name: str
    us: float
    cpu_children: list[Event] = field(default_factory=list)
    cpu_parent: Event | None = None

    def __post_init__(self) -> None:
        for child in self.cpu_children:
            child.cpu_parent = self

    @property
    def id(self) -> int:
        return id(self)

    @property
    def time_range(self) -> Any:
        return SimpleNamespace(elapsed_us=lambda: self.us)


def part(name: str, us: float, *children: Event) -> Event:
    return Event(MARK + name, us, list(children))


def flat(event: Event) -> list[Event]:
    return [event, *(each for child in event.cpu_children for each in flat(child))]


def test_a_step_by_hand() -> None:
    """10 ms: 1 scheduling; 7 of forward, with 4 linear, 1.5 attention of which 0.5 gather, 0.9 of operations; 0.8
    sampling; so 0.6 between operations of the forward, and 1.2 that nobody claims."""
    step = part("step", 10_000,
                part("scheduling", 1_000),
                part("forward", 7_000,
                     Event("aten::rms_norm", 700, [Event("aten::mul", 300)]),
                     part("linear", 4_000, Event("aten::linear", 3_900)),
                     Event("aten::outer", 1_700, [part("attention", 1_500, part("gather", 500))])),
                part("sampling", 800, Event("aten::max", 500)))
    found, = split(flat(step))
    assert found == pytest.approx({"linear": 4, "attention": 1, "gather": 0.5, "norms": 0.9, "sampling": 0.8,
                                   "scheduling": 1, "between": 0.6, "unattributed": 1.2})
    assert sum(found.values()) == pytest.approx(10)


def test_steps_are_told_apart_and_what_lies_outside_is_nobody_s() -> None:
    events = [*flat(part("step", 10, part("linear", 4))), Event("aten::empty", 99), *flat(part("step", 20))]
    assert [(one["linear"], one["unattributed"]) for one in split(events)] == [
        (pytest.approx(0.004), pytest.approx(0.006)), (0, pytest.approx(0.020))]


@pytest.fixture
def talker() -> LoadedModel:
    return tiny_model(max_position_embeddings=64)


def test_a_profile_of_every_row_and_width(talker: LoadedModel, tmp_path: Path) -> None:
    told: list[Any] = []
    watch = SimpleNamespace(passed=lambda *each: told.append(each), stopped=lambda *each: pytest.fail(str(each)))
    rows = [lineage.find(name) for name in ("continuous", "fast")]
    engines: list[Any] = []

    def build(*args: Any, **kwargs: Any) -> Any:
        engines.append(lineage.build(*args, **kwargs))
        return engines[-1]

    Profile(talker, rows, [1, 3], 8, 12, 2, MACHINE, watch, tmp_path / "p.json", build=build).run()
    result = load(tmp_path / "p.json")
    assert [(row["name"], row["width"]) for row in result["rows"]] == [
        (name, width) for name in ("liteinfer-continuous", "liteinfer-fast") for width in (1, 3)]
    assert len(told) == 8
    for row in result["rows"]:
        parts = row["parts_ms"]
        assert tuple(parts) == PARTS and min(parts.values()) >= 0 and parts["linear"] > 0 < parts["between"]
        assert row["ceilings_ms"]["step"] <= row["step_ms"]
        assert (parts["gather"] > 0) == (row["name"] == "liteinfer-continuous" or compiler() is None)
    for engine in engines:   # the ranges are gone: a part is itself again
        assert "run" not in vars(engine.runner) and "schedule" not in vars(engine.scheduler)
    table = markdown([result], ("profile",), no_hash)
    assert "| row | width | step ms | profiled ms | linear layers | attention | gather |" in table
    assert table.count("| least |") == 2 and "at 10.0 GB/s or operations at 100 GFLOP/s" in table


def test_the_command(talker: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                     capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "load", lambda *_: talker)
    monkeypatch.setattr(machine, "limits", lambda *_: LIMITS)
    with pytest.raises(SystemExit) as ended:
        cli.main(["profile", "--rows", "fast", "--widths", "2", "--isl", "8", "--osl", "8", "--rounds", "1", "--out",
                  str(tmp_path / "p.json")])
    assert ended.value.code == 0 and "where a decode step's time goes" in " ".join(capsys.readouterr().out.split())


def test_too_few_steps_in_which_all_decode_cost_the_point(talker: LoadedModel) -> None:
    why: list[str] = []
    watch = SimpleNamespace(passed=lambda *_: None, stopped=lambda *each: why.append(each[-1]))
    bench = Profile(talker, [lineage.find("fast")], [6], 48, 7, 1, MACHINE, watch,
                    build=lambda *args, **kwargs: lineage.build(*args, **kwargs, max_num_batched_tokens=48))
    assert bench.run()["rows"] == [] and "leaves too few steps in which all 6 sequences decode" in why[0]


def test_a_gpu_is_refused(talker: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                          capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "load", lambda *_: SimpleNamespace(device=torch.device("cuda")))
    with pytest.raises(SystemExit) as ended:
        cli.main(["profile", "--out", str(tmp_path / "p.json")])
    assert ended.value.code == 2 and "profile splits a step on a CPU" in capsys.readouterr().err


@pytest.mark.parametrize(("asked", "words"), [
    (["--widths", "0"], "widths must be at least 1, got 0"), (["--osl", "6"], "osl must be at least 7, got 6"),
    (["--isl", "0"], "isl must be at least 1, got 0"), (["--rounds", "0"], "rounds must be at least 1, got 0"),
    (["--rows", "paged"], "liteinfer-paged is not scheduled; the rows that are:")])
def test_what_makes_no_profile_is_refused(asked: list[str], words: str, talker: LoadedModel,
                                          monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "load", lambda *_: talker)
    with pytest.raises(SystemExit) as ended:
        cli.main(["profile", *asked, "--out", str(tmp_path / "p.json")])
    assert ended.value.code == 2 and words in capsys.readouterr().err
