"""Pictures of chapter 8: guesses kept and refused, the rule on three tokens, tokens of a pass, where it breaks even.

Of its second half: what the draft head reads, how it learns, and what its size buys.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from liteinfer import lineage
from liteinfer.cache.paged import PagedCache
from liteinfer.engines.base import run
from liteinfer.engines.continuous import ContinuousEngine
from liteinfer.loading import LoadedModel, load_model, tiny_model
from liteinfer.model.layout import Layout
from liteinfer.model.llama import Llama
from liteinfer.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION
from liteinfer.request import Counters, Request, SamplingParams
from liteinfer.runner import Runner, StepOutput
from liteinfer.speculative.draft_head import DraftHeadDrafter
from liteinfer.speculative.drafter import Draft, SpeculativeDrafter
from liteinfer.speculative.head_files import read_card, shipped_head
from liteinfer.speculative.ngram import NgramDrafter
from liteinfer.speculative.train.corpus import answers
from liteinfer.speculative.train.fit import Learner, Settings, new_weights
from liteinfer.trace import StepTrace

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SENTENCE = ("Correct the spelling and repeat the whole sentence: "
            "The tide comes in becuase the moon pulls on the sea.")   # asked of the real model in the first picture
HAND = [1, 2, 3, 1], [2, 3, 1, 2, 3, 4]          # prompt and output, worked by hand in the text
P, Q = (0.5, 0.3, 0.2), (0.2, 0.7, 0.1)          # worked by hand in the text
FIRST_HALF, SECOND_HALF = ("ngram", "early-exit:15"), ("ngram", "draft-head", "ngram+draft-head")   # of the drafts
KEPT, REFUSED, OWN = BLUE, VERMILION, ORANGE
CHANCES, LENGTHS = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9), (1, 2, 4, 8)


def pictures() -> dict[str, Figure]:
    """The chapter's stored pictures. The last needs the committed results and is left out without them."""
    smol, tiny = load_model("smollm2-135m", "float32", "cpu"), tiny_model("llama")
    prompt = smol.encode_chat([{"role": "user", "content": SENTENCE}])
    words = partial(word, smol)
    found = {"strip.svg": strip_picture(speculate(smol, prompt, SamplingParams(max_tokens=32)), words),
             "rule.svg": rule_picture(P, Q),
             "tokens.svg": tokens_picture(live(tiny))}
    if all((RESULTS / f"{name}.json").is_file() for name in ("speculative", "widths")):
        speculative, widths = (json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
                               for name in ("speculative", "widths"))
        found["breakeven.svg"] = breakeven_picture(speculative, widths)
        found["breakeven_head.svg"] = head_breakeven_picture(speculative)
    found["head.svg"] = head_picture(steps_of_the_head(tiny))
    found["learning.svg"] = learning_picture(read_card(shipped_head(smol)))
    if (RESULTS / "heads.json").is_file():
        found["heads.svg"] = heads_picture(json.loads((RESULTS / "heads.json").read_text(encoding="utf-8")))
    return found


# --- a run, pass by pass ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pass:
    """What a pass fed of the one request that ran, and what the request took."""

    own: tuple[int, ...]     # its own tokens that were fed
    draft: tuple[int, ...]   # guesses that were fed after them
    taken: tuple[int, ...]   # kept guesses, then one token of the target's
    stored: int              # its tokens with keys and values afterwards

    @property
    def kept(self) -> int:
        """Guesses that stood."""
        return next((i for i, (guess, token) in enumerate(zip(self.draft, self.taken, strict=False))
                     if guess != token), min(len(self.draft), len(self.taken)))


def speculate(model: LoadedModel, prompt: Sequence[int], params: SamplingParams, row: str = "ngram",
              **settings: Any) -> list[Pass]:
    """One request through a row's engine."""
    engine = lineage.build(lineage.find(row), model, **{"num_blocks": 32, "max_num_seqs": 1} | settings)
    assert isinstance(engine, ContinuousEngine)
    engine.trace = StepTrace()
    request = Request("0", list(prompt), params)
    errors = [event.error for event in run(engine, [request]) if event.error]
    assert not errors, errors
    return passes(engine.trace, request)


