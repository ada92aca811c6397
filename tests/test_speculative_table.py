"""What drafts gain and cost: counted on real engines whose passes are scripted, timed by a scripted clock."""

from __future__ import annotations

import copy
import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks import __main__ as cli
from benchmarks import chats, codehash, command
from benchmarks.drafts import Variant, shown, variants
from benchmarks.render import render
from benchmarks.repetition import falls_into_a_loop, repetition_share
from benchmarks.report import markdown, print_tables
from benchmarks.result_file import load, without_raw
from benchmarks.speculative import WARMUP, Speculative
from benchmarks.speculative_cases import decodes
from benchmarks.table import pieces
from liteinfer import lineage
from liteinfer.lineage import Row
from liteinfer.loading import LoadedModel, tiny_model
from liteinfer.model.layout import Layout
from liteinfer.request import Request
from liteinfer.runner import StepOutput
from liteinfer.scheduler import Chunk
from liteinfer.speculative import choose
from liteinfer.speculative.drafter import Pause
from liteinfer.trace import Part, StepRecord
from tests.results import no_hash

pytestmark = pytest.mark.ch08

MACHINE = {"name": "Toy CPU", "threads": 2}
EOS = 1
COPIES, INVENTS, LOOPS = [10, 2, 3, 4, 5, 6, 7, 8, 9, 2, 3], [11, 30, 31, 32], [12, 50]
ANSWERS = {tuple(COPIES): [4, 5, 6, 7, 8, 9, EOS], tuple(INVENTS): [40, 41, 42, 43, EOS], tuple(LOOPS): [60, 61] * 20}
CODE = {"code": [COPIES, INVENTS, LOOPS]}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Quiet:
    """A watch that remembers."""

    def __init__(self) -> None:
        self.lines: list[tuple[Any, ...]] = []

    def passed(self, name: str, width: int, round_: int, what: str, headline: float | None) -> None:
        self.lines.append((name, width, round_, what, headline))

    def stopped(self, name: str, width: int, reason: str) -> None:
        self.lines.append((name, width, reason))


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return tiny_model(eos_token_id=EOS)


class Scripting:
    """Builds engines that say ANSWERS; a pass takes 10 ms and 1 ms for each token fed, times the engine's pace."""

    def __init__(self, clock: Clock, pace: Callable[[int], float] = lambda built: 1.0,
                 lie: Callable[[bool, Request], int | None] = lambda drafts, request: None) -> None:
        self.clock, self.pace, self.lie = clock, pace, lie
        self.settings: list[dict[str, Any]] = []
        self.asked: list[tuple[int, Request]] = []   # and of which engine

    def __call__(self, row: Row, model: LoadedModel, **settings: Any) -> Any:
        number = len(self.settings)
        self.settings.append({"row": row.name} | settings)
        engine: Any = lineage.build(row, model, **settings)
        pace, drafts, add = self.pace(number), "drafter" in settings, engine.add

        def noted(request: Request) -> None:
            self.asked.append((number, request))
            add(request)

        def run(chunks: tuple[Chunk, ...]) -> StepOutput:
            sequences = [(chunk.request.request_id, chunk.start, chunk.num_tokens) for chunk in chunks]
            engine.cache.begin(Layout.of(sequences, torch.device("cpu")))
            self.clock.now += pace * (0.010 + 0.001 * sum(chunk.num_tokens for chunk in chunks))
            said = [self.answer(drafts, chunk.request, chunk.start + chunk.num_tokens - back)
                    for chunk in chunks for back in reversed(range(chunk.num_logits))]
            return StepOutput(torch.nn.functional.one_hot(torch.tensor(said), 64) * 20.0, torch.empty(0))

        engine.add, engine.runner.run = noted, run
        return engine

    def answer(self, drafts: bool, request: Request, length: int) -> int:
        """The token that follows the first `length` of a request."""
        if (lie := self.lie(drafts, request)) is not None:
            return lie
        answer = ANSWERS.get(tuple(request.prompt_token_ids), [0])
        return answer[min(length - len(request.prompt_token_ids), len(answer) - 1)]


def measured(model: LoadedModel, drafts: str = "ngram@4", prompts: dict[str, list[list[int]]] = CODE,
             widths: tuple[int, ...] = (1,), rounds: int = 1, out: Path | None = None, max_tokens: int = 40,
             **scripting: Any) -> Speculative:
    clock = Clock()
    return Speculative(model, variants(drafts, 0.1), copy.deepcopy(prompts), widths, max_tokens, rounds, MACHINE,
                       Quiet(), out, Scripting(clock, **scripting), clock)


# ---- the figures ----------------------------------------------------------------------------------------------

