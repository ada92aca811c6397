"""What a prefix cache saves, finds and costs: counted on real engines over tiny models, timed by scripted clocks."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import __main__ as cli
from benchmarks import command, scenarios
from benchmarks.overhead import NoArithmetic, Overhead
from benchmarks.radix import PUBLISHED, Prefixes, caching, forget, published
from benchmarks.render import render
from benchmarks.report import markdown, print_tables
from benchmarks.result_file import load, without_raw
from benchmarks.scenarios import Sizes
from benchmarks.sharing import Sharing, scheduling
from benchmarks.stopwatch import Stopwatch
from liteinfer import lineage
from liteinfer.cache.radix import RadixTree
from liteinfer.lineage import Row
from liteinfer.loading import LoadedModel, tiny_model
from liteinfer.radix_manager import RadixManager
from liteinfer.request import Request, SamplingParams
from tests.conftest import build as build_row
from tests.results import no_hash

MACHINE = {"name": "Toy CPU", "threads": 2}
BLOCK = 16


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Tick(Clock):
    """A microsecond passes at every look."""

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


class Paced:
    """An engine of the ladder whose steps take a millisecond for each token computed, times its pace."""

    def __init__(self, inner: Any, clock: Clock, pace: float, asked: list[Request]) -> None:
        self.__dict__.update(inner=inner, clock=clock, pace=pace, asked=asked)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.inner, name, value)

    def add(self, request: Request) -> None:
        self.asked.append(request)
        self.inner.add(request)

    def step(self) -> Any:
        before = self.inner.counters.tokens_computed
        events = self.inner.step()
        self.clock.now += self.pace * 0.001 * (self.inner.counters.tokens_computed - before)
        return events


class Quiet:
    """A watch that remembers."""

    def __init__(self) -> None:
        self.lines: list[tuple[Any, ...]] = []

    def passed(self, name: str, width: int, round_: int, what: str, headline: float | None) -> None:
        self.lines.append((name.removeprefix("liteinfer-"), round_, headline))

    def stopped(self, name: str, width: int, reason: str) -> None:
        self.lines.append((name.removeprefix("liteinfer-"), reason))


Pace = Callable[[int], float]   # how many engines were built before -> milliseconds per token


def pacing(clock: Clock, pace: Pace = lambda built: 1.0, asked: list[Request] | None = None,
           settings_seen: list[dict[str, Any]] | None = None) -> Callable[..., Paced]:
    seen, requests = [] if settings_seen is None else settings_seen, [] if asked is None else asked

    def make(row: Row, model: LoadedModel, **settings: Any) -> Paced:
        seen.append(settings)
        return Paced(lineage.build(row, model, **settings), clock, pace(len(seen) - 1), requests)

    return make


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return tiny_model(max_position_embeddings=2048)


def spied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks each eviction is asked for, as it happens."""
    asked, evict = list[int](), RadixTree.evict

    def spy(tree: RadixTree, n: int) -> int:
        asked.append(n)
        return evict(tree, n)

    monkeypatch.setattr(RadixTree, "evict", spy)
    return asked


# ---- the radix table ------------------------------------------------------------------------------------------

def prefixes(model: LoadedModel, lengths: tuple[int, ...] = (16, 64), rounds: int = 1, question: int = 8,
             rows: list[Row] | None = None, out: Path | None = None, **pacing_of: Any) -> Prefixes:
    clock = Clock()
    return Prefixes(model, rows or caching("radix"), lengths, question, rounds, MACHINE, Quiet(), out,
                    pacing(clock, **pacing_of), clock)


def test_a_cached_prefix_costs_its_question_only(tiny: LoadedModel) -> None:
    """1,024 tokens are three steps of at most 512: the time to first token is over all of them."""
    result = prefixes(tiny, (16, 256, 1024)).run()
    assert [(row["prefix"], row["cold_tokens"], row["cached_tokens"]) for row in result["rows"]] == [
        (16, 24, 8), (256, 264, 8), (1024, 1032, 8)]
    for row in result["rows"]:
        assert row["cold_ms"] == pytest.approx(row["prefix"] + 8) and row["cached_ms"] == pytest.approx(8)
        assert row["speedup"] == pytest.approx((row["prefix"] + 8) / 8)
    assert result["growth"] == pytest.approx(1)
    assert (result["question"], result["kind"], result["skipped"]) == (8, "radix", [])


def test_both_are_timed_after_a_warm_up_on_other_text_of_the_same_length(tiny: LoadedModel) -> None:
    asked: list[Request] = []
    prefixes(tiny, (32,), asked=asked).run()
    one, two, cold, cached = [request.prompt_token_ids for request in asked]
    assert cold[:32] == cached[:32] and cold[32:] != cached[32:] and len(cached) == 40
    assert one[:32] == two[:32] and one[:8] != cold[:8]
    assert (one[32:], two[32:]) == (cold[32:], cached[32:])
    assert [request.num_cached_tokens for request in asked] == [0, 32, 0, 32]
    assert {request.params.max_tokens for request in asked} == {1}


