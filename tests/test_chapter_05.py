"""Chapter 5: its worked example, the numbers in its text, and its deliberate breaks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import ceilings
from benchmarks.workloads import SHAPES
from liteinfer.cache.paged import GatherSdpa, PagedCache
from liteinfer.engines import static_batch
from liteinfer.engines.static_batch import pad_left, positions_of
from liteinfer.loading import LoadedModel, tiny_model
from liteinfer.model.layout import Layout
from liteinfer.plots import ch05
from liteinfer.request import SamplingParams
from tests.conftest import build, outputs

pytestmark = pytest.mark.ch05
README = (Path(__file__).parents[1] / "chapters" / "05_static_batching" / "README.md").read_text(encoding="utf-8")
CPU = torch.device("cpu")
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
BROKEN = [[7, 0, 51, 0, 33], [44, 9], [31, 5, 60]]   # the first has two real tokens with the pad's id


def says(*texts: str) -> None:
    """The chapter's text has these words, wherever its lines break."""
    readme = " ".join(README.split())
    assert [text for text in texts if " ".join(text.split()) not in readme] == []


# --- worked by hand --------------------------------------------------------------------------------------------------


def test_the_rectangle_by_hand() -> None:
    ids, mask = pad_left([list(p) for p in ch05.PROMPTS], CPU)
    assert ids.tolist() == [[7, 3, 51, 20], [0, 0, 44, 9], [0, 0, 0, 31]]
    assert mask.tolist() == [[1, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1]]
    assert positions_of(mask).tolist() == [[0, 1, 2, 3], [0, 0, 0, 1], [0, 0, 0, 0]]
    says("ids 7 3 51 20 mask 1 1 1 1 positions 0 1 2 3", "0 0 44 9 0 0 1 1 0 0 0 1", "0 0 0 31 0 0 0 1 0 0 0 0")


def test_the_ragged_row_by_hand() -> None:
    layout = Layout.of([(0, 0, 4), (1, 0, 2), (2, 0, 1)], CPU)
    assert layout.positions.tolist() == [0, 1, 2, 3, 0, 1, 0]
    assert layout.query_start_loc.tolist() == [0, 4, 6, 7]
    assert (layout.query_start_loc[1:] - 1).tolist() == [3, 5, 6]
    says("ragged: ids 7 3 51 20 44 9 31 positions 0 1 2 3 0 1 0 query_start_loc 0 4 6 7 logits at rows 3 5 6")


def test_what_both_engines_compute(tiny_llama: LoadedModel) -> None:
    """Live: 12 tokens against 7 in the prefill, 3 in a decode step; the pads stay in the rectangle."""
    padded, ragged = ch05.worked_example(tiny_llama)
    assert [step.computed for step in padded] == [12, 3] and [step.computed for step in ragged] == [7, 3]
    assert [step.held for step in padded] == [0, 4]
    assert padded[0].ids == [[7, 3, 51, 20], [None, None, 44, 9], [None, None, None, 31]]
    assert sum(token is None for row in padded[1].ids for token in row) == 5
    assert ragged[0].ids == [7, 3, 51, 20, 44, 9, 31]
    assert [row[-1] for row in padded[1].ids] == ragged[1].ids
    assert [row[-1] for row in padded[1].positions] == ragged[1].layout.positions.tolist() == [4, 2, 1]
    says("computes 12 tokens for 7 real ones", "A decode step computes 3 in both, but the 5 pads stay")


def test_a_query_that_sees_nothing_gives_no_nan(tiny_llama: LoadedModel) -> None:
    ids, mask = pad_left(BROKEN, CPU, extra=5)
    with torch.inference_mode():
        logits = tiny_llama.transformers_model()(input_ids=ids, attention_mask=mask,
                                                 position_ids=positions_of(mask)).logits
    assert int((mask == 0).sum()) == 20 and bool(logits.isfinite().all())