def test_a_draft_s_gain_at_width_1_by_hand(tiny: LoadedModel) -> None:
    """COPIES: its 11 tokens take 21 ms and give the 4; then 5 6 7 8 are guessed and stand, 9 comes with them (15 ms);
    2 3 4 5 are guessed, and EOS comes instead (15 ms). INVENTS gives nothing to guess: 14 ms, and 4 times 11.
    """
    row, = measured(tiny).run()["rows"]
    assert (row["name"], row["prompts_kind"], row["draft"], row["k"], row["pause"], row["width"]) == (
        "liteinfer-ngram", "code", "ngram", 4, None, 1)
    assert {key: row[key] for key in ("prompts", "output_tokens", "decode_passes", "drafted_tokens", "accepted_tokens",
                                      "acceptance", "tokens_per_pass", "differs_from_baseline")} == {
        "prompts": 2, "output_tokens": 12, "decode_passes": 2 + 4, "drafted_tokens": 8, "accepted_tokens": 4,
        "acceptance": 0.5, "tokens_per_pass": 10 / 6, "differs_from_baseline": {"differ": 0, "prompts": 2}}
    mine, base = (21 + 2 * 15) + (14 + 4 * 11), (21 + 6 * 11) + (14 + 4 * 11)   # ms
    assert row["tok_s"] == pytest.approx(12_000 / mine) and row["baseline_tok_s"] == pytest.approx(12_000 / base)
    assert row["speedup"] == pytest.approx(base / mine) and row["speedup_range"] == pytest.approx([base / mine] * 2)
    assert row["itl_p50_ms"] == pytest.approx(11)                              # of 15 15 11 11 11 11
    assert row["tpot_p50_ms"] == pytest.approx((30 / 6 + 11) / 2)
    assert len(row["rounds"]) == 1 and "raw" not in without_raw(row)["rounds"][0]


def test_requests_at_once_share_their_passes(tiny: LoadedModel) -> None:
    """Without a draft 25 ms for both prompts, 4 steps of both (12) and 2 of one (11); with it both are in 2 steps
    of 6 tokens (16), and one is alone in 2 (11).
    """
    run = measured(tiny, widths=(1, 2, 3))
    one, two, three = run.run()["rows"]
    assert [row["width"] for row in (one, two, three)] == [1, 2, 3]
    assert two["baseline_tok_s"] == pytest.approx(12_000 / (25 + 4 * 12 + 2 * 11))
    assert two["tok_s"] == pytest.approx(12_000 / (25 + 2 * 16 + 2 * 11))
    assert {key: two[key] for key in ("decode_passes", "tokens_per_pass", "acceptance", "prompts")} == {
        key: one[key] for key in ("decode_passes", "tokens_per_pass", "acceptance", "prompts")}
    assert (three["output_tokens"], three["prompts"], three["drafted_tokens"]) == (12 + 7, 2, 16)   # COPIES twice
    last = [request.prompt_token_ids for number, request in run.build.asked if number == len(run.build.settings) - 1]
    assert last[-3:] == [COPIES, INVENTS, COPIES]


def test_prompts_that_loop_are_counted_apart(tiny: LoadedModel) -> None:
    """LOOPS: 12 ms, 2 steps without a guess, one of 2 guesses (13 ms), 6 of 4 (15), and one of the 3 that there is
    room for (14); all stand. Without a draft 39 steps.
    """
    result = measured(tiny).run()
    assert result["loops"] == [{"prompts_kind": "code", "prompts": 1, "of": 3, "repetition_share": 1 - 2 / 37,
                                "repetition_share_others": 0.0,
                                "speedups": [{"draft": "ngram", "k": 4, "pause": None, "speedup": pytest.approx(
                                    (12 + 39 * 11) / (12 + 2 * 11 + 13 + 6 * 15 + 14))}]}]
    other = measured(tiny, prompts={"code": [COPIES, INVENTS]}).run()
    assert other["loops"][0]["repetition_share"] is None and other["loops"][0]["speedups"][0]["speedup"] is None
    assert [row["tok_s"] for row in other["rows"]] == [row["tok_s"] for row in result["rows"]]


def test_what_a_guess_costs(tiny: LoadedModel) -> None:
    """A step of one token takes 11 ms, one that checks 4 guesses besides 15, one of 2 guesses 13: 1 / 11 each.

    INVENTS and the ends of drafts give steps with fewer guesses; the loop's steps do not count.
    """
    result = measured(tiny, "ngram@4,ngram@2,ngram@2+pause").run()
    assert result["costs"] == [
        {"draft": "ngram", "k": 4, "plain_ms": pytest.approx(11), "checked_ms": pytest.approx(15), "checked_steps": 2,
         "cost": pytest.approx(1 / 11)},
        {"draft": "ngram", "k": 2, "plain_ms": pytest.approx(11), "checked_ms": pytest.approx(13), "checked_steps": 2,
         "cost": pytest.approx(1 / 11)}]
    nothing = measured(tiny, prompts={"json": [INVENTS]}).run()
    assert nothing["costs"] == [{"draft": "ngram", "k": 4, "plain_ms": pytest.approx(11), "checked_ms": None,
                                 "checked_steps": 0, "cost": None}]
    assert (nothing["rows"][0]["acceptance"], nothing["rows"][0]["tokens_per_pass"]) == (None, 1.0)