def test_the_pool_holds_the_longest_prefix_and_two_questions_and_nothing_is_evicted(
        tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    evicted = spied(monkeypatch)
    seen: list[dict[str, Any]] = []
    result = prefixes(tiny, (16, 64), settings_seen=seen).run()
    assert seen == [{"max_model_len": 73, "block_size": 16, "num_blocks": 6}] * 2
    assert result["pool"].startswith("KV pool: 6 blocks of 16 tokens")
    assert evicted == [0, 1, 0, 4]   # the engine is new, then the warm-up's prefix goes; a question fills no block
    evicted.clear()
    longer = prefixes(tiny, (16, 64), question=20)
    assert (longer.num_blocks, [row["cached_tokens"] for row in longer.run()["rows"]]) == (4 + 2 * 2, [20, 20])
    assert evicted == [0, 3, 0, 6]   # now each of the two questions fills one


def test_prefixes_take_turns_and_a_figure_is_the_median_over_rounds(tiny: LoadedModel) -> None:
    paces = [1.0, 1.0, 5.0, 5.0, 2.0, 2.0]           # by round
    run = prefixes(tiny, (16, 32), rounds=3, pace=lambda built: paces[built])
    result = run.run()
    assert [line[:2] for line in run.watch.lines] == [
        ("radix, prefix 16", 0), ("radix, prefix 32", 0), ("radix, prefix 32", 1), ("radix, prefix 16", 1),
        ("radix, prefix 16", 2), ("radix, prefix 32", 2)]
    first = result["rows"][0]
    assert (first["cold_ms"], first["cached_ms"]) == (pytest.approx(48), pytest.approx(16))
    assert first["cold_range"] == pytest.approx([24, 120]) and first["cached_range"] == pytest.approx([8, 40])
    assert first["speedup_range"] == pytest.approx([3, 3]) and len(first["rounds"]) == 3


def test_the_speed_up_is_the_median_of_the_rounds_ratios(tiny: LoadedModel) -> None:
    run = prefixes(tiny, (16,), rounds=3)
    run.lines[0].rounds = [{"cold_ms": 10.0, "cached_ms": 1.0}, {"cold_ms": 40.0, "cached_ms": 20.0},
                           {"cold_ms": 30.0, "cached_ms": 10.0}]
    row, = run.result()["rows"]
    assert (row["cold_ms"], row["cached_ms"], row["speedup"], row["speedup_range"]) == (30.0, 10.0, 3.0, [2.0, 10.0])


def test_the_published_figures_are_theirs() -> None:
    theirs = {prefix: published(prefix) for prefix in PUBLISHED}
    assert {prefix: each and each["speedup"] for prefix, each in theirs.items()} == {
        256: 7.9, 512: 11.7, 1024: 18.8, 2048: 31.4}
    assert published(2048) == {"cold_ms": 465.0, "cached_ms": 14.8, "speedup": 31.4} and published(128) is None


def test_an_engine_that_does_not_reuse_the_prefix_has_no_line(tiny: LoadedModel) -> None:
    run = prefixes(tiny, (32,), rounds=2, rows=[lineage.find("continuous")])
    result = run.run()
    reason = "RuntimeError: cold and cached computed (40, 40) tokens, not (40, 8)"
    assert result["rows"] == [] and result["pool"] is None and result["growth"] is None
    assert result["skipped"] == [{"name": "liteinfer-continuous, prefix 32", "reason": reason}]
    assert run.watch.lines == [("continuous, prefix 32", reason)]


def test_cold_means_that_no_block_is_held(tiny: LoadedModel) -> None:
    engine = build_row("radix", tiny, num_blocks=8)
    engine.add(Request("a", [1] * 20, SamplingParams(max_tokens=4, ignore_eos=True)))
    engine.step()
    with pytest.raises(RuntimeError, match="2 KV blocks are still held: what follows would not start cold"):
        forget(engine)
    while engine.has_unfinished():
        engine.step()
    assert engine.cache.pool.num_used == 1
    forget(engine)
    assert engine.cache.pool.num_used == 0


def test_ctrl_c_keeps_what_finished(tiny: LoadedModel, tmp_path: Path) -> None:
    def stop(built: int) -> float:
        if built == 1:
            raise KeyboardInterrupt
        return 1.0

    out = tmp_path / "radix.json"
    result = prefixes(tiny, (16, 32), rounds=2, out=out, pace=stop).run()
    assert [row["prefix"] for row in result["rows"]] == [16] and result["interrupted"] is True
    assert {**load(out), "source": None} == {**result, "source": None}
    assert "The run was interrupted" in markdown([result], ("radix",), no_hash)


def exit_code(*arguments: str) -> object:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    return stopped.value.code


@pytest.mark.parametrize(("arguments", "message"), [
    (("radix", "--prefixes", "16,x"), "prefixes must be whole numbers separated by commas, got '16,x'"),
    (("radix", "--prefixes", "256,500"), "prefixes must be multiples of the block size 16, got 500"),
    (("radix", "--prefixes", "0"), "prefixes must be multiples of the block size 16, got 0"),
    (("radix", "--prefixes", "4112"), "prefixes must be at most 4096, got 4112"),
    (("radix", "--question", "0"), "question must be at least 1, got 0"),
    (("radix", "--question", "5000"), "question must be at most 4096, got 5000"),
    (("radix", "--rounds", "0"), "rounds must be at least 1, got 0"),
    (("radix", "--rows", "continuous"), "liteinfer-continuous has no prefix cache; the table is there for "
                                        "liteinfer-radix"),
    (("radix", "--rows", "fastest"), "unknown row 'fastest'"),
    (("sharing", "--rows", "paged"), "liteinfer-paged has no KV manager; the rows that have one: "
                                     "liteinfer-continuous, liteinfer-radix"),
    (("sharing", "--rounds", "0"), "rounds must be at least 1, got 0"),
    (("overhead", "--sequences", "0"), "sequences must be at least 1, got 0"),
    (("overhead", "--osl", "1"), "osl must be at least 2, got 1"),
    (("overhead", "--isl", "0"), "isl must be at least 1, got 0"),
    (("overhead", "--rounds", "0"), "rounds must be at least 1, got 0"),
    (("overhead", "--rows", "eager"), "liteinfer-eager has no KV manager"),
])
def test_bad_input_is_one_line_and_loads_no_model(arguments: tuple[str, ...], message: str,
                                                  monkeypatch: pytest.MonkeyPatch,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "load", lambda *_: pytest.fail("a model was loaded for a command that cannot run"))
    assert exit_code(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"benchmarks: {message}") and error.count("\n") == 1


def test_a_row_this_machine_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineage, "missing", lambda row: "needs CUDA")
    for choose in (caching, scheduling):
        with pytest.raises(ValueError, match="this machine cannot run liteinfer-radix: it needs CUDA"):
            choose("radix")


