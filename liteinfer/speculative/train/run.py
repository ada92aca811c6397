"""Making a draft head: data, training, evaluation, the files. Every stage goes on where a run before it stopped."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from liteinfer.loading import LoadedModel
from liteinfer.speculative.head_files import save_head, target_hash
from liteinfer.speculative.train import corpus
from liteinfer.speculative.train.corpus import Example
from liteinfer.speculative.train.fit import Learner, batches, frequent_tokens, new_weights
from liteinfer.speculative.train.plan import (
    ANSWER,
    DATA_SHARE,
    EVALUATIONS,
    HELD_OUT_ANSWER,
    TIMED_STEPS,
    K,
    Plan,
    Show,
)
from liteinfer.speculative.train.prompts import Prompt, held_out, prompt, shipped


@dataclass
class Run:
    """One head in the making.

    Args:
        out: the folder. Its `data`, `checkpoint.pt` and `minutes.json` are what a later run goes on from.
        mine: the reader's own prompts, besides those of the templates.
        shard: prompts of which the answers are written together.
        answer, held_out_answer: the most tokens of an answer to train on, and of one to evaluate on.
        evaluated_on: the held-out prompts; the head is evaluated so many times, and at the end.
    """

    model: LoadedModel
    out: Path
    plan: Plan
    show: Show
    mine: Sequence[Prompt] = ()
    shard: int = corpus.SHARD
    answer: int = ANSWER
    held_out_answer: int = HELD_OUT_ANSWER
    evaluated_on: Sequence[Prompt] = field(default_factory=held_out)
    evaluations: int = EVALUATIONS
    clock: Callable[[], float] = time.monotonic

    def __call__(self) -> dict[str, Any]:
        """Do what is left to do; the card of the head.

        Raises:
            ValueError: a prompt that leaves no room for an answer, or a folder that holds another run.
        """
        corpus.check_prompts(self.model, self.mine, self.answer)
        self._same_plan()
        spent = self.out / "minutes.json"
        self.started = self.clock() - 60 * (json.loads(spent.read_text(encoding="utf-8")) if spent.exists() else 0)
        examples = self._data()
        test = self._held_out()
        weights, curve = self._train(examples, test)
        card = self._card(examples, curve)
        save_head(self.out, weights, card)
        return card

    def _same_plan(self) -> None:
        """Raises ValueError if the folder holds a run of another plan: its data would be mixed with this one's."""
        path, plan = self.out / "plan.json", asdict(self.plan)
        plan |= {"target": self.model.name, "target_hash": target_hash(self.model),
                 "mine": [one.text for one in self.mine]}
        if not path.exists():
            self.out.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(plan, indent=2) + "\n", encoding="utf-8")
        elif (before := json.loads(path.read_text(encoding="utf-8"))) != plan:
            changed = ", ".join(f"{key} {before.get(key)!r}, now {plan[key]!r}" for key in plan
                                if before.get(key) != plan[key] and key != "mine") or "other prompts"
            raise ValueError(f"{self.out} holds a run with {changed}: name another folder, or delete it")

    def _minutes_gone(self) -> float:
        """Of this run and those it goes on from."""
        return (self.clock() - self.started) / 60

    def _note_minutes(self) -> None:
        """For a run that goes on from what has just been saved."""
        (self.out / "minutes.json").write_text(f"{self._minutes_gone()}\n", encoding="utf-8")

    def _data(self) -> list[Example]:
        """The target's answers, a shard after the other, until there are enough."""
        folder, grammar, examples = self.out / "data", shipped(), list[Example]()
        folder.mkdir(exist_ok=True)
        minutes, said, number = self.plan.minutes, 0, 0
        unit, total = ("tokens", self.plan.tokens) if minutes is None else ("minutes", minutes * DATA_SHARE)
        self.show.stage(f"the target's answers, {unit}", total)

        def done(said: int) -> float:
            return said if minutes is None else self._minutes_gone()

        # Data that is there was made within its minutes, so all of it counts; of too many tokens the first do.
        while not said or done(said) < total or (minutes is not None and self._shard(number).exists()):
            path = self._shard(number)
            if not path.exists():
                asked = [prompt(i, self.plan.seed, grammar, self.mine)
                         for i in range(number * self.shard, (number + 1) * self.shard)]
                brought = [said]

                def on_step(tokens: int, brought: list[int] = brought) -> None:
                    brought[0] += tokens
                    self.show.at(done(brought[0]))

                corpus.save(path, corpus.answers(self.model, corpus.encode(self.model, asked),
                                                 self.plan.seed + number * self.shard, self.answer, on_step=on_step))
                self._note_minutes()
            shard = list(corpus.load(path))
            examples += shard
            said += sum(len(example.ids) - example.prompt_len for example in shard)
            number += 1
            self.show.at(done(said))
        self.show.say(f"{said:,} tokens in answers to {len(examples):,} prompts")
        return [example for example in examples if len(example.ids) - example.prompt_len > 1]

    def _shard(self, number: int) -> Path:
        return self.out / "data" / f"shard-{number:05}.safetensors"

    def _held_out(self) -> list[Example]:
        path = self.out / "data" / "held_out.safetensors"
        if not path.exists():
            self.show.stage("answers to held-out prompts", len(self.evaluated_on))
            asked = corpus.encode(self.model, self.evaluated_on)
            corpus.save(path, corpus.answers(self.model, asked, 0, self.held_out_answer, greedy=True))
        return list(corpus.load(path))

    def _train(self, examples: Sequence[Example], test: Sequence[Example]) -> tuple[Any, list[dict[str, Any]]]:
        """The head's weights, and its learning curve."""
        settings, seed, path = self.plan.settings, self.plan.seed, self.out / "checkpoint.pt"
        tokens = frequent_tokens(examples, self.model.config.vocab_size, settings.vocab_size)
        learner = Learner(self.model, settings, new_weights(self.model, settings, tokens, seed))
        step, steps, seen, curve = 0, self.plan.steps, 0, list[dict[str, Any]]()
        if path.exists():
            saved = torch.load(path, map_location=self.model.device, weights_only=True)
            learner.restore(saved["learner"])
            step, steps, seen, curve = saved["step"], saved["steps"], saved["seen"], saved["curve"]
        losses, evaluated, evaluation = list[float](), self.clock(), 0.0
        self.show.stage("training, steps", steps)
        for batch in islice(batches(examples, settings.tokens_per_batch, seed), step, None):
            due = step >= steps or step % max(1, steps // self.evaluations) == 0
            if due and not (curve and curve[-1]["step"] == step):
                before = self.clock()
                curve.append(self._evaluate(learner, test, step, seen, losses))
                torch.save({"learner": learner.state(), "step": step, "steps": steps, "seen": seen, "curve": curve},
                           path.with_suffix(".unfinished"))
                path.with_suffix(".unfinished").replace(path)
                self._note_minutes()
                evaluated, evaluation = self.clock(), self.clock() - before
                losses.clear()
            if step >= steps:
                break
            losses.append(learner.step(batch, (step + 1) / steps))
            seen += sum(len(example.ids) - example.prompt_len for example in batch)
            step += 1
            if self.plan.minutes is not None and step == TIMED_STEPS:
                a_step = (self.clock() - evaluated) / TIMED_STEPS
                left = 60 * (self.plan.minutes - self._minutes_gone()) - self.evaluations * evaluation
                steps = max(TIMED_STEPS + 1, int(left / a_step))
                self.show.stage("training, steps", steps)
            self.show.at(step)
        return learner.weights, curve

    def _evaluate(self, learner: Learner, test: Sequence[Example], step: int, seen: int,
                  losses: Sequence[float]) -> dict[str, Any]:
        found = learner.acceptance(test, K)
        loss = sum(losses) / len(losses) if losses else None
        self.show.say(f"step {step:,}, {seen:,} tokens seen, loss {'-' if loss is None else f'{loss:.3f}'}, acceptance "
                      + ", ".join(f"{kind} {share:.3f}" for kind, share in found.items()))
        return {"step": step, "tokens": seen, "loss": loss, "acceptance": found}

    def _card(self, examples: Sequence[Example], curve: list[dict[str, Any]]) -> dict[str, Any]:
        answered = sum(len(example.ids) - example.prompt_len for example in examples)
        return {"target": self.model.name, "target_hash": target_hash(self.model),
                "settings": asdict(self.plan.settings), "seed": self.plan.seed,
                "prompts": len(examples), "own_prompts": len(self.mine), "tokens": answered,
                "steps": curve[-1]["step"], "acceptance_k": K, "held_out_prompts": len(self.evaluated_on),
                "acceptance": curve[-1]["acceptance"], "curve": curve}