def test_over_rounds_the_medians_and_the_median_of_the_ratios(tiny: LoadedModel) -> None:
    """Engine 0 looks whether the draft fits; then a baseline and a draft in each round. The baseline is slow."""
    paces = [0.0, 1.0, 1.0, 3.0, 1.0, 2.0, 1.0]
    one = measured(tiny).run()["rows"][0]
    row, = measured(tiny, rounds=3, pace=lambda built: paces[built]).run()["rows"]
    assert row["speedup"] == pytest.approx(2 * one["speedup"])
    assert row["speedup_range"] == pytest.approx([one["speedup"], 3 * one["speedup"]])
    assert row["baseline_tok_s"] == pytest.approx(one["baseline_tok_s"] / 2)
    assert row["tok_s"] == pytest.approx(one["tok_s"]) and row["output_tokens"] == 12 and len(row["rounds"]) == 3


def test_the_last_token_of_a_prompt_is_no_decode() -> None:
    """Found stored up to its last token, a prompt of 17 is computed by a step of one token, as a decode is."""
    parts = ((Part("a", 16, 1, 1), Part("b", 17, 1, 1)), (Part("a", 17, 3, 2, (5, 6)),), (Part("c", 0, 17, 1),),
             (Part("b", 18, 1, 1), Part("a", 19, 1, 1)))   # and of two at once, no request's own time is known
    steps = [StepRecord(i, i + 0.5, each, 0, 0, 0) for i, each in enumerate(parts)]
    counted, alone = decodes(steps, dict.fromkeys("abc", 17))
    assert counted == {"output_tokens": 7, "decode_passes": 4, "decode_tokens": 5} and alone == [(2, 0.5)]


# ---- how it is measured ---------------------------------------------------------------------------------------

def test_drafts_take_turns_prompt_by_prompt_each_in_its_own_engine(tiny: LoadedModel) -> None:
    run = measured(tiny, "ngram@4,ngram@2", {"code": [COPIES, INVENTS], "json": [LOOPS, INVENTS]}, rounds=2)
    run.run()
    turns = [(number, request.prompt_token_ids[0]) for number, request in run.build.asked
             if tuple(request.prompt_token_ids) in ANSWERS]
    first = 2                                        # engines 0 and 1 look whether the drafts fit
    assert turns[:6] == [(first, 10), (first + 1, 10), (first + 2, 10), (first + 1, 11), (first + 2, 11), (first, 11)]
    assert [prompt for _, prompt in turns[12:18]] == [12, 12, 12, 11, 11, 11]   # json begins the second round
    assert turns[12][0] == first + 2 * 3 + 1         # with the second of its engines


def test_a_larger_width_runs_one_draft_after_the_other_another_first_for_each_kind(tiny: LoadedModel) -> None:
    run = measured(tiny, "ngram@4,ngram@2", {"code": [COPIES], "json": [INVENTS]}, (1, 2))
    run.run()
    assert [line[:4] for line in run.watch.lines if line[3] == "throughput"] == [
        ("code, liteinfer-radix", 2, 0, "throughput"), ("code, ngram@4", 2, 0, "throughput"),
        ("code, ngram@2", 2, 0, "throughput"), ("json, ngram@4", 2, 0, "throughput"),
        ("json, ngram@2", 2, 0, "throughput"), ("json, liteinfer-radix", 2, 0, "throughput")]
    assert run.watch.lines[0] == ("code", 1, 0, "prompt", pytest.approx(7_000 / 87))   # the baseline's
    assert len({id(settings["trace"]) for settings in run.build.settings}) == 2 + 2 * 3 + 2 * 3


def test_the_pool_holds_what_is_in_flight_and_passes_start_cold(tiny: LoadedModel) -> None:
    """COPIES takes 11 + 40 tokens, 4 blocks, INVENTS and a warm-up of 40 take 3; one block is kept free."""
    run = measured(tiny, widths=(1, 3), rounds=2)
    run.run()
    seen = {(s["row"], s["max_num_seqs"], s["num_blocks"], s["block_size"], s["max_model_len"])
            for s in run.build.settings[1:]}
    assert seen == {("liteinfer-radix", 1, 4 + 1, 16, 51), ("liteinfer-radix", 3, 4 + 3 + 4 + 1, 16, 51)}
    taken = [one for group in run.groups for case in group.cases for passes in case.rounds for one in passes]
    assert len(taken) == 2 * 2 * (3 + 1)
    assert {(one.counters["prefix_hit_tokens"], one.counters["preemptions"]) for one in taken} == {(0, 0)}


def test_a_prompt_finds_nothing_of_those_before_it(tiny: LoadedModel) -> None:
    """Both begin with the same 32 tokens, as chats do; run together they start in one step and find nothing either."""
    run = measured(tiny, prompts={"code": [[*range(20, 52), 3], [*range(20, 52), 4]]}, widths=(1, 2), rounds=2,
                   max_tokens=8)
    run.run()
    taken = [one for case in run.groups[0].cases for passes in case.rounds for one in passes]
    assert len(taken) == 2 * 2 * (2 + 1) and {one.counters["prefix_hit_tokens"] for one in taken} == {0}