def test_prefixes_that_the_model_cannot_hold_are_refused(tiny: LoadedModel) -> None:
    with pytest.raises(ValueError, match=r"prefix 2048 \+ question 8 \+ 1 = 2057 tokens is over the model's 2048"):
        prefixes(tiny, (16, 2048))


# ---- the stopwatch --------------------------------------------------------------------------------------------

class Busy:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def work(self, seconds: float, fails: bool = False) -> float:
        self.clock.now += seconds
        if fails:
            raise RuntimeError("no")
        return seconds

    def rest(self, seconds: float) -> None:
        self.clock.now += seconds


def test_a_stopwatch_adds_up_what_it_watches_and_nothing_else() -> None:
    clock = Clock()
    busy, other = Busy(clock), Busy(clock)
    watch = Stopwatch(clock).watch(busy, "work")
    assert busy.work(2.0) == 2.0
    busy.rest(5.0)
    other.work(7.0)
    with pytest.raises(RuntimeError):
        busy.work(seconds=1.0, fails=True)
    assert watch.seconds == 3.0


# ---- workloads that share, and one that does not --------------------------------------------------------------

SMALL = Sizes(conversations=2, turns=3, said=20, answer=12, header=496, questions=4, question=16, verdict=2, distinct=2,
              isl=20, osl=3)


def sharing(model: LoadedModel, rounds: int = 1, sizes: Sizes = SMALL, rows: str = "continuous,radix",
            out: Path | None = None, **pacing_of: Any) -> Sharing:
    clock = Clock()
    return Sharing(model, scheduling(rows), scenarios.scenarios(model, sizes), rounds, MACHINE, Quiet(), out,
                   pacing(clock, **pacing_of), clock)


@pytest.fixture(scope="module")
def shared(tiny: LoadedModel) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["workload"], row["name"].removeprefix("liteinfer-")): row for row in sharing(tiny).run()["rows"]}


def test_rows_stand_by_workload(shared: dict[tuple[str, str], dict[str, Any]]) -> None:
    assert list(shared) == [(work, row) for work in ("multiturn", "fewshot", "distinct")
                            for row in ("continuous", "radix")]