def test_pads_of_three_prompts(tiny_llama: LoadedModel) -> None:
    prompts = [[7] * 3, [9] * 7, [31] * 12]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (24, 20, 6)]
    computed = {}
    for row in ("eager-b4", "native-eager-b4"):
        engine = build(row, tiny_llama)
        outputs(engine, prompts, params)
        computed[row] = engine.counters.tokens_computed
    assert computed == {"eager-b4": 83, "native-eager-b4": 69} and 83 - 69 == 3 * 12 - (3 + 7 + 12)
    says("counts 83 tokens against 69: 14 pads")


# --- the numbers in the text -----------------------------------------------------------------------------------------


def test_bytes_and_operations_of_a_step(smol: LoadedModel) -> None:
    sizes = ceilings.Sizes.of(smol.config, smol.dtype)
    weights = sizes.layer_linear + sizes.head
    assert weights * sizes.itemsize == 537_919_488 and 2 * weights == 268_959_744
    assert 32 * smol.config.num_layers == 960
    says("538 MB", "537,919,488 bytes of weights once", "B times 268,959,744", "960 attention calls a step")


def test_memory_of_four_slots(smol: LoadedModel) -> None:
    slots = build("native-eager-b4", smol).cache
    assert slots.keys.shape[1] == 4 and slots.nbytes == 1_509_949_440 and 8 * slots.nbytes == 12_079_595_520
    pages = PagedCache(smol.config, 48, 16, smol.dtype, CPU, GatherSdpa())
    assert 4 * pages.pool.blocks_for(128 + 64 - 1) == 48 and 48 * pages.block_bytes == 35_389_440
    says("four of 8,192 tokens are 1,509,949,440", "12,079,595,520", "48 blocks, 35,389,440 bytes")


def idle_share(lengths: list[int], width: int) -> float:
    """By the chapter's formula: batches of `width` in order, each as long as its longest."""
    slots = width * sum(max(lengths[i:i + width]) for i in range(0, len(lengths), width))
    return 1 - sum(lengths) / slots


def test_what_the_workload_ragged_wastes() -> None:
    ragged = SHAPES["ragged"]
    lengths = [ragged.output_length(i) for i in range(ragged.prompts_at(4))]
    assert tuple(lengths[:12]) == ch05.RAGGED
    assert len(lengths) == 128
    assert [f"{idle_share(lengths, width):.1%}" for width in (4, 32)] == ["39.2%", "46.5%"]
    assert f"{idle_share(sorted(lengths), 4):.1%}" == "2.1%"
    says("all 128 requests of `ragged`, batches of 4 waste 39.2 % and batches of 32 waste 46.5 %", "would waste 2.1 %")


def test_the_hole_is_as_large_as_the_text_says() -> None:
    model = tiny_model("llama")
    equal, ragged = ch05.gantt(model, [132] * 12), ch05.gantt(model, ch05.RAGGED)
    assert (len(equal.passes), equal.counters.idle_slots) == (396, 0)
    assert (len(ragged.passes), ragged.counters.idle_slots, ragged.counters.batch_slots) == (650, 1020, 2600)
    assert ragged.idle_share == pytest.approx(idle_share(list(ch05.RAGGED), 4)) == pytest.approx(0.392, abs=5e-4)
    says("12 requests of 132 tokens: 396 passes",
         "650 passes. 1,020 of the 2,600 slot-steps (one slot in one pass) are idle, 39.2 %")
    bars = [bar for bar in ch05.gantt_picture({"ragged": ragged}).axes[0].patches if bar.get_hatch()]
    assert sum(bar.get_width() for bar in bars) == 1020


def test_the_text_means_the_rows_it_names() -> None:
    """In the stored curve rows.0 is the plain one and rows.1 the packed one, as the text's markers take them."""
    if not ch05.RESULTS.is_file():
        pytest.skip("no width curve is stored")
    rows = json.loads(ch05.RESULTS.read_text(encoding="utf-8"))["rows"]
    assert [row["name"] for row in rows] == ["liteinfer-native-eager-b4", "liteinfer-paged-b32"]
    assert all([point["width"] for point in row["widths"]] == [1, 2, 4, 8, 16, 32] for row in rows)