def test_every_engine_is_warmed_up_on_other_text_that_gives_something_to_guess(tiny: LoadedModel) -> None:
    run = measured(tiny, widths=(1, 2))
    run.run()
    for number in range(1, 5):
        mine = [request for engine, request in run.build.asked if engine == number]
        warm = mine[:run.build.settings[number]["max_num_seqs"]]
        assert all(tuple(request.prompt_token_ids) in ANSWERS for request in mine[len(warm):])
        for request in warm:
            half = request.prompt_token_ids[:WARMUP[0]]
            assert request.prompt_token_ids == 2 * half and len(request.output_token_ids) == WARMUP[1]
            assert ("drafter" in run.build.settings[number]) == (request.num_drafted_tokens > 0)


def test_outputs_are_greedy_and_end_at_eos_or_at_the_limit(tiny: LoadedModel) -> None:
    run = measured(tiny, max_tokens=6)
    result = run.run()
    params = [request.params for _, request in run.build.asked if tuple(request.prompt_token_ids) in ANSWERS]
    assert {(each.temperature, each.max_tokens, each.ignore_eos) for each in params} == {(0.0, 6, False)}
    assert result["max_tokens"] == 6 and result["rows"][0]["output_tokens"] == 6 + 5 + 6   # COPIES INVENTS LOOPS


def test_rows_stand_by_kind_draft_and_width(tiny: LoadedModel) -> None:
    result = measured(tiny, "ngram@4,early-exit:1@2+pause", {"code": [COPIES], "json": [INVENTS]}, (1, 2)).run()
    assert [(row["prompts_kind"], row["draft"], row["width"], row["name"]) for row in result["rows"]] == [
        (kind, draft, width, f"liteinfer-{name}") for kind in ("code", "json")
        for draft, name in (("ngram", "ngram"), ("early-exit:1", "speculative")) for width in (1, 2)]
    assert {row["draft"]: row["pause"] for row in result["rows"]} == {
        "ngram": None, "early-exit:1": {"cost": 0.1, "after": 16}}
    assert result["rows"][0]["code_hash"] == codehash.row_hash(lineage.find("ngram"))


def test_real_drafts_of_a_real_model_change_no_token() -> None:
    model = tiny_model()
    run = Speculative(model, variants("ngram@4,early-exit:1@3", 0.1), {"code": [[1, 2, 3] * 4, [5] * 9]}, (1, 3), 20, 2,
                      MACHINE, Quiet())
    result = run.run()
    assert [row["differs_from_baseline"] for row in result["rows"]] == [{"differ": 0, "prompts": 2}] * 4
    assert result["skipped"] == [] and all(row["drafted_tokens"] > 0 for row in result["rows"])


def test_other_tokens_than_the_baseline_s_are_counted_by_prompt(tiny: LoadedModel) -> None:
    def lie(drafts: bool, request: Request) -> int | None:
        return EOS if drafts and request.prompt_token_ids == INVENTS else None

    one, three = measured(tiny, widths=(1, 4), lie=lie).run()["rows"]
    assert one["differs_from_baseline"] == three["differs_from_baseline"] == {"differ": 1, "prompts": 2}


def test_counts_that_change_between_rounds_stop_the_draft_only(tiny: LoadedModel) -> None:
    run = measured(tiny, "ngram@4,ngram@2", rounds=2)
    turn = run._turn

    def spoiled(group: Any, round_: int) -> None:
        if round_ == 1:
            group.cases[1].counters[0]["drafted_tokens"] += 1
        turn(group, round_)

    run._turn = spoiled  # type: ignore[assignment, method-assign]
    four, two = run.run()["rows"]
    assert len(four["rounds"]) == 1 and four["stopped"].startswith("RuntimeError: counted [{")
    assert len(two["rounds"]) == 2 and "stopped" not in two


def test_a_draft_that_fails_costs_its_own_cases_and_a_failing_baseline_the_kind(tiny: LoadedModel) -> None:
    def breaks(drafts: bool, request: Request) -> int | None:
        if drafts and request.prompt_token_ids == INVENTS:
            raise RuntimeError("no")
        return None

    run = measured(tiny, "ngram@4", {"code": [COPIES], "json": [INVENTS]}, (1, 2), lie=breaks)
    result = run.run()
    assert [(row["prompts_kind"], row["width"]) for row in result["rows"]] == [("code", 1), ("code", 2)]
    reason = "RuntimeError: prompt-0: RuntimeError: no"
    assert result["skipped"] == [{"name": "json, ngram@4", "reason": reason}] * 2
    told = [line for line in run.watch.lines if len(line) == 3]
    assert told == [("json, ngram@4", width, reason) for width in (1, 2)]

    spoiled = measured(tiny, prompts={"code": [COPIES], "json": [[-1]]})
    result = spoiled.run()
    assert [row["prompts_kind"] for row in result["rows"]] == ["code"]
    skip, = result["skipped"]
    assert skip["name"] == "json" and "prompt-0: ValueError: request prompt-0: token id -1" in skip["reason"]