def test_a_turn_finds_the_conversation_before_it(shared: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Prompts of 20, 52 and 84 tokens; 31 and 63 tokens are stored before the last two, 1 and 3 whole blocks."""
    without, cached = shared["multiturn", "continuous"], shared["multiturn", "radix"]
    assert without["prompts"] == cached["prompts"] == 6
    assert without["prompt_tokens"] == cached["prompt_tokens"] == 2 * (20 + 52 + 84)
    assert (without["prefix_hit_tokens"], cached["prefix_hit_tokens"]) == (0, 2 * (16 + 48))
    assert cached["hit_rate"] == 128 / 312
    assert without["tokens_computed"] == 312 + 6 * 11
    assert cached["tokens_computed"] == without["tokens_computed"] - 128


def test_questions_find_the_examples_before_them(shared: dict[tuple[str, str], dict[str, Any]]) -> None:
    """The first prompt fills the first step's 512 tokens, so all others find its 31 whole blocks."""
    without, cached = shared["fewshot", "continuous"], shared["fewshot", "radix"]
    assert cached["prompt_tokens"] == 4 * 512 and cached["prefix_hit_tokens"] == 3 * 496
    assert without["tokens_computed"] == 4 * 512 + 4
    assert cached["tokens_computed"] == 512 + 3 * 16 + 4
    assert cached["ttft_gain"] > 2 and cached["wall_gain"] > 2


def test_prompts_that_start_in_one_step_do_not_find_each_other(tiny: LoadedModel) -> None:
    """Three prompts of 48 tokens fit one step: when they are matched, nothing of them is written yet."""
    work = scenarios.fewshot(tiny, Sizes(header=32, question=16, questions=3))
    clock = Clock()
    row, = Sharing(tiny, scheduling("radix"), [work], 1, MACHINE, Quiet(), None, pacing(clock), clock).run()["rows"]
    assert (row["prefix_hit_tokens"], row["hit_rate"]) == (0, 0.0)


def test_with_nothing_to_share_both_rows_do_the_same(shared: dict[tuple[str, str], dict[str, Any]]) -> None:
    without, cached = shared["distinct", "continuous"], shared["distinct", "radix"]
    counted = ("prompt_tokens", "prefix_hit_tokens", "tokens_computed", "forward_passes", "preemptions")
    assert {key: cached[key] for key in counted} == {key: without[key] for key in counted} == {
        "prompt_tokens": 40, "prefix_hit_tokens": 0, "tokens_computed": 44, "forward_passes": 3, "preemptions": 0}
    for row in (without, cached):          # 40 tokens in the first step, 2 in each of the others, 1 ms a token
        assert (row["ttft_p50_ms"], row["wall_s"]) == (pytest.approx(40), pytest.approx(0.044))
        assert (row["wall_gain"], row["ttft_gain"]) == (pytest.approx(1), pytest.approx(1))
        assert row["kv_ms"] == row["kv_share"] == 0   # this clock moves in steps only, between the manager's calls


def test_a_cache_changes_no_token(shared: dict[tuple[str, str], dict[str, Any]]) -> None:
    assert [row["differs_from_first"] for row in shared.values()] == [
        {"differ": 0, "prompts": prompts} for prompts in (6, 6, 4, 4, 2, 2)]


def test_the_wall_of_a_conversation_is_the_sum_of_its_turns(shared: dict[tuple[str, str], dict[str, Any]]) -> None:
    """1 ms a token: every token computed is in some turn's wall."""
    for name in ("continuous", "radix"):
        row = shared["multiturn", name]
        assert row["wall_s"] == pytest.approx(row["tokens_computed"] / 1000)
    assert shared["multiturn", "radix"]["wall_gain"] == pytest.approx(378 / 250)


def test_every_turn_starts_cold_in_a_pool_that_holds_everything(tiny: LoadedModel,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    evicted = spied(monkeypatch)
    seen: list[dict[str, Any]] = []
    run = sharing(tiny, rounds=2, settings_seen=seen)
    result = run.run()
    blocks = 4 * 33                        # of the 4 prompts of 512 tokens and 2 more
    assert {tuple(settings.items()) for settings in seen} == {(("block_size", 16), ("num_blocks", blocks + 2 + 1))}
    assert len(seen) == 12 and result["pool"].startswith("KV pool: 135 blocks")
    assert evicted == [4 * 2] * 6          # of the warm-ups only: 4 prompts of 32 tokens each
    assert [len(row["rounds"]) for row in result["rows"]] == [2] * 6 and result["skipped"] == []


def test_over_rounds_the_medians_and_the_median_of_the_ratios(tiny: LoadedModel) -> None:
    paces = [1.0] * 6 + [2.0, 4.0] * 3 + [1.0] * 6
    result = sharing(tiny, rounds=3, pace=lambda built: paces[built]).run()
    distinct = result["rows"][4]
    assert distinct["wall_s"] == pytest.approx(0.044) and max(distinct["wall_range"]) > 0.08
    assert result["rows"][5]["wall_gain"] == pytest.approx(1)


def test_counts_that_change_between_rounds_stop_the_case(tiny: LoadedModel) -> None:
    asked: list[Request] = []
    run = sharing(tiny, rounds=2, rows="continuous", asked=asked)
    case = run.cases[2]
    turn = run._turn

    def longer(this: Any, round_: int) -> None:
        if this is case and round_ == 1:
            this.scenario.openings[0].append(1)
        turn(this, round_)

    run._turn = longer  # type: ignore[assignment, method-assign]
    result = run.run()
    assert [len(row["rounds"]) for row in result["rows"]] == [2, 2, 1]
    assert result["rows"][2]["stopped"].startswith("RuntimeError: counted {")


def test_a_request_that_fails_is_no_measurement(tiny: LoadedModel) -> None:
    run = sharing(tiny, rows="radix")
    run.scenarios[2].openings[1][3] = -1
    result = run.run()
    assert [row["workload"] for row in result["rows"]] == ["multiturn", "fewshot"]
    skip, = result["skipped"]
    assert skip["name"] == "liteinfer-radix, distinct" and "RuntimeError: turn-0-1: ValueError" in skip["reason"]


def test_conversations_that_the_model_cannot_hold_are_refused(tiny: LoadedModel) -> None:
    with pytest.raises(ValueError, match="tokens is over the model's 2048"):
        sharing(tiny, sizes=Sizes(header=2040, questions=1))


class Chatty:
    """A tokenizer of one token per character, with a chat template."""

    chat_template = "yes"

    def __init__(self, counts: bool = False) -> None:
        self.counts = counts

    def __call__(self, text: str, **_: object) -> dict[str, list[Any]]:
        return {"input_ids": [min(ord(c), 127) for c in text], "offset_mapping": [(i, i + 1) for i in range(len(text))]}

    def apply_chat_template(self, messages: list[dict[str, str]], **_: object) -> str:
        said = "".join(f"[{message['role']}]{message['content']}|" for message in messages)
        return f"{len(messages) if self.counts else ''}{said}[assistant]"

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(map(chr, ids))


def test_conversations_go_through_the_chat_template() -> None:
    model = tiny_model(vocab_size=128)
    model.tokenizer = Chatty()
    work = scenarios.multiturn(model, Sizes(conversations=2, turns=2, said=30, answer=5))
    assert work.what == "2 conversations of 2 turns, in the model's chat template"
    opening, further = ("".join(map(chr, said[1])) for said in (work.openings, work.follow_ups[0]))
    assert opening.startswith("[user]") and opening.endswith("|[assistant]") and len(opening) == 6 + 30 + 12
    assert further.startswith("|[user]") and further.endswith("|[assistant]") and len(further) == 7 + 30 + 12
    said = {"".join(map(chr, ids)) for turn in (work.openings, *work.follow_ups) for ids in turn}
    assert len(said) == 4
    assert (work.turns, work.prompts, work.lengths) == (2, 4, [48 + 49 + 10] * 2)


@pytest.mark.parametrize("template", ["rewrites", "none"])
def test_a_template_that_rewrites_the_past_is_not_used(template: str) -> None:
    model, tokenizer = tiny_model(vocab_size=128), Chatty(counts=True)
    if template == "none":
        tokenizer.chat_template = ""
    model.tokenizer = tokenizer
    work = scenarios.multiturn(model, Sizes(conversations=2, turns=2, said=30))
    assert work.what.endswith("without a template") and {len(opening) for opening in work.openings} == {30}


def test_the_workloads_of_the_bundled_model(smol: LoadedModel) -> None:
    """Nothing runs; its template only appends, and a conversation's text is what the template writes."""
    talk, few, none = scenarios.scenarios(smol)
    assert "in the model's chat template" in talk.what and talk.turns == 4 and talk.prompts == 16
    text = smol.decode(talk.openings[0] + smol.encode("Sure.") + talk.follow_ups[0][0], skip_special_tokens=False)
    user = smol.decode(smol.encode_chat([{"role": "user", "content": "X"}]), skip_special_tokens=False)
    before, after = user.split("X")
    assert text.startswith(before) and text.endswith(after) and text.count("<|im_start|>assistant") == 2
    assert f"Sure.{after.split('<|im_start|>')[0]}<|im_start|>user" in text
    assert len({tuple(opening[:256]) for opening in few.openings}) == 1 and len(few.openings) == 12
    assert len({tuple(opening[:8]) for opening in none.openings}) == 12
    assert max(work.longest for work in (talk, few, none)) < 512


# ---- what Python costs in a step ------------------------------------------------------------------------------

def overhead(model: LoadedModel, sequences: int = 3, isl: int = 20, osl: int = 5, rounds: int = 1,
             rows: str = "continuous,radix", out: Path | None = None, clock: Clock | None = None,
             build: Callable[..., Any] = lineage.build) -> Overhead:
    return Overhead(model, scheduling(rows), sequences, isl, osl, rounds, MACHINE, Quiet(), out, build,
                    clock or Tick())


def test_a_step_is_split_into_its_parts(tiny: LoadedModel) -> None:
    """Each part is one look at the clock long, the whole the looks in between; the rest is the update's."""
    result = overhead(tiny).run()
    for row in result["rows"]:
        assert row["step_us"] == pytest.approx(7) and row["update_us"] == pytest.approx(4)
        assert [row[part] for part in ("schedule_us", "layout_us", "sampling_us")] == pytest.approx([1, 1, 1])
        assert row["steps"] == 4           # of 5 tokens each the first is the prompts' step's
        assert row["kv_us"] == pytest.approx(2 * 3)   # an allocation and a publication of each sequence
    assert result["real_step_ms"] == pytest.approx(0.001)
    assert result["tree_us"] == pytest.approx(0) and result["tree_share"] == pytest.approx(0)


def test_the_tree_is_what_the_manager_takes_longer(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, publish = Tick(), RadixManager.publish

    def slow(manager: RadixManager, request: Request) -> None:
        clock.now += 5e-6
        publish(manager, request)

    monkeypatch.setattr(RadixManager, "publish", slow)
    result = overhead(tiny, clock=clock).run()
    assert result["tree_us"] == pytest.approx(3 * 5)
    assert result["tree_share"] == pytest.approx(3 * 5 / 1000 / 0.001)
    assert result["rows"][1]["update_us"] == pytest.approx(4 + 3 * 5)   # it is published in the update


def test_only_steps_in_which_all_decode_are_counted(tiny: LoadedModel) -> None:
    """Prompts of 300, 301 and 302 tokens start in the first and the second step: the last ends alone."""
    row, _ = overhead(tiny, isl=300, osl=6).run()["rows"]
    assert row["steps"] == 4               # the first has had its first token one step before the others


def test_the_scripted_engine_computes_nothing_and_the_real_one_is_the_first_row(tiny: LoadedModel) -> None:
    seen: list[tuple[str, str, dict[str, Any]]] = []

    def make(row: Row, model: LoadedModel, **settings: Any) -> Any:
        seen.append((row.name.removeprefix("liteinfer-"), model.name, settings))
        engine = lineage.build(row, model, **settings)
        if settings.get("runner") is NoArithmetic:
            engine.llama.hidden_states = None   # or it would be called
        return engine

    named = tiny_model("qwen2", max_position_embeddings=512)
    result = overhead(named, rounds=2, build=make).run()
    assert [(name, model, "runner" in settings) for name, model, settings in seen] == [
        ("continuous", "tiny-qwen2", False), ("continuous", "tiny-llama", True), ("radix", "tiny-llama", True),
        ("radix", "tiny-llama", True), ("continuous", "tiny-llama", True)]
    assert {(s["max_num_seqs"], s["max_model_len"], s["num_blocks"]) for *_, s in seen} == {(3, 40, 3 * 3 + 1)}
    assert result["skipped"] == [] and [len(row["rounds"]) for row in result["rows"]] == [2, 2]


def test_prompts_of_all_lengths_modulo_the_block_size(tiny: LoadedModel) -> None:
    asked = overhead(tiny, sequences=20, isl=33)._requests(tiny)
    assert [len(request.prompt_token_ids) for request in asked] == [33 + i % BLOCK for i in range(20)]
    assert len({tuple(request.prompt_token_ids[:8]) for request in asked}) == 20


def test_outputs_too_short_for_everybody_to_decode_together(tiny: LoadedModel) -> None:
    with pytest.raises(ValueError, match="osl 2 is too short: in no step did all 3 sequences decode"):
        overhead(tiny, isl=300, osl=2).run()
    with pytest.raises(ValueError, match="isl 2055 \\+ osl 5 = 2060 tokens is over the model's 2048"):
        overhead(tiny, isl=2040)


def test_prompts_that_share_would_be_found_out(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.overhead.take", lambda model, isl, count: [[1] * isl] * count)
    result = overhead(tiny, isl=300, osl=6, rows="radix").run()
    assert result["rows"] == []
    assert "prompt tokens were found in the prefix cache, and none should" in result["skipped"][0]["reason"]


# ---- the tables -----------------------------------------------------------------------------------------------

HEAD: dict[str, Any] = {
    "schema": 1, "date": "2026-12-01", "versions": {"torch": "2.13.0"}, "code_hash": "aaaa", "machine": MACHINE,
    "model": {"name": "toy", "parameters": 134515008, "dtype": "float32"}, "rounds": 3, "skipped": [],
    "pool": "KV pool: 130 blocks of 16 tokens, 95.8 MB (as given)"}
RADIX = HEAD | {"kind": "radix", "question": 8, "growth": 1.25, "rows": [
    {"name": "liteinfer-radix", "prefix": 2048, "cold_ms": 5000.0, "cold_range": [4900.0, 5100.0], "cached_ms": 50.0,
     "cached_range": [45.5, 55.0], "speedup": 100.5, "speedup_range": [95.0, 110.0], "cold_tokens": 2056,
     "cached_tokens": 8, "published": published(2048), "code_hash": "bbbb"},
    {"name": "liteinfer-radix", "prefix": 4096, "cold_ms": 9000.0, "cold_range": [8900.0, 9100.0], "cached_ms": 60.0,
     "cached_range": [55.0, 65.0], "speedup": 150.0, "speedup_range": [140.0, 160.0], "cold_tokens": 4104,
     "cached_tokens": 8, "published": None, "code_hash": "bbbb"}]}
SHARING = HEAD | {"kind": "sharing", "workloads": [{"name": "fewshot", "what": "12 questions", "prompt_hash": "p"},
                                                   {"name": "distinct", "what": "12 prompts", "prompt_hash": "q"}],
                  "rows": [
    {"name": "liteinfer-continuous", "workload": "fewshot", "prompts": 12, "prompt_tokens": 3264, "hit_rate": 0.0,
     "tokens_computed": 3348, "ttft_p50_ms": 7000.0, "ttft_range": [6900.0, 7100.0], "wall_s": 12.0,
     "wall_range": [11.0, 13.0], "wall_gain": 1.0, "kv_ms": 1.0, "kv_share": 0.0001,
     "differs_from_first": {"differ": 0, "prompts": 12}, "code_hash": "cccc"},
    {"name": "liteinfer-radix", "workload": "distinct", "prompts": 12, "prompt_tokens": 1152, "hit_rate": 0.0,
     "tokens_computed": 1332, "ttft_p50_ms": 900.0, "ttft_range": [890.0, 910.0], "wall_s": 6.0,
     "wall_range": [5.0, 7.0], "wall_gain": 0.99, "kv_ms": 2.5, "kv_share": 0.00042,
     "differs_from_first": {"differ": 1, "prompts": 12}, "code_hash": "bbbb"}]}
OVERHEAD = HEAD | {"kind": "overhead", "sequences": 32, "isl": 128, "osl": 48, "real_step_ms": 200.0, "tree_us": 20.0,
                   "tree_share": 0.0001, "rows": [
    {"name": name, "step_us": 700.0, "step_range": [690.0, 1710.0], "schedule_us": 100.0, "layout_us": 200.0,
     "sampling_us": 300.0, "update_us": 100.0, "kv_us": kv, "steps": 39, "code_hash": code}
    for name, kv, code in (("liteinfer-continuous", 30.0, "cccc"), ("liteinfer-radix", 50.0, "bbbb"))]}


def test_the_radix_table() -> None:
    assert markdown([RADIX], current=no_hash) == """\
toy (134.5 M parameters, float32) · Toy CPU, 2 threads · 2026-12-01, 3 rounds · torch 2.13.0

**Radix: time to first token after a shared prefix**

| prefix tokens | cold ms | cached ms | tokens cold | tokens cached | speed-up | published speed-up |
|--:|--:|--:|--:|--:|--:|--:|
| 2,048 | 5,000 (4,900..5,100) | 50.0 (45.5..55.0) | 2,056 | 8 | 100.5x | 31.4x |
| 4,096 | 9,000 (8,900..9,100) | 60.0 (55.0..65.0) | 4,104 | 8 | 150.0x | - |

liteinfer-radix: a prefix and 8 tokens after it, first in an empty tree, then another question after the same prefix. \
Speed-up: the median of the rounds' ratios.

Published: mini-infer's own figures on its authors' machine (RTX 3050 6 GB laptop GPU), not measured here: 2,048 \
tokens 465.0 and 14.8 ms.

KV pool: 130 blocks of 16 tokens, 95.8 MB (as given).
"""
    two = copy.deepcopy(RADIX) | {"rounds": 1}
    two["rows"][1] |= {"name": "liteinfer-other"}
    text = markdown([two], ("radix",), no_hash)
    assert "| row | prefix tokens |" in text and "| liteinfer-other | 4,096 | 9,000 | 60.0 |" in text
    assert ".." not in text.split("\n\n")[1]


def test_the_sharing_table() -> None:
    assert markdown([SHARING], ("sharing",), no_hash) == """\
**Sharing: what a prefix cache finds**

| workload | row | prompts | prompt tokens | hit rate | tokens computed | TTFT p50 ms | wall s | vs first |
|:--|:--|--:|--:|--:|--:|--:|--:|--:|
| fewshot | liteinfer-continuous | 12 | 3,264 | 0.0% | 3,348 | 7,000 (6,900..7,100) | 12.0 (11.0..13.0) | 1.00x |
| distinct | liteinfer-radix | 12 | 1,152 | 0.0% | 1,332 | 900.0 (890.0..910.0) | 6.0 (5.0..7.0) | 0.99x |

fewshot: 12 questions. distinct: 12 prompts.

With nothing to share liteinfer-radix spends 2.5 ms in its KV manager, 0.04% of the wall.

Other tokens than the first row: liteinfer-radix in 1 of 12 prompts of distinct.

KV pool: 130 blocks of 16 tokens, 95.8 MB (as given).
"""


def test_the_overhead_table() -> None:
    assert markdown([OVERHEAD], ("overhead",), no_hash) == """\
**Overhead: what Python costs in a step**

| row | step µs | schedule | layout and tables | sampling | update | in the KV manager |
|:--|--:|--:|--:|--:|--:|--:|
| liteinfer-continuous | 700 (690..1,710) | 100 | 200 | 300 | 100 | 30 |
| liteinfer-radix | 700 (690..1,710) | 100 | 200 | 300 | 100 | 50 |

32 sequences decode; a runner that does no arithmetic, a vocabulary of 64, ISL 128 and up. In the KV manager: of \
schedule and update.

A real step of 32 sequences takes 200.0 ms, so the tree's 20 µs more are 0.010% of it.
"""
    alone = copy.deepcopy(OVERHEAD) | {"tree_us": None, "tree_share": None}
    assert "A real step" not in markdown([alone], ("overhead",), no_hash)


@pytest.mark.parametrize("result", [RADIX, SHARING, OVERHEAD])
def test_eighty_columns_cut_no_figure(result: dict[str, Any]) -> None:
    console = Console(file=io.StringIO(), width=80)
    print_tables([result], console, no_hash)
    text = console.file.getvalue()
    assert "…" not in text and max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(("result", "changed", "stale"), [
    (RADIX, "radix", True), (RADIX, "liteinfer-radix", True), (RADIX, "sharing", False),
    (SHARING, "sharing", True), (SHARING, "liteinfer-continuous", True), (SHARING, "overhead", False),
    (OVERHEAD, "overhead", True), (OVERHEAD, "liteinfer-radix", True), (OVERHEAD, "widths", False)])
def test_a_result_is_stale_if_its_own_code_or_a_row_s_has_changed(result: dict[str, Any], changed: str,
                                                                  stale: bool) -> None:
    hashes = {"liteinfer-radix": "bbbb", "liteinfer-continuous": "cccc", result["kind"]: "aaaa", changed: "new"}
    assert ("stale: the code has changed" in markdown([result], current=hashes.get)) == stale


def test_pages_take_tables_and_values(tmp_path: Path) -> None:
    results = tmp_path / "benchmarks/results"
    results.mkdir(parents=True)
    for result in (RADIX, SHARING, OVERHEAD):
        (results / f"{result['kind']}.json").write_text(json.dumps(result))
    page = tmp_path / "README.md"
    values = (("radix", "rows.0.speedup .1f"), ("radix", "rows.0.published.speedup .1f"), ("radix", "growth .2f"),
              ("sharing", "rows.1.kv_share .2%"), ("overhead", "tree_us .0f"), ("overhead", "rows.0.step_us .0f"))
    page.write_text("".join(f"<!-- table: {kind} results={kind} -->\n<!-- end -->\n"
                            for kind in ("radix", "sharing", "overhead"))
                    + " ".join(f"<!--v: results={name} {words}-->?<!--/v-->" for name, words in values) + "\n")
    assert len(render(tmp_path, check=False, current=no_hash)) == 9
    text = page.read_text()
    assert all(f"**{title}:" in text for title in ("Radix", "Sharing", "Overhead"))
    assert [part.split("-->")[-1] for part in text.splitlines()[-1].split("<!--/v-->")[:-1]] == [
        "100.5", "31.4", "1.25", "0.04%", "20", "700"]
    assert render(tmp_path, check=True, current=no_hash) == []
    found = render(tmp_path, check=True, current={"radix": "new"}.get)
    assert "benchmarks/results/radix.json is stale: its code has changed" in found


# ---- the commands ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("arguments", "rows"), [
    (("radix", "--prefixes", "32,16", "--question", "4", "--rounds", "2"), 2),
    (("sharing", "--rounds", "1"), 6),
    (("overhead", "--sequences", "2", "--isl", "5", "--osl", "3", "--rounds", "2"), 2)])
def test_report_and_store_end_to_end(tiny: LoadedModel, arguments: tuple[str, ...], rows: int, tmp_path: Path,
                                     monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Over the real engines, by the real clock."""
    monkeypatch.setattr(command, "load", lambda *_: tiny)
    monkeypatch.setattr(scenarios.scenarios, "__defaults__", (SMALL,))
    out, copied = tmp_path / "result.json", tmp_path / "copy.json"
    assert exit_code(*arguments, "--out", str(out)) == 0
    printed = capsys.readouterr()
    assert f"{arguments[0].title()}: " in printed.out
    result = load(out)
    assert (result["kind"], len(result["rows"]), result["skipped"]) == (arguments[0], rows, [])
    assert len([line for line in printed.err.splitlines() if line.startswith("round ")]) == rows * result["rounds"]
    assert exit_code("store", str(out), str(copied)) == 0
    assert load(copied) == {**without_raw(result), "source": "copy"}
    assert exit_code("report", str(copied), "--markdown") == 0
    assert f"**{arguments[0].title()}: " in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "row"), [("radix", "rows with cached_ms, code_hash, cold_ms, name, prefix, speedup"),
                                           ("sharing", "rows with code_hash, hit_rate, name, ttft_p50_ms, wall_s, w"),
                                           ("overhead", "rows with code_hash, kv_us, name, step_us")])
def test_a_row_that_is_not_whole_is_named(kind: str, row: str, tmp_path: Path) -> None:
    whole = {"radix": RADIX, "sharing": SHARING, "overhead": OVERHEAD}[kind]
    path = tmp_path / "r.json"
    path.write_text(json.dumps(whole | {"rows": [{"name": "x"}]}))
    with pytest.raises(ValueError, match=row):
        load(path)
    path.write_text(json.dumps({key: value for key, value in whole.items() if key != "rows"}))
    with pytest.raises(ValueError, match="not a whole result, rows missing"):
        load(path)
