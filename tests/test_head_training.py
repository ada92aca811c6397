"""Training a draft head: prompts, data, learning, a run that is cut short and goes on, the card."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.chats import all_chats
from liteinfer.loading import LoadedModel, load_model, tiny_model
from liteinfer.request import SamplingParams
from liteinfer.speculative.head_files import load_head, read_card, shipped_head, target_hash
from liteinfer.speculative.train import corpus
from liteinfer.speculative.train.ahead import Batch
from liteinfer.speculative.train.corpus import Example, answers, load, save
from liteinfer.speculative.train.fit import Learner, Settings, batches, frequent_tokens, new_weights
from liteinfer.speculative.train.plan import Plan
from liteinfer.speculative.train.prompts import KINDS, Grammar, Prompt, held_out, own, prompt, shipped
from liteinfer.speculative.train.run import Run
from tests.conftest import build, outputs
from tests.heads import features

pytestmark = pytest.mark.ch08


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_a_grammar_by_hand() -> None:
    grammar = Grammar({"code": ["{{{name:a} {name:a} {place}}}"]}, {"name": ["Ada", "Bo"], "place": ["in {town}"],
                                                                    "town": ["Oslo"]})
    drawn = {grammar.draw("code", str(seed)).text for seed in range(40)}
    assert drawn == {"{Ada Ada in Oslo}", "{Bo Bo in Oslo}"}
    assert grammar.draw("code", "7") == grammar.draw("code", "7")


@pytest.mark.parametrize("kind", KINDS)
def test_the_shipped_templates_make_thousands_of_prompts(kind: str) -> None:
    grammar = shipped()
    drawn = Counter(grammar.draw(kind, str(seed)).text for seed in range(1000))
    assert len(drawn) > 950
    for text in drawn:
        assert 8 <= len(text.split()) <= 140, text
        assert not re.search(r"\{\w+(:\w+)?\}", text) or kind != "conversation", f"a slot that was not filled: {text}"
    used = {slot for slots in (grammar.templates[kind], *grammar.slots.values()) for text in slots
            for slot, _ in re.findall(r"(?<!\{)\{(\w+)(:\w+)?\}", text)}
    assert used <= grammar.slots.keys()


def tens(text: str) -> set[tuple[str, ...]]:
    """Every run of ten words."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i:i + 10]) for i in range(len(words) - 9)}


def test_nothing_that_is_measured_on_is_trained_on() -> None:
    """No prompt of the speculative table, and no held-out one, has ten words in a row in common with a template's."""
    grammar = shipped()
    trained = set[tuple[str, ...]]()
    for kind in KINDS:
        for seed in range(1500):
            trained |= tens(grammar.draw(kind, f"0/{seed}").text)
    measured = [(f"{kind} {i}", " ".join(message["content"] for message in messages))
                for kind, chats in all_chats().items() for i, messages in enumerate(chats)]
    measured += [(f"held out {one.kind}", one.text) for one in held_out()]
    assert [(name, shared) for name, text in measured if (shared := tens(text) & trained)] == []
    assert Counter(one.kind for one in held_out()) == dict.fromkeys(KINDS, 8)