def test_a_kind_of_which_everything_loops_has_no_row(tiny: LoadedModel) -> None:
    result = measured(tiny, prompts={"json": [LOOPS]}, widths=(1, 2)).run()
    assert result["rows"] == [] and result["loops"][0]["prompts"] == 1
    assert result["skipped"] == [{"name": "json", "reason": "RuntimeError: the outputs of all 1 prompts fall into "
                                                            "loops"}]


def test_ctrl_c_keeps_what_finished(tiny: LoadedModel, tmp_path: Path) -> None:
    def stop(drafts: bool, request: Request) -> int | None:
        if drafts and request.prompt_token_ids == INVENTS:
            raise KeyboardInterrupt
        return None

    out = tmp_path / "speculative.json"
    result = measured(tiny, prompts={"code": [COPIES], "json": [INVENTS]}, out=out, lie=stop).run()
    assert [row["prompts_kind"] for row in result["rows"]] == ["code"] and result["interrupted"] is True
    assert {**load(out), "source": None} == {**result, "source": None}
    assert "The run was interrupted" in markdown([result], ("speculative",), no_hash)


def test_a_draft_that_is_none_of_the_model_s_is_refused_before_anything_is_measured(
        tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="early-exit must stop after 1 to 1 of the target's 2 layers, got 5"):
        measured(tiny, "ngram@4,early-exit:5@4")
    monkeypatch.setattr(choose, "load_model", lambda *_, **__: tiny_model(vocab_size=65))
    with pytest.raises(ValueError, match="has vocab_size 65, target tiny-llama 64"):
        measured(tiny, "toy@4")


def test_prompts_that_the_model_cannot_hold_are_refused(tiny: LoadedModel) -> None:
    with pytest.raises(ValueError, match=r"isl 11 \+ osl 502 = 513 tokens is over the model's 512"):
        measured(tiny, max_tokens=502)


# ---- names, loops, prompts ------------------------------------------------------------------------------------

def test_drafts_by_name() -> None:
    four, paused, early, model = variants("ngram@4, ngram@2+pause,early-exit:15@4,a/b@c@3", 0.3)
    assert (four, paused) == (Variant("ngram", 4), Variant("ngram", 2, Pause(0.3)))
    assert (early.name, early.k, model.name, model.k) == ("early-exit:15", 4, "a/b@c", 3)
    assert [str(one) for one in (four, paused, early)] == ["ngram@4", "ngram@2+pause", "early-exit:15@4"]
    assert [one.row for one in (four, early, model)] == ["liteinfer-ngram", *["liteinfer-speculative"] * 2]


def test_a_folder_s_place_is_not_told(tmp_path: Path) -> None:
    assert (shown(str(tmp_path)), shown("Qwen/Qwen2.5-0.5B")) == (tmp_path.name, "Qwen/Qwen2.5-0.5B")


@pytest.mark.parametrize(("ids", "loops"), [
    ([7] * 24, True), ([7] * 23, False),
    ([1, 2, 3] + [7, 8] * 12, True), ([1, 2, 3] + [7, 8] * 11 + [7], False),
    (list(range(32)) * 3, True), (list(range(33)) * 3, False), (list(range(32)) * 2 + list(range(31)), False),
    (list(range(8)) * 3, True), (list(range(9)) * 2, False), (list(range(9)) * 3 + [4, 5], False),
    ([7] * 30 + [1], False), ([], False), ([5], False)])
def test_a_loop_is_three_repeats_of_at_most_32_tokens_over_at_least_24(ids: list[int], loops: bool) -> None:
    assert falls_into_a_loop(ids) == loops


@pytest.mark.parametrize(("ids", "share"), [([1] * 5, 0.5), ([1, 2, 3], 0.0), (list(range(40)), 0.0),
                                            ([1, 2, 3, 4] * 2, 0.2)])
def test_the_repetition_share_is_of_4_grams_seen_before(ids: list[int], share: float) -> None:
    assert repetition_share(ids) == pytest.approx(share)


# Of the file as it was committed before the first measurement.
SHIPPED = "5b73460fc4477a2c9cb585c5e844d5ac2f923be4838ff31b56edb6cb13b15732"


def test_the_prompts_are_those_of_the_first_measurement() -> None:
    assert hashlib.sha256(chats.CHATS.read_bytes()).hexdigest() == SHIPPED


