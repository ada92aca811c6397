"""Chapter 9: its worked example, and what is said where there is no compiler."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as bench
from benchmarks import command, machine
from liteinfer import cli, lineage
from liteinfer.kernels import build
from liteinfer.kernels.cpu import CpuOps
from liteinfer.loading import tiny_model

pytestmark = pytest.mark.ch09


@pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler")
def test_panels_by_hand() -> None:
    """The text's 3 x 2 weights, in panels of the width that this processor has."""
    ops = CpuOps(torch.float64)
    weight = torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.float64)
    panels = ops.pack(weight)
    assert panels.shape == (1, 2, ops.panel) and panels[0, :, :3].tolist() == [[1, 3, 5], [2, 4, 6]]
    assert not panels[0, :, 3:].any()
    assert ops.linear(torch.tensor([[10, 1]], dtype=torch.float64), panels, None, 3).tolist() == [[12, 34, 56]]


def unbuilt() -> None:
    raise build.NotBuilt("no C++ compiler: install g++")


def test_one_line_says_that_there_is_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "library", unbuilt)
    assert cli.kernels_hint(lineage.find("continuous")) is None
    assert cli.kernels_hint(lineage.find(lineage.DEFAULT)) == (
        "liteinfer-fast-radix runs without its compiled operators, at about half the speed: no C++ compiler: "
        "install g++")


def test_with_a_compiler_nothing_is_said() -> None:
    if build.compiler() is None:
        pytest.skip("needs a C++ compiler")
    assert cli.kernels_hint(lineage.find("fast")) is None


def test_both_commands_say_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                              tmp_path: object) -> None:
    monkeypatch.setattr(build, "library", unbuilt)
    monkeypatch.setattr(command, "load", lambda *_: tiny_model())
    monkeypatch.setattr(machine, "limits", lambda *_: {"bandwidth_gb_s": 10.0, "bandwidth_path": "copy",
                                                       "peak_gflop_s": 100.0})
    for rows, count in (("continuous", 0), ("fast,fast-radix", 2)):
        with pytest.raises(SystemExit):
            bench.main(["run", "--rows", rows, "--width", "32", "--isl", "6", "--osl", "2", "--prompts", "1", "--out",
                        f"{tmp_path}/r.json"])
        assert capsys.readouterr().err.count("without its compiled operators") == count


def test_the_words_beside_the_stored_tables_hold() -> None:
    results = Path(__file__).parents[1] / "benchmarks" / "results"
    profile, pieces = (json.loads((results / f"{name}.json").read_text()) for name in ("profile", "pieces"))
    rung6, fast = ({row["width"]: row["parts_ms"] for row in profile["rows"] if row["name"] == f"liteinfer-{name}"}
                   for name in ("continuous", "fast"))
    assert [(row["name"], row["width"]) for row in profile["rows"]][::2] == [
        ("liteinfer-continuous", 1), ("liteinfer-continuous", 32), ("liteinfer-fast", 4)]   # the page's rows.N
    assert rung6[1]["linear"] > sum(rung6[1].values()) / 2
    assert rung6[32]["gather"] > rung6[32]["attention"] > rung6[32]["linear"]
    between = {width: (parts["norms"] + parts["between"]) / sum(parts.values()) for width, parts in rung6.items()}
    assert between[1] > 2 * between[32]
    assert fast[32]["sampling"] < rung6[32]["sampling"] and abs(fast[1]["sampling"] - rung6[1]["sampling"]) < 0.1
    step = {(tuple(row["without"]), row["width"]): row["itl_p50_ms"] for row in pieces["rows"]}
    parts = ("linear", "attention", "runner", "drafter")
    assert max(parts, key=lambda part: step[(part,), 1]) == "linear"
    assert max(parts, key=lambda part: step[(part,), 32]) == "attention"
    assert all(step[("runner",), width] > step[(), width] for width in (4, 32))
    assert step[parts, 32] < step[("attention",), 32]