def test_the_readers_own_prompts_come_first_and_once(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("one\n\n  two  \n")
    mine, grammar = own(tmp_path / "mine.txt"), shipped()
    assert mine == [Prompt("own", "one"), Prompt("own", "two")]
    drawn = [prompt(i, 3, grammar, mine) for i in range(8)]
    assert drawn[:2] == mine and Counter(one.kind for one in drawn[2:]) == dict.fromkeys(KINDS, 2)
    assert drawn[2:] == [prompt(i, 3, grammar) for i in range(2, 8)] != [prompt(i, 4, grammar) for i in range(2, 8)]
    (tmp_path / "none.txt").write_text("\n \n")
    with pytest.raises(ValueError, match=r"none.txt has no line with a prompt"):
        own(tmp_path / "none.txt")


def said(model: LoadedModel, count: int = 16) -> list[Example]:
    """Answers of a tiny model."""
    return answers(model, [("x", [7 * i % 64, 3, i]) for i in range(count)], 0, 20, greedy=True)


# --- data -------------------------------------------------------------------------------------------------------------


def test_features_are_those_of_one_pass_over_the_answer(tiny: LoadedModel) -> None:
    """Whatever the batch and the chunks were, and after a preemption."""
    asked = [(kind, [(7 * i + 3 * j) % 64 for j in range(4 + 3 * i)]) for i, kind in enumerate("abcd")]
    examples = answers(tiny, asked, seed=1, max_tokens=12, max_num_seqs=3)
    for example, (kind, ids) in zip(examples, asked, strict=True):
        assert example.kind == kind and example.prompt_len == len(ids) and example.ids[:len(ids)].tolist() == ids
        want = features(tiny, example.ids[:-1].tolist())
        torch.testing.assert_close(example.features.double(), want, rtol=2e-3, atol=2e-3)   # float16
    greedy = [i for i in range(len(asked)) if i % corpus.DRAWN]
    said = outputs(build("nocache", tiny), [asked[i][1] for i in greedy], SamplingParams(max_tokens=12))
    assert [examples[i].ids[examples[i].prompt_len:].tolist() for i in greedy] == said


def test_a_shard_comes_back_from_disk(tmp_path: Path, tiny_llama: LoadedModel) -> None:
    examples = said(tiny_llama, count=5)
    save(tmp_path / "shard.safetensors", examples)
    again = list(load(tmp_path / "shard.safetensors"))
    assert len(again) == 5 and [path.name for path in tmp_path.iterdir()] == ["shard.safetensors"]
    for a, b in zip(again, examples, strict=True):
        assert torch.equal(a.ids, b.ids) and torch.equal(a.features, b.features)
        assert (a.prompt_len, a.kind) == (b.prompt_len, b.kind)


# --- learning ---------------------------------------------------------------------------------------------------------


def test_rows_and_answers_are_in_step(tiny_llama: LoadedModel) -> None:
    """Row i: the features before token i + 1, that token, and as its answer token i + 2, if the target said it."""
    short, long = (Example(torch.arange(10 * n, 10 * n + 4 + n), torch.full((3 + n, 32), float(n)), 2 + n, "x")
                   for n in (0, 3))
    batch = Batch([short, long], torch.float64, torch.device("cpu"))
    assert batch.tokens.tolist() == [[1, 2, 3, 0, 0], [31, 32, 33, 34, 35]]
    assert batch.answers.tolist() == [[2, 3, 0, 0, 0], [32, 33, 34, 35, 36]]
    assert batch.wanted.tolist() == [[True, True, False, False, False], [False, False, False, True, True]]
    assert batch.before.shape == batch.after.shape == (2, 5, 32)
    told = Example(torch.arange(6), torch.arange(5.0)[:, None].expand(5, 32), 2, "x")
    batch = Batch([told], torch.float64, torch.device("cpu"))
    assert batch.before[0, :, 0].tolist() == [0, 1, 2, 3] and batch.after[0, :, 0].tolist() == [1, 2, 3, 4]


def test_the_tokens_it_may_guess_are_the_most_frequent() -> None:
    examples = [Example(torch.tensor([9, 9, 9, 5, 5, 7]), torch.zeros(5, 4), 3, "x")]
    assert frequent_tokens(examples, 20, 4).tolist() == [0, 1, 5, 7]   # 9 stood in the prompt only
    assert frequent_tokens(examples, 20, 1).tolist() == [5]
    assert frequent_tokens(examples, 3, 10).numel() <= 5


def test_batches_hold_every_example_once_an_epoch_and_no_more_than_they_may() -> None:
    examples = [Example(torch.arange(n), torch.zeros(n - 1, 4), 1, "x") for n in (*range(3, 40), 90)]
    epoch, seen = batches(examples, 100, seed=0), list[int]()
    while len(seen) < len(examples):
        batch = next(epoch)
        assert len(batch) == 1 or max(len(example.ids) for example in batch) * len(batch) <= 100
        seen += [len(example.ids) for example in batch]
    assert sorted(seen) == [*range(3, 40), 90]
    again = [[len(e.ids) for e in batch] for batch in islice(batches(examples, 100, seed=0), 5)]
    assert again == [[len(e.ids) for e in batch] for batch in islice(batches(examples, 100, seed=0), 5)]
    assert again != [[len(e.ids) for e in batch] for batch in islice(batches(examples, 100, seed=1), 5)]


def test_a_head_learns_what_the_target_says(tiny_llama: LoadedModel) -> None:
    examples = said(tiny_llama)
    settings = Settings(tokens_per_batch=512, learning_rate=3e-3)
    learner = Learner(tiny_llama, settings, new_weights(tiny_llama, settings, torch.arange(64), seed=0))
    before, losses = learner.acceptance(examples, 3)["x"], []
    for step, batch in zip(range(200), batches(examples, 512, seed=0), strict=False):
        losses.append(learner.step(batch, (step + 1) / 200))
    after = learner.acceptance(examples, 3)["x"]
    assert sum(losses[-5:]) < sum(losses[:5]) - 5
    assert after > before + 0.3, (before, after)


def test_the_target_is_not_trained(tiny_llama: LoadedModel) -> None:
    settings = Settings()
    learner = Learner(tiny_llama, settings, new_weights(tiny_llama, settings, torch.arange(64), seed=0))
    before = {name: tensor.clone() for name, tensor in tiny_llama.weights().items()}
    head = {name: tensor.clone() for name, tensor in learner.learned.items()}
    learner.step(said(tiny_llama, count=2), 0.5)
    assert not any(torch.equal(head[name], tensor) for name, tensor in learner.learned.items())
    assert all(torch.equal(before[name], tensor) for name, tensor in tiny_llama.weights().items())


# --- a run ------------------------------------------------------------------------------------------------------------


class Quiet:
    """Hears how a run goes; stops it, as Ctrl-C would, after so many reports."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.lines, self.reports, self.stop_after = list[str](), 0, stop_after

    def stage(self, name: str, total: float) -> None:
        self.lines.append(name)

    def at(self, done: float) -> None:
        self.reports += 1
        if self.reports == self.stop_after:
            raise KeyboardInterrupt

    def say(self, line: str) -> None:
        self.lines.append(line)


class Words:
    """A tokenizer that knows letters: what a tiny model is asked in."""

    chat_template = "yes"

    def apply_chat_template(self, messages: Sequence[dict[str, str]], **_: Any) -> list[int]:
        return [ord(letter) % 64 for letter in messages[-1]["content"]][:8]


@pytest.fixture
def talker(monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    model = tiny_model("llama", dtype=torch.float32)
    monkeypatch.setattr(type(model), "encode_chat", lambda _, messages: Words().apply_chat_template(messages))
    return model


PLAN = Plan(tokens=700, steps=25, settings=Settings(vocab_size=64, tokens_per_batch=512))


def go(model: LoadedModel, out: Path, show: Quiet | None = None, plan: Plan = PLAN, **options: Any) -> dict[str, Any]:
    return Run(model, out, plan, show or Quiet(), shard=6, answer=30, held_out_answer=30, evaluated_on=held_out()[::8],
               **options)()


def test_a_run_that_is_cut_short_goes_on_and_ends_in_the_same_head(tmp_path: Path, talker: LoadedModel) -> None:
    whole = go(talker, tmp_path / "whole")
    assert whole["tokens"] >= 700 - 6 and whole["steps"] == 25 and whole["target_hash"] == target_hash(talker)
    assert [point["step"] for point in whole["curve"]] == [*range(0, 25, 2), 25]
    reports, cuts = 0, 0
    while True:
        reports += 25
        try:
            card = go(talker, tmp_path / "cut", Quiet(stop_after=reports))
            break
        except KeyboardInterrupt:
            cuts += 1
    assert cuts > 2
    assert card["acceptance"] == whole["acceptance"] and card["tokens"] == whole["tokens"]
    assert all(point["loss"] for point in card["curve"][1:]), "what was evaluated before a cut keeps its loss"
    assert [point["step"] for point in card["curve"]] == [point["step"] for point in whole["curve"]]
    a, b = load_head(tmp_path / "whole", talker), load_head(tmp_path / "cut", talker)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Ticking:
    """A clock that goes a tenth of a second at each look."""

    def __init__(self) -> None:
        self.looks = 0

    def __call__(self) -> float:
        self.looks += 1
        return self.looks / 10


HALF_A_MINUTE = replace(PLAN, minutes=0.5, tokens=1)


def test_minutes_bound_the_data_and_the_steps(tmp_path: Path, talker: LoadedModel) -> None:
    """Half a minute is 300 looks: 135 for the data, one at each of the target's steps; training has what is left."""
    show = Quiet()
    card = go(talker, tmp_path / "head", show, plan=HALF_A_MINUTE, clock=Ticking())
    assert 12 <= card["prompts"] <= 36, "minutes take the place of tokens"
    assert 100 < card["steps"] < 600 and card["curve"][-1]["step"] == card["steps"]
    assert show.lines[0] == "the target's answers, minutes"


def test_minutes_before_a_cut_count(tmp_path: Path, talker: LoadedModel) -> None:
    """Cut after two thirds of the reports, while it trains: the run that goes on does the steps that were planned."""
    show = Quiet()
    whole = go(talker, tmp_path / "whole", show, plan=HALF_A_MINUTE, clock=Ticking())
    with pytest.raises(KeyboardInterrupt):
        go(talker, tmp_path / "cut", Quiet(show.reports * 2 // 3), plan=HALF_A_MINUTE, clock=Ticking())
    spent = float((tmp_path / "cut" / "minutes.json").read_text())
    assert spent > 0.45 * 0.5
    again = go(talker, tmp_path / "cut", plan=HALF_A_MINUTE, clock=lambda: 0.0)
    assert again == whole
    assert float((tmp_path / "cut" / "minutes.json").read_text()) == pytest.approx(spent)


def test_a_folder_with_another_runs_data_is_refused(tmp_path: Path, talker: LoadedModel) -> None:
    go(talker, tmp_path / "head")
    with pytest.raises(ValueError, match="holds a run with seed 0, now 1"):
        go(talker, tmp_path / "head", plan=replace(PLAN, seed=1))
    with pytest.raises(ValueError, match="holds a run with other prompts"):
        go(talker, tmp_path / "head", mine=[Prompt("own", "hello")])
    other = tiny_model("llama", seed=1, dtype=torch.float32)
    with pytest.raises(ValueError, match="holds a run with target_hash"):
        go(other, tmp_path / "head")
    assert read_card(tmp_path / "head")["seed"] == 0


def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused_before_any_work(tmp_path: Path,
                                                                               talker: LoadedModel) -> None:
    talker.config = replace(talker.config, max_position_embeddings=36)
    with pytest.raises(ValueError, match="your prompt 2 has 8 tokens; beside an answer of 30 there is room for 6"):
        go(talker, tmp_path / "head", mine=[Prompt("own", "hello"), Prompt("own", "hello all")])
    assert not (tmp_path / "head").exists()


def test_a_target_that_fails_says_so(tmp_path: Path, talker: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("liteinfer.engines.continuous.sample", lambda *_: 1 / 0)
    with pytest.raises(RuntimeError, match="the target failed on prompt 0: ZeroDivisionError: division by zero"):
        answers(talker, [("x", [1, 2, 3])], 0, 4)


@pytest.mark.parametrize(("settings", "words"), [
    ({"tokens": 0}, "tokens must be at least 1, got 0"), ({"steps": 5}, "steps must be at least 6, got 5"),
    ({"minutes": 0}, "minutes must be above 0, got 0")])
def test_a_plan_that_cannot_be_is_refused(settings: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Plan(**settings)


@pytest.mark.parametrize(("settings", "words"), [
    ({"layers": 0}, "layers must be at least 1, got 0"), ({"ahead": 0}, "ahead must be at least 1, got 0"),
    ({"vocab_size": -1}, "vocab_size must be at least 1, got -1"),
    ({"intermediate_size": 0}, "intermediate_size must be at least 1, got 0"),
    ({"learning_rate": 0.0}, "learning_rate must be above 0, got 0")])
def test_settings_that_make_no_head_are_refused_before_any_work(settings: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Settings(**settings)


def test_the_command(tmp_path: Path, talker: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    from liteinfer.speculative.train import __main__ as command

    monkeypatch.setattr(command, "load_model", lambda _: talker)
    monkeypatch.setattr(command, "Run", partial(Run, shard=6, answer=30, held_out_answer=30))
    (tmp_path / "mine.txt").write_text("how are you\n")
    asked = ["--out", str(tmp_path / "head"), "--tokens", "200", "--steps", "8", "--seed", "3",
             "--prompts", str(tmp_path / "mine.txt"), "--vocab-size", "32",
             "--intermediate-size", "16", "--layers", "2"]
    done = CliRunner().invoke(command.app, asked)
    assert done.exit_code == 0, done.output
    assert "tokens in answers to" in done.output and "use it as draft" in done.output
    card = json.loads((tmp_path / "head" / "card.json").read_text())
    assert card["seed"] == 3 and card["settings"]["layers"] == 2 and card["own_prompts"] == 1
    assert load_head(tmp_path / "head", talker)["layers.1.mlp.gate_proj.weight"].shape == (16, 32)


@pytest.mark.parametrize(("asked", "words"), [
    (["--layers", "0"], "layers must be at least 1, got 0"), (["--prompts", "no-such-file"], "No such file"),
    (["--model", "no/such/model"], "no such folder or file")])
def test_bad_input_is_one_line(tmp_path: Path, asked: list[str], words: str,
                               capsys: pytest.CaptureFixture[str]) -> None:
    from liteinfer.speculative.train import __main__ as command

    with pytest.raises(SystemExit) as ended:
        command.main(["--out", str(tmp_path / "head"), *asked])
    line = capsys.readouterr().err.strip()
    assert ended.value.code == 2 and words in line and "\n" not in line
    assert not (tmp_path / "head").exists()


@pytest.mark.slow
def test_training_again_reaches_the_stored_acceptance(tmp_path: Path) -> None:
    """The shipped head, from its stored seed and settings: each kind's acceptance within 0.03. Most of an hour."""
    model = load_model()
    stored = read_card(shipped_head(model))
    plan = Plan(seed=stored["seed"], steps=stored["steps"], settings=Settings(**stored["settings"]))
    card = Run(model, tmp_path / "head", plan, Quiet())()
    assert (card["prompts"], card["target_hash"]) == (stored["prompts"], stored["target_hash"])
    assert card["acceptance"] == pytest.approx(stored["acceptance"], abs=0.03)