def test_there_are_enough_prompts_of_each_kind_and_all_are_different() -> None:
    every = chats.all_chats()
    assert tuple(every) == chats.KINDS and all(len(each) >= 10 for each in every.values())
    texts = [json.dumps([message["content"] for message in messages]) for each in every.values() for messages in each]
    assert len(set(texts)) == len(texts)
    everyday = set(json.loads((chats.CHATS.parent / "everyday.json").read_text(encoding="utf-8")))
    assert not everyday & {message["content"] for each in every.values() for chat in each for message in chat}
    assert {message["role"] for each in every.values() for chat in each for message in chat} <= {
        "system", "user", "assistant"}
    assert {chat[-1]["role"] for each in every.values() for chat in each} == {"user"}


def test_kinds_and_a_limit_are_chosen_in_the_table_s_order() -> None:
    some = chats.chosen("json, code", 2)
    assert {kind: len(each) for kind, each in some.items()} == {"code": 2, "json": 2} and list(some) == ["code", "json"]
    assert some["json"] == chats.all_chats()["json"][:2]


def test_prompts_go_through_the_chat_template(smol: LoadedModel) -> None:
    """Nothing runs: the text is what the template writes, up to where the answer begins."""
    messages = chats.chosen("code", 1)
    ids, = chats.encode(smol, messages)["code"]
    text = smol.decode(ids, skip_special_tokens=False)
    assert messages["code"][0][-1]["content"] in text and text.endswith("<|im_start|>assistant\n")


# ---- the tables -----------------------------------------------------------------------------------------------

def line(**changed: Any) -> dict[str, Any]:
    return {"name": "liteinfer-ngram", "prompts_kind": "json", "draft": "ngram", "k": 4, "pause": None, "width": 1,
            "prompts": 11, "output_tokens": 1000, "decode_passes": 600, "drafted_tokens": 2000, "accepted_tokens": 500,
            "acceptance": 0.25, "tokens_per_pass": 1.65, "baseline_tok_s": 20.0, "tok_s": 25.0, "speedup": 1.25,
            "speedup_range": [1.2, 1.3], "itl_p50_ms": 60.0, "tpot_p50_ms": 40.0,
            "differs_from_baseline": {"differ": 0, "prompts": 11}, "rounds": [], "code_hash": "bbbb"} | changed


RESULT: dict[str, Any] = {
    "schema": 1, "kind": "speculative", "date": "2026-12-01", "versions": {"torch": "2.13.0"}, "machine": MACHINE,
    "model": {"name": "toy", "parameters": 134515008, "dtype": "float32"}, "rounds": 3, "skipped": [],
    "max_tokens": 128, "prompt_hash": "p", "code_hash": "aaaa",
    "rows": [line(), line(draft="ngram", k=2, pause={"cost": 0.1, "after": 16}, width=32, speedup=0.95,
                          differs_from_baseline={"differ": 1, "prompts": 11}),
             line(name="liteinfer-speculative", prompts_kind="conversation", draft="early-exit:15", code_hash="cccc",
                  drafted_tokens=0, accepted_tokens=0, acceptance=None, itl_p50_ms=None, tpot_p50_ms=None)],
    "loops": [{"prompts_kind": "json", "prompts": 1, "of": 12, "repetition_share": 0.75, "repetition_share_others": 0.2,
               "speedups": [{"draft": "ngram", "k": 4, "pause": None, "speedup": 2.5},
                            {"draft": "ngram", "k": 2, "pause": {"cost": 0.1, "after": 16}, "speedup": None}]}],
    "costs": [{"draft": "ngram", "k": 4, "plain_ms": 40.0, "checked_ms": 52.0, "checked_steps": 321, "cost": 0.075}]}