# --- the deliberate breaks -------------------------------------------------------------------------------------------


def from_pad_id(sequences: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    ids, _ = pad_left(sequences, device)
    return ids, (ids != 0).long()


def pad_right(sequences: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(map(len, sequences))
    return (torch.tensor([s + [0] * (width - len(s)) for s in sequences]),
            torch.tensor([[1] * len(s) + [0] * (width - len(s)) for s in sequences]))


def unmasked(sequences: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    ids, mask = pad_left(sequences, device)
    return ids, torch.ones_like(mask)


def columns(mask: Tensor) -> Tensor:
    return torch.arange(mask.shape[1]).expand(mask.shape[0], -1)


def columns_after_the_prompt(mask: Tensor) -> Tensor:
    return positions_of(mask) if mask.shape[1] == max(map(len, BROKEN)) else columns(mask)


@pytest.fixture(scope="module")
def right(tiny_llama: LoadedModel) -> list[list[int]]:
    """What rung 1 says, and the batch as it is."""
    found = outputs(build("nocache", tiny_llama), BROKEN, GREEDY)
    assert outputs(build("eager-b4", tiny_llama), BROKEN, GREEDY) == found
    return found


BREAKS = {
    "mask from the pad id": ("pad_left", from_pad_id, [1, 24, 24]),
    "padded on the right": ("pad_left", pad_right, [24, 0, 0]),
    "no mask": ("pad_left", unmasked, [24, 0, 0]),
    "real positions in the prompt, then column numbers": ("positions_of", columns_after_the_prompt, [24, 1, 2]),
    "column numbers as positions all the way": ("positions_of", columns, [24, 24, 24]),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_break_and_how_far_it_goes_unseen(name: str, right: list[list[int]], tiny_llama: LoadedModel,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    what, wrong, agreed = BREAKS[name]
    monkeypatch.setattr(static_batch, what, wrong)
    got = outputs(build("eager-b4", tiny_llama), BROKEN, GREEDY)
    assert [next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), 24)
            for x, y in zip(got, right, strict=True)] == agreed
    says(f"| {name} | {', '.join(map(str, agreed))} |")


def test_only_the_positions_themselves_show_the_last_break() -> None:
    _, mask = pad_left(BROKEN, CPU)
    real = mask.bool()
    counted = [n for prompt in BROKEN for n in range(len(prompt))]
    assert positions_of(mask)[real].tolist() == counted
    assert columns(mask)[real].tolist() != counted


# --- the pictures ----------------------------------------------------------------------------------------------------


def test_the_width_picture_shows_what_it_is_given() -> None:
    points = [{"width": w, "itl_p50_ms": 50.0 + w, "tok_s": 1000 * w / (50 + w), "ceiling_ms": 30.0, "linear_ms": 40.0}
              for w in (1, 2, 4)]
    rows = [{"name": "liteinfer-paged-b32", "linear_path": "oneDNN packed", "widths": points},
            {"name": "liteinfer-native-eager-b4", "linear_path": "plain F.linear", "widths": points}]
    left, right = ch05.widths_picture({"rows": rows, "turning_point": 17.0}).axes
    drawn = {line.get_label(): list(line.get_ydata()) for line in left.lines}
    assert drawn["paged (oneDNN packed)"] == drawn["native-eager (plain F.linear)"] == [51.0, 52.0, 54.0]
    assert drawn["ceiling"] == [30.0] * 3 and "predicted turning point: 17 sequences" in drawn
    assert [1000 * w / 30 for w in (1, 2, 4)] in [list(line.get_ydata()) for line in right.lines]
    left, _ = ch05.widths_picture({"rows": rows, "turning_point": None}).axes
    assert not any("turning" in str(line.get_label()) for line in left.lines)
