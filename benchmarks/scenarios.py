"""The workloads of `sharing`: conversations whose prompts begin alike, or do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.workloads import short_hash, take

if TYPE_CHECKING:
    from liteinfer.loading import LoadedModel


@dataclass(frozen=True)
class Scenario:
    """Conversations in token ids.

    Args:
        openings: the first prompt of each conversation.
        output: tokens of every answer.
        follow_ups: for each further turn, what every conversation adds after the answer.
    """

    name: str
    what: str
    openings: list[list[int]]
    output: int
    follow_ups: list[list[list[int]]] = field(default_factory=list)

    @property
    def turns(self) -> int:
        return 1 + len(self.follow_ups)

    @property
    def prompts(self) -> int:
        return len(self.openings) * self.turns

    @property
    def lengths(self) -> list[int]:
        """Tokens of each conversation at its end."""
        said = [[opening, *(turn[i] for turn in self.follow_ups)] for i, opening in enumerate(self.openings)]
        return [sum(map(len, parts)) + self.turns * self.output for parts in said]

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def prompt_hash(self) -> str:
        """Over all that the users say."""
        return short_hash([token for turn in (self.openings, *self.follow_ups) for said in turn
                           for token in (*said, -1)])

    def said_after(self, turn: int) -> list[list[int]]:
        """What each conversation adds after the answers of this turn; nothing after the last."""
        return self.follow_ups[turn] if turn < len(self.follow_ups) else [[] for _ in self.openings]


@dataclass(frozen=True)
class Sizes:
    """How much each workload asks for: a round of two rows takes under a minute on 2 cores."""

    conversations: int = 4
    turns: int = 4
    said: int = 24          # tokens of what a user says, before the template
    answer: int = 16        # of every answer in a conversation
    header: int = 256       # of the examples before each question
    questions: int = 12
    question: int = 16
    verdict: int = 8        # of the answer to a question
    distinct: int = 12
    isl: int = 96           # of a prompt that shares nothing
    osl: int = 16


def scenarios(model: LoadedModel, sizes: Sizes = Sizes()) -> list[Scenario]:
    """The three workloads, of real text where the model has a tokenizer."""
    return [multiturn(model, sizes), fewshot(model, sizes), distinct(model, sizes)]


def multiturn(model: LoadedModel, sizes: Sizes) -> Scenario:
    """Conversations through the model's chat template, if it has one that only ever appends."""
    said = take(model, sizes.said, sizes.conversations * sizes.turns)
    template = appends(model)
    turns = [[_in_template(model, ids, first=turn == 0) if template else ids for ids in said[turn::sizes.turns]]
             for turn in range(sizes.turns)]
    how = "in the model's chat template" if template else "without a template"
    what = f"{sizes.conversations} conversations of {sizes.turns} turns, {how}"
    return Scenario("multiturn", what, turns[0], sizes.answer, turns[1:])


def fewshot(model: LoadedModel, sizes: Sizes) -> Scenario:
    """One header, a window of the text that stands for worked examples, and many questions after it."""
    header, = take(model, sizes.header, 1)
    asked = take(model, sizes.question, sizes.questions + 1)[1:]
    what = f"{sizes.questions} questions of {sizes.question} tokens after the same {sizes.header}"
    return Scenario("fewshot", what, [header + ids for ids in asked], sizes.verdict)


def distinct(model: LoadedModel, sizes: Sizes) -> Scenario:
    what = f"{sizes.distinct} prompts of {sizes.isl} tokens with nothing in common"
    return Scenario("distinct", what, take(model, sizes.isl, sizes.distinct), sizes.osl)


def appends(model: LoadedModel) -> bool:
    """Whether there is a chat template in which a longer conversation begins with the ids of the shorter one."""
    if not getattr(model.tokenizer, "chat_template", None):
        return False
    opening = _chat(model, "One")
    return _chat(model, "One", "", "Two")[:len(opening)] == opening


def _in_template(model: LoadedModel, ids: Sequence[int], first: bool) -> list[int]:
    """A user's turn: the opening, or what stands between one answer and the next."""
    text = model.decode(ids)
    return _chat(model, text) if first else _chat(model, "One", "", text)[len(_chat(model, "One")):]


def _chat(model: LoadedModel, *said: str) -> list[int]:
    """The ids of a conversation in which user and assistant take turns, up to where the next answer begins."""
    roles = ("user", "assistant")
    return model.encode_chat([{"role": roles[i % 2], "content": text} for i, text in enumerate(said)])