def test_the_tables() -> None:
    assert markdown([RESULT], current=no_hash) == """\
toy (134.5 M parameters, float32) · Toy CPU, 2 threads · 2026-12-01, 3 rounds · torch 2.13.0

**Speculative: what drafts gain**

| kind | draft | K | width | prompts | baseline tok/s | tok/s | acceptance | tokens/pass | ITL p50 ms | TPOT p50 ms | \
speed-up |
|:--|:--|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|
| json | ngram | 4 | 1 | 11 | 20.0 | 25.0 | 25.0% | 1.65 | 60.0 | 40.0 | 1.25x (1.20..1.30) |
| json | ngram (pause) | 2 | 32 | 11 | 20.0 | 25.0 | 25.0% | 1.65 | 60.0 | 40.0 | 0.95x (1.20..1.30) |
| conversation | early-exit:15 | 4 | 1 | 11 | 20.0 | 25.0 | - | 1.65 | - | - | 1.25x (1.20..1.30) |

Greedy, up to 128 tokens, ending at EOS, in liteinfer-radix's engine with each draft and without (baseline). Width 1: \
tokens over the requests' times from arrival to last token, the drafts taking turns prompt by prompt. Other widths: \
the same prompts over and over, that many at once, tokens over the wall.

Acceptance: of the guesses that were checked. Tokens/pass: of one request in a decode step, of at most K + 1. ITL: \
between two events of a request, which may bring several tokens; TPOT: per token. Speed-up: of tok/s, the median of \
the rounds' ratios.

pause: a request gets no more drafts once at least 16 guesses of its were checked and less than 10% of them stood, \
0.1 of a step without drafts being what a guess is taken to cost.

Left out, since the baseline's output falls into a loop: 1 of 12 of json (the table of loops has them).

The baseline's tokens: in 32 of 33 prompts of all rows; others: ngram (pause) with K 2 in 1 of 11 of json at width 32.

**Loops: outputs that repeat themselves to the end**

| kind | loops | repeated, loops | repeated, others | ngram, K 4 | ngram (pause), K 2 |
|:--|--:|--:|--:|--:|--:|
| json | 1 of 12 | 75% | 20% | 2.50x | - |

An output falls into a loop if it ends in a stretch of at most 32 tokens, said 3 times or more, over at least 24 \
tokens; decided on the baseline's output at width 1. Repeated: the share of an output's 4-grams that it has had \
before, the median over outputs. Below each draft: its speed-up on the prompts that loop, at width 1.

**Draft costs: what a guess adds to a step**

| draft | K | steps | plain step ms | step with K ms | cost of a guess |
|:--|--:|--:|--:|--:|--:|
| ngram | 4 | 321 | 40.0 | 52.0 | 0.075 |

Medians at width 1, over the prompts that count: decode steps of the baseline, and steps that checked exactly K \
guesses, making them included. Cost of a guess: what it adds to a step, as a share of one without; accepted more often \
than that, it pays.
"""
    single = copy.deepcopy(RESULT) | {"rounds": 1}
    single["loops"][0]["prompts"] = 0
    single["rows"] = single["rows"][:1]
    text = markdown([single], ("speculative",), no_hash)
    assert ".." not in text.split("\n\n")[1] and "No output falls into a loop; none is left out." in text
    assert "pause:" not in text and "The baseline's tokens: in 11 of 11 prompts of all rows.\n" in text


def test_eighty_columns_cut_no_figure_and_every_piece_says_what_it_is_about() -> None:
    console = Console(file=io.StringIO(), width=80)
    print_tables([RESULT], console, no_hash)
    text = console.file.getvalue()
    assert "…" not in text and max(map(len, text.splitlines())) <= 80 and text.count("Speculative: ") == 1
    lines = [line.split() for line in text.splitlines() if line.startswith("conversation ")]
    assert len(lines) == 2 and all(each[:4] == ["conversation", "early-exit:15", "4", "1"] for each in lines)
    assert lines[0][4:] + lines[1][4:] == ["11", "20.0", "25.0", "-", "1.65", "-", "-", "1.25x"]


@pytest.mark.parametrize(("room", "found"), [(40, [[0, 1, 2, 3, 4]]), (21, [[0, 1, 2, 3], [0, 1, 4]]),
                                             (1, [[0, 1, 2], [0, 1, 3], [0, 1, 4]])])
def test_a_table_too_wide_is_cut_between_columns(room: int, found: list[list[int]]) -> None:
    assert pieces([4, 5, 4, 5, 6], 2, room) == found


@pytest.mark.parametrize(("changed", "stale"), [("speculative", True), ("liteinfer-ngram", True),
                                                ("liteinfer-speculative", True), ("liteinfer-radix", False)])
def test_a_result_is_stale_if_its_own_code_or_a_row_s_has_changed(changed: str, stale: bool) -> None:
    hashes = {"liteinfer-ngram": "bbbb", "liteinfer-speculative": "cccc", "speculative": "aaaa", changed: "new"}
    assert ("stale: the code has changed" in markdown([RESULT], current=hashes.get)) == stale


def test_pages_take_tables_and_values(tmp_path: Path) -> None:
    results = tmp_path / "benchmarks/results"
    results.mkdir(parents=True)
    (results / "speculative.json").write_text(json.dumps(RESULT))
    tables, values = ("speculative", "loops", "draft_costs"), ("rows.0.speedup .2f", "costs.0.cost .3f",
                                                               "loops.0.repetition_share .0%")
    page = tmp_path / "README.md"
    page.write_text("".join(f"<!-- table: {name} results=speculative -->\n<!-- end -->\n" for name in tables)
                    + " ".join(f"<!--v: results=speculative {words}-->?<!--/v-->" for words in values) + "\n")
    assert len(render(tmp_path, check=False, current=no_hash)) == 6
    text = page.read_text()
    assert all(f"**{title}:" in text for title in ("Speculative", "Loops", "Draft costs"))
    assert [part.split("-->")[-1] for part in text.splitlines()[-1].split("<!--/v-->")[:-1]] == ["1.25", "0.075", "75%"]
    assert render(tmp_path, check=True, current=no_hash) == []