class Says(Runner):
    """A target without arithmetic: whatever it is fed, the token it would give next is that of a fixed text."""

    def __init__(self, llama: Llama, cache: PagedCache, text: Sequence[int]) -> None:
        super().__init__(llama, cache)
        self.text = text

    def forward(self, ids: Tensor, layout: Layout, logits_at: Tensor) -> StepOutput:
        logits = torch.zeros(len(logits_at), len(self.llama.embedding))                              # [M, V]
        for row, position in zip(logits, layout.positions[logits_at].tolist(), strict=True):
            row[self.text[position + 1]] = 1.0
        return StepOutput(logits, torch.empty(0))


def by_hand(model: LoadedModel) -> list[Pass]:
    """The example worked by hand: n-gram drafts of up to 2 tokens, and a target that says a fixed text; 4 ends it."""
    prompt, output = HAND
    return speculate(model, prompt, SamplingParams(max_tokens=8, stop_token_ids=(4,)),
                     drafter=partial(NgramDrafter, num_speculative_tokens=2),
                     runner=partial(Says, text=[*prompt, *output, *[4] * 8]))


def passes(trace: StepTrace, request: Request) -> list[Pass]:
    """A request's passes, read off the record of an engine's steps."""
    found: list[Pass] = []
    at = len(request.prompt_token_ids)
    for part in (part for step in trace.steps for part in step.parts if part.request_id == request.request_id):
        own = part.num_tokens - len(part.draft)
        taken = request.tokens(at, at + part.new_tokens)
        at += part.new_tokens
        stored = part.start + own + max(0, part.new_tokens - 1)
        found.append(Pass(tuple(request.tokens(part.start, part.start + own)), part.draft, tuple(taken), stored))
    return found


def word(model: LoadedModel, token: int) -> str:
    """A token's text without spaces around it; an EOS has a name."""
    return "‹end›" if token in model.config.eos_token_ids else model.decode([token]).strip()


def strip_picture(run_of: Sequence[Pass], words: Any = str) -> Figure:
    """A row for each pass: what it fed on the left of the bar, the target's own token on the right."""
    figure = Figure(figsize=(9.2, 0.4 * len(run_of) + 0.7), layout="constrained")
    axes = figure.subplots()
    for y, each in enumerate(run_of):
        axes.text(-0.3, y, f"pass {y + 1}", ha="right", va="center", fontsize=9)
        x = _cell(axes, 0, y, words(each.own[-1]) if len(each.own) == 1 else f"{len(each.own)} tokens of the prompt",
                  "white")
        for i, guess in enumerate(each.draft):
            x = _cell(axes, x, y, words(guess), KEPT if i < each.kept else "white", refused=i >= each.kept)
        if len(each.taken) > each.kept:          # not after a guess that ended the request
            axes.annotate("", (x + 0.95, y), (x + 0.15, y), arrowprops={"arrowstyle": "->", "color": "black"})
            _cell(axes, x + 1.05, y, words(each.taken[-1]), OWN)
        axes.text(11.4, y, f"{each.kept} of {len(each.draft)} kept, {len(each.taken)} new" if each.draft
                  else f"{len(each.taken)} new", ha="right", va="center", fontsize=9)
    axes.set(xlim=(-1.0, 11.5), ylim=(len(run_of) - 0.5, -0.6))
    axes.axis("off")
    handles = [Patch(facecolor="white", edgecolor="black", label="fed: the request's own"),
               Patch(facecolor=KEPT, edgecolor="black", label="fed: a guess that stands"),
               Patch(facecolor="white", edgecolor=REFUSED, hatch="////", label="fed: a guess that is refused"),
               Patch(facecolor=OWN, edgecolor="black", label="the target's own token")]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def _cell(axes: Axes, x: float, y: float, text: str, colour: str, refused: bool = False) -> float:
    """A cell as wide as its text, from x on; where the next one starts."""
    width = 0.5 + 0.185 * len(text)
    axes.add_patch(Rectangle((x, y - 0.36), width, 0.72, facecolor=colour, edgecolor=REFUSED if refused else "black",
                             hatch="////" if refused else None, linewidth=0.9))
    axes.text(x + width / 2, y, text, ha="center", va="center", fontsize=9, zorder=3,
              color="white" if colour == BLUE else "black",
              bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0} if refused else None)
    return x + width + 0.08