def test_a_page_may_show_some_of_the_drafts(tmp_path: Path) -> None:
    results = tmp_path / "benchmarks/results"
    results.mkdir(parents=True)
    (results / "speculative.json").write_text(json.dumps(RESULT))
    page, tables = tmp_path / "README.md", ("speculative", "loops", "draft_costs")

    def show(drafts: str) -> str:
        page.write_text("".join(f"<!-- table: {name} results=speculative drafts={drafts} -->\n<!-- end -->\n"
                                for name in tables))
        render(tmp_path, check=False, current=no_hash)
        return page.read_text()

    text = show("early-exit:15")
    assert text.count("| early-exit:15 |") == 1 and "| ngram" not in text and "| json | 1 of 12 |" in text
    assert show("ngram").count("| ngram") == 2 + 2 + 1, "two rows, two columns of loops, one cost"
    assert show("ngram@4").count("| ngram") == 1 + 1 + 1 and show("ngram@2+pause").count("| ngram") == 1 + 1
    with pytest.raises(ValueError, match=r"no draft 'nogram' in these results; there are ngram, ngram@4, ngram@2\+pa"):
        show("nogram")


# ---- the command ----------------------------------------------------------------------------------------------

def exit_code(*arguments: str) -> object:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    return stopped.value.code


@pytest.mark.parametrize(("arguments", "message"), [
    (("--drafts", "ngram"), "drafts must be NAME@K or NAME@K+pause, separated by commas, got 'ngram'"),
    (("--drafts", "@4"), "drafts must be NAME@K or NAME@K+pause, separated by commas, got '@4'"),
    (("--drafts", "ngram@4,"), "drafts must be NAME@K or NAME@K+pause, separated by commas, got ''"),
    (("--drafts", "ngram@4+paws"), "drafts must be NAME@K or NAME@K+pause, separated by commas, got 'ngram@4+paws'"),
    (("--drafts", "ngram@0"), "num_speculative_tokens must be at least 1, got 0"),
    (("--drafts", "early-exit@4"), 'early-exit needs a number of layers, as in "early-exit:6", got \'early-exit\''),
    (("--drafts", "ngram@4,ngram@4"), "drafts has ngram@4 twice"),
    (("--pause-cost", "-1"), "pause-cost must be at least 0, got -1"),
    (("--pause-cost", "nan"), "pause-cost must be at least 0, got nan"),
    (("--kinds", "code,prose"), "unknown kind 'prose'; the kinds are code, json, conversation"),
    (("--limit", "0"), "limit must be at least 1, got 0"),
    (("--widths", "1,x"), "widths must be whole numbers separated by commas, got '1,x'"),
    (("--widths", "32,4"), "widths must begin with 1, where loops are found, got 4, 32"),
    (("--widths", "0,1"), "widths must begin with 1, where loops are found, got 0, 1"),
    (("--widths", "1,600"), "max_num_seqs 600 is over max_num_batched_tokens 512"),
    (("--max-tokens", "1"), "max-tokens must be at least 2 to have a step after the first, got 1"),
    (("--rounds", "0"), "rounds must be at least 1, got 0")])
def test_bad_input_is_one_line_and_loads_no_model(arguments: tuple[str, ...], message: str,
                                                  monkeypatch: pytest.MonkeyPatch,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "load", lambda *_: pytest.fail("a model was loaded for a command that cannot run"))
    assert exit_code("speculative", *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"benchmarks: {message}") and error.count("\n") == 1


def test_report_and_store_end_to_end(tiny: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                     capsys: pytest.CaptureFixture[str]) -> None:
    """Over the real engines, by the real clock."""
    monkeypatch.setattr(command, "load", lambda *_: tiny)
    monkeypatch.setattr(chats, "encode", lambda model, chosen: {kind: [[3, 4, 5] * 4] * len(each)
                                                                for kind, each in chosen.items()})
    out, copied = tmp_path / "result.json", tmp_path / "copy.json"
    assert exit_code("speculative", "--drafts", "ngram@2,early-exit:1@2+pause", "--kinds", "json,code", "--limit", "2",
                     "--max-tokens", "8", "--widths", "2,1", "--out", str(out)) == 0
    printed = capsys.readouterr()
    assert "Speculative: " in printed.out and "Draft costs: " in printed.out
    result = load(out)
    assert (result["kind"], len(result["rows"]), result["skipped"]) == ("speculative", 2 * 2 * 2, [])
    told = [line for line in printed.err.splitlines() if line.startswith("round ")]
    assert len(told) == 2 * (2 + 3) and not told[-1].endswith(" left")   # all that was announced was told of
    assert exit_code("store", str(out), str(copied)) == 0
    assert load(copied) == {**without_raw(result), "source": "copy"}
    assert exit_code("report", str(copied), "--markdown") == 0
    assert "**Speculative: " in capsys.readouterr().out


def test_a_row_that_is_not_whole_is_named(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(RESULT | {"rows": [{"name": "x"}]}))
    with pytest.raises(ValueError, match="rows with code_hash, draft, k, name, prompts_kind, speedup, tok_s, width"):
        load(path)
    path.write_text(json.dumps({key: value for key, value in RESULT.items() if key not in ("loops", "costs")}))
    with pytest.raises(ValueError, match="not a whole result, loops, costs missing"):
        load(path)