# --- the rule --------------------------------------------------------------------------------------------------------


def rule_picture(p: Sequence[float], q: Sequence[float]) -> Figure:
    """Left: what is guessed, split into kept and refused. Right: what comes out, kept and drawn again."""
    kept = [min(a, b) for a, b in zip(p, q, strict=True)]
    refused = [b - k for b, k in zip(q, kept, strict=True)]
    again = [a - k for a, k in zip(p, kept, strict=True)]                    # the residual, as it is scaled to be drawn
    figure = Figure(figsize=(8.6, 2.9), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    places = range(len(p))
    left.bar(places, kept, 0.6, color=KEPT, edgecolor="black", label="kept: min(p, q)")
    left.bar(places, refused, 0.6, bottom=kept, color="white", edgecolor=REFUSED, hatch="////",
             label="refused: what q has too much")
    right.bar(places, kept, 0.6, color=KEPT, edgecolor="black")
    right.bar(places, again, 0.6, bottom=kept, color=OWN, edgecolor="black",
              label="drawn again: max(0, p - q)")
    for axes, values, name in ((left, q, "guessed: q"), (right, p, "taken: p")):
        for x, value in enumerate(values):
            axes.text(x, value + 0.015, f"{value:.1f}", ha="center", va="bottom", fontsize=9)
        axes.set_xticks(list(places), [f"token {i}" for i in places])
        axes.set_title(name, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    left.set(ylim=(0, 0.85), ylabel="probability")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


# --- tokens of a pass ------------------------------------------------------------------------------------------------


def expected_tokens(a: float, k: int) -> float:
    """Tokens of a pass with k guesses, each of which stands with probability a if those before it do."""
    return float(k + 1) if a == 1 else (1 - a ** (k + 1)) / (1 - a)


def counted_acceptance(a: float, k: int) -> float:
    """Of all guesses that are fed, the share that stands: those behind a refused one count as refused."""
    return (expected_tokens(a, k) - 1) / k


class Scripted(SpeculativeDrafter):
    """Knows what its request will say, and guesses each token right with probability `chance`."""

    def __init__(self, engine: ContinuousEngine, answer: Sequence[int], chance: float,
                 num_speculative_tokens: int = 4, seed: int = 0) -> None:
        super().__init__(engine, num_speculative_tokens)
        self.answer, self.chance, self.random = list(answer), chance, random.Random(seed)

    def guess(self, rooms: Mapping[Request, int]) -> dict[str, Draft]:
        words = self.engine.model.config.vocab_size
        drafts = {}
        for request, room in rooms.items():
            at = len(request.output_token_ids)
            drafts[request.request_id] = Draft([(token + (self.random.random() >= self.chance)) % words
                                                for token in self.answer[at:at + room]])
        return drafts


@dataclass(frozen=True)
class Live:
    """A live run with a scripted drafter."""

    chance: float
    k: int
    tokens: int
    counters: Counters

    @property
    def tokens_per_pass(self) -> float:
        """Of the passes that decode: all but the prompt's, and all tokens but its one."""
        return (self.tokens - 1) / (self.counters.forward_passes - 1)

    @property
    def acceptance(self) -> float:
        return self.counters.accepted_tokens / self.counters.drafted_tokens


def live(model: LoadedModel, chances: Sequence[float] = CHANCES, lengths: Sequence[int] = LENGTHS,
         tokens: int = 480) -> list[Live]:
    """Runs of one request with guesses that are right with these chances; all say what it says without guesses."""
    prompt, found = [9, 44, 1, 62, 15], []
    plain, _ = generate(model, prompt, tokens)
    for k in lengths:
        for chance in chances:
            drafter = partial(Scripted, answer=plain, chance=chance, num_speculative_tokens=k)
            guessed, counters = generate(model, prompt, tokens, drafter=drafter)
            assert guessed == plain, "a draft has changed the output"
            found.append(Live(chance, k, tokens, counters))
    return found


def generate(model: LoadedModel, prompt: Sequence[int], max_tokens: int, row: str = "radix",
             **settings: Any) -> tuple[list[int], Counters]:
    """The output of one greedy request of exactly so many tokens, and what the engine counted."""
    engine = lineage.build(lineage.find(row), model, **{"num_blocks": 32, "max_num_seqs": 1} | settings)
    request = Request("0", list(prompt), SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    errors = [event.error for event in run(engine, [request]) if event.error]
    assert not errors, errors
    return request.output_token_ids, engine.counters


def tokens_picture(runs: Sequence[Live]) -> Figure:
    """By the chance that a guess stands: tokens of a pass, and the share of guesses that is counted as accepted."""
    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    grid = [i / 100 for i in range(100)]
    for k, colour, mark in zip(sorted({one.k for one in runs}), (SKY, GREEN, BLUE, PURPLE), "osD^", strict=False):
        some = [one for one in runs if one.k == k]
        chances = [one.chance for one in some]
        left.plot(grid, [expected_tokens(a, k) for a in grid], color=colour, label=f"k = {k}")
        left.plot(chances, [one.tokens_per_pass for one in some], mark, color=colour, markeredgecolor="black",
                  markersize=5)
        right.plot(grid, [counted_acceptance(a, k) for a in grid], color=colour)
        right.plot(chances, [one.acceptance for one in some], mark, color=colour, markeredgecolor="black",
                   markersize=5)
    left.plot([], [], "o", color="white", markeredgecolor="black", markersize=5, label="counted in a live run")
    left.set_title("tokens of a pass", loc="left", fontsize=10)
    right.set_title("accepted / drafted", loc="left", fontsize=10)
    for axes in (left, right):
        axes.set(xlabel="a: the chance that a guess stands if those before it do", xlim=(0, 1))
        axes.spines[["top", "right"]].set_visible(False)
    left.set_ylim(0.8, None)
    right.set_ylim(0, 1)
    left.legend(loc="upper left", frameon=False, fontsize=9)
    return figure


# --- where it breaks even --------------------------------------------------------------------------------------------


Number = TypeVar("Number", float, Tensor)


def speedup(acceptance: Number, cost: Number, k: int = 4) -> Number:
    """Of passes that all have k guesses. Acceptance: accepted / drafted. Cost: of a drafted token, in plain steps."""
    return (1 + k * acceptance) / (1 + k * cost)


def breakeven_picture(speculative: Mapping[str, Any], widths: Mapping[str, Any]) -> Figure:
    """Left: the surface, with what was measured at width 1. Right: what a guess costs as the batch grows."""
    figure = Figure(figsize=(9.6, 4.1), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    _draw_surface(left, points(speculative, FIRST_HALF), 0.5)
    _draw_costs(right, widths)
    return figure


def head_breakeven_picture(speculative: Mapping[str, Any]) -> Figure:
    """The surface again, nearer to its axis, with the points of the draft head alone and behind n-grams."""
    figure = Figure(figsize=(7.6, 5.0), layout="constrained")
    _draw_surface(figure.subplots(), points(speculative, SECOND_HALF), 0.25, labelled_left=SECOND_HALF[:1])
    return figure


@dataclass(frozen=True)
class Point:
    """A measured line of the speculative table at width 1."""

    kind: str
    draft: str
    k: int
    cost: float
    acceptance: float
    speedup: float


def points(result: Mapping[str, Any], drafts: Collection[str], k: int = 4) -> list[Point]:
    """The lines with these drafts of up to k tokens, without a pause, at width 1; each with its draft's cost."""
    costs = {each["draft"]: each["cost"] for each in result["costs"] if each["k"] == k}
    return [Point(row["prompts_kind"], row["draft"], row["k"], costs[row["draft"]], row["acceptance"], row["speedup"])
            for row in result["rows"]
            if (row["width"], row["k"], row["pause"]) == (1, k, None) and row["draft"] in drafts
            and costs.get(row["draft"]) is not None and row["acceptance"] is not None]


def _draw_surface(axes: Axes, found: Sequence[Point], width: float, labelled_left: Collection[str] = ()) -> None:
    """The surface up to a cost of at least `width`; labels stand right of their points, those of some drafts left."""
    widest = max([width, *(1.25 * point.cost for point in found)])
    cost, acceptance = torch.meshgrid(torch.linspace(0, widest, 120), torch.linspace(0, 1, 120), indexing="xy")
    k = found[0].k if found else 4
    surface: Tensor = speedup(acceptance, cost, k)
    lines = axes.contour(cost, acceptance, surface, levels=[0.5, 0.75, 1.25, 1.5, 2, 2.5, 3, 4], colors=GREY,
                         linewidths=0.8)
    axes.clabel(lines, fmt=lambda level: f"{level:g}x", fontsize=8)
    axes.plot([0, min(1, widest)], [0, min(1, widest)], color="black", linewidth=2)
    axes.fill_between([0, min(1, widest)], [0, min(1, widest)], color=VERMILION, alpha=0.10)
    colours = dict(zip(dict.fromkeys(point.draft for point in found), (BLUE, ORANGE, PURPLE, GREEN), strict=False))
    marks = dict(zip(dict.fromkeys(point.kind for point in found), "os^D", strict=False))
    for draft in colours:
        above = -1.0
        for point in sorted((point for point in found if point.draft == draft), key=lambda each: each.acceptance):
            axes.plot([point.cost], [point.acceptance], marks[point.kind], color=colours[draft],
                      markeredgecolor="black", markersize=7, zorder=4)
            above = max(above + 0.055, point.acceptance, 0.03)             # a label stands over the one below it
            side = 1 if point.cost < 0.7 * widest and draft not in labelled_left else -1
            axes.text(point.cost + side * 0.02 * widest, above, f"{point.kind} {point.speedup:.2f}x",
                      ha="left" if side == 1 else "right", va="center", fontsize=8, zorder=5,
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8})
    handles = [Patch(color=colour, label=draft) for draft, colour in colours.items()]
    axes.legend(handles=handles, loc="upper right", fontsize=8, title="measured, width 1", title_fontsize=8)
    axes.set(xlabel="cost of a drafted token, in plain steps", ylabel="accepted / drafted", xlim=(0, widest),
             ylim=(0, 1))
    axes.set_title(f"speed-up if every pass has {k} guesses", loc="left", fontsize=10)


def width_costs(result: Mapping[str, Any], k: int = 3) -> dict[str, list[tuple[int, float]]]:
    """By what is timed, (width, cost of a drafted token) from chapter 5's table: k more rows for each sequence.

    Each row of that table was a sequence with keys and values of its own; guesses share their request's.
    """
    row, = (row for row in result["rows"] if "packed" in row["linear_path"])
    found = {}
    for name, key in (("a whole step", "itl_p50_ms"), ("its linear layers alone", "linear_ms"),
                      ("what the machine allows", "ceiling_ms")):
        ms = {point["width"]: point[key] for point in row["widths"] if point.get(key)}
        found[name] = [(width, (ms[width * (k + 1)] / ms[width] - 1) / k) for width in ms if width * (k + 1) in ms]
    return found


def _draw_costs(axes: Axes, widths: Mapping[str, Any], k: int = 3) -> None:
    styles = {"a whole step": (BLUE, "o-"), "its linear layers alone": (BLUE, "o:"),
              "what the machine allows": ("black", "--")}
    for name, costs in width_costs(widths, k).items():
        colour, style = styles[name]
        axes.plot([width for width, _ in costs], [cost for _, cost in costs], style, color=colour, label=name)
    shown = [width for width, _ in width_costs(widths, k)["a whole step"]]
    axes.axhline(1, color=GREY, linewidth=1)
    axes.text(shown[0], 0.985, "a guess costs as much as a token", va="top", fontsize=8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(shown, [str(width) for width in shown])
    axes.minorticks_off()
    axes.set(xlabel="sequences in a step", ylabel="acceptance needed to break even", ylim=(-0.02, 1.08))
    axes.set_title(f"cost of a guess, {k} for each sequence", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center left", frameon=False, fontsize=8, bbox_to_anchor=(0, 0.72))


# --- the draft head --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fed:
    """A pass of the head: by (token, where its features come from), what it was fed, and what it guessed."""

    places: tuple[int, ...]       # of the tokens fed, in the request
    tokens: tuple[int, ...]
    own: bool                     # the features are the head's, not the target's
    guess: int


class Told(DraftHeadDrafter):
    """Keeps what each pass of the head was fed, for one request."""

    def guess(self, rooms: Mapping[Request, int]) -> dict[str, Draft]:
        self.passes: list[list[Fed]] = [*getattr(self, "passes", []), []]
        return super().guess(rooms)

    def _feed(self, sequences: Mapping[str, list[int]]) -> Tensor:
        (name, ids), = sequences.items()
        first = len(ids) - len(self.next[name])
        own = bool(self.passes[-1])
        logits = super()._feed(sequences)
        self.passes[-1].append(Fed(tuple(range(first, len(ids))), tuple(ids[first:]), own, int(logits[0].argmax())))
        return logits


def steps_of_the_head(model: LoadedModel, k: int = 3) -> list[Fed]:
    """The passes of a head for the first draft of a live request: a prompt of four tokens, and one of the target's."""
    weights = {name: tensor if name == "tokens" else tensor.to(model.dtype) for name, tensor in
               new_weights(model, Settings(), torch.arange(model.config.vocab_size), seed=0).items()}
    engine = lineage.build(lineage.find("radix"), model, num_blocks=32, max_num_seqs=1,
                           drafter=partial(Told, weights=weights, num_speculative_tokens=k))
    assert isinstance(engine, ContinuousEngine) and isinstance(engine.drafter, Told)
    engine.add(Request("0", [9, 44, 1, 62], SamplingParams(max_tokens=8, ignore_eos=True)))
    engine.step()
    engine.step()
    return engine.drafter.passes[0]


def head_picture(fed: Sequence[Fed]) -> Figure:
    """A row for each pass of the head: pairs of features and token, and the guess that comes of the last."""
    figure = Figure(figsize=(8.6, 0.75 * len(fed) + 1.0), layout="constrained")
    axes = figure.subplots()
    for y, each in enumerate(fed):
        axes.text(-0.35, y, f"pass {y + 1}", ha="right", va="center", fontsize=9)
        for place, token in zip(each.places, each.tokens, strict=True):
            colour = SKY if each.own else GREEN
            for x, text, face in ((0.0, f"{'g' if each.own else 'f'}{place - 1}", colour),
                                  (0.42, f"x{place} = {token}", "white" if not each.own else ORANGE)):
                width = 0.4 if x == 0.0 else 0.85
                axes.add_patch(Rectangle((1.45 * (place - 1) + x, y - 0.3), width, 0.6, facecolor=face,
                                         edgecolor="black", linewidth=0.9))
                axes.text(1.45 * (place - 1) + x + width / 2, y, text, ha="center", va="center", fontsize=8)
        end = 1.45 * each.places[-1]
        axes.annotate("", (end + 0.25, y), (end - 0.12, y), arrowprops={"arrowstyle": "->", "color": "black"})
        axes.text(end + 0.32, y, f"g{each.places[-1]}, so x{each.places[-1] + 1} = {each.guess}?", va="center",
                  fontsize=9)
    last = max(each.places[-1] for each in fed)
    axes.set(xlim=(-1.1, 1.45 * last + 2.2), ylim=(len(fed) - 0.5, -0.6))
    axes.axis("off")
    handles = [Patch(facecolor=GREEN, edgecolor="black", label="f: the target's features"),
               Patch(facecolor="white", edgecolor="black", label="x: a token of the request"),
               Patch(facecolor=SKY, edgecolor="black", label="g: the head's own features"),
               Patch(facecolor=ORANGE, edgecolor="black", label="x: a guess, fed back")]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def by_heart(model: LoadedModel, prompts: int = 16, steps: int = 300) -> tuple[dict[str, Tensor], list[list[int]]]:
    """A head that has learned by heart what a tiny model says to some prompts; the head, and the prompts.

    A random model's words have no system, so there is nothing else that could be learned of them.
    """
    draw = random.Random(0)
    asked = [[draw.randrange(model.config.vocab_size) for _ in range(3)] for _ in range(prompts)]
    examples = answers(model, [("", ids) for ids in asked], 0, 20, greedy=True)
    settings = Settings(learning_rate=3e-3)
    learner = Learner(model, settings, new_weights(model, settings, torch.arange(model.config.vocab_size), seed=0))
    for step in range(steps):
        learner.step(examples, (step + 1) / steps)
    return {name: tensor if name == "tokens" else tensor.detach().to(model.dtype)
            for name, tensor in learner.weights.items()}, asked


KIND_COLOURS = {"code": BLUE, "json": ORANGE, "conversation": PURPLE}


def learning_picture(card: Mapping[str, Any]) -> Figure:
    """Acceptance on held-out prompts by kind, against the tokens the head has been trained on; and the loss."""
    figure = Figure(figsize=(9.0, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.5, 1))
    curve = card["curve"]
    seen = [point["tokens"] / 1000 for point in curve]
    for kind in curve[0]["acceptance"]:
        shares = [point["acceptance"][kind] for point in curve]
        left.plot(seen, shares, "o-", color=KIND_COLOURS.get(kind, GREY), label=kind, markersize=4)
    left.set(xlabel="tokens trained on, thousands, each as often as it was seen", ylim=(0, None),
             ylabel=f"acceptance at k = {card['acceptance_k']}")
    left.set_title(f"held-out prompts: {card['held_out_prompts']} that no template made", loc="left", fontsize=10)
    left.legend(frameon=False, fontsize=9)
    lost = [(x, point["loss"]) for x, point in zip(seen, curve, strict=True) if point["loss"] is not None]
    right.plot([x for x, _ in lost], [loss for _, loss in lost], "s-", color="black", markersize=4)
    right.set(xlabel="tokens trained on, thousands", ylim=(0, None), ylabel="loss")
    right.set_title("loss on what it is trained on", loc="left", fontsize=10)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def heads_picture(result: Mapping[str, Any]) -> Figure:
    """By what a guess costs to make, how often heads of several sizes are right, by kind of prompt."""
    figure = Figure(figsize=(8.0, 4.0), layout="constrained")
    axes = figure.subplots()
    rows = sorted(result["rows"], key=lambda row: row["cost"])
    for kind in rows[0]["acceptance"]:
        axes.plot([row["cost"] for row in rows], [row["acceptance"][kind] for row in rows], "o",
                  color=KIND_COLOURS.get(kind, GREY), label=kind, markersize=6)
    top = max(share for row in rows for share in row["acceptance"].values())
    for i, row in enumerate(rows):
        axes.axvline(row["cost"], color=GREY, linewidth=0.5, zorder=0)
        axes.text(row["cost"], top * (1.10 + 0.07 * (i % 3)), row["name"], ha="center", fontsize=8,
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8})
    axes.set(xlabel="cost of making a guess, in plain steps", ylabel=f"acceptance at k = {result['k']}, held-out",
             ylim=(0, top * 1.35), xlim=(0, 1.1 * rows[-1]["cost"]))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    return figure
