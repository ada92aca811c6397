"""Pictures of chapter 7: the tree at work, what a chat computes, time to first token cold and cached."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch, Rectangle

from liteinfer import lineage
from liteinfer.cache.radix import BlockKey, Node, RadixTree
from liteinfer.engines.base import run
from liteinfer.engines.continuous import ContinuousEngine
from liteinfer.loading import LoadedModel, load_model, tiny_model
from liteinfer.plots import BLUE, GREY, ORANGE, SKY, VERMILION
from liteinfer.radix_manager import RadixManager
from liteinfer.request import Counters, Request, SamplingParams

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
HAND = {"A": [1, 2, 3, 4, 5, 6, 7], "B": [1, 2, 3, 4, 5, 9, 2], "C": [1, 2, 3, 4, 5, 6]}   # worked by hand in the text
LOCKED, EVICTABLE = ORANGE, SKY
PITCH = 1.4                                     # between two branches of a drawn tree
SYSTEM, TURN, ANSWER, TURNS = 64, 20, 16, 8     # tokens of the chat's parts, and how often one speaks


def pictures() -> dict[str, Figure]:
    """The chapter's stored pictures. The last needs the committed results and is left out without them."""
    model = tiny_model("llama")
    found = {"tree.svg": tree_picture(story(model)),
             "chat.svg": chat_picture({row: chat(model, row) for row in ("continuous", "radix")})}
    if all((RESULTS / f"{name}.json").is_file() for name in ("radix", "course")):
        radix, course = (json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
                         for name in ("radix", "course"))
        same = radix["machine"]["name"] == course["machine"]["name"]       # where its limits were measured
        found["ttft.svg"] = ttft_picture({**radix, "machine": course["machine"]} if same else radix)
    return found


# --- the tree at work ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Edge:
    """A node of the tree as it was at one moment."""

    key: tuple[BlockKey, ...]
    blocks: tuple[int, ...]
    locks: int
    children: tuple[Edge, ...]

    @property
    def leaves(self) -> int:
        return sum(child.leaves for child in self.children) or 1


@dataclass(frozen=True)
class Frame:
    """What tree, tables and pool were at one moment."""

    title: str
    edges: tuple[Edge, ...]               # that hang from the root
    tables: dict[str, list[int]]          # of the requests that run
    tokens: dict[str, int]                # stored, of each of them
    free: int                             # blocks that nobody holds
    evictable: int                        # blocks that only the tree holds


def radix_engine(model: LoadedModel, **settings: Any) -> tuple[ContinuousEngine, RadixManager]:
    """The row `radix` over a model, and its KV manager."""
    engine = lineage.build(lineage.find("radix"), model, **settings)
    assert isinstance(engine, ContinuousEngine) and isinstance(engine.scheduler.kv, RadixManager)
    return engine, engine.scheduler.kv


def edges_of(node: Node) -> tuple[Edge, ...]:
    return tuple(Edge(tuple(child.key), tuple(child.blocks), child.lock_count, edges_of(child))
                 for child in node.children.values())


def frame(kv: RadixManager, title: str) -> Frame:
    """A copy of what the manager holds now, after its own check."""
    kv.check()
    return Frame(title, edges_of(kv.tree.root), {str(name): list(table) for name, table in kv.cache.tables.items()},
                 {str(name): n for name, n in kv.cache.lengths.items()}, kv.cache.pool.num_free, kv.tree.num_evictable)


def story(model: LoadedModel) -> list[Frame]:
    """Nine blocks of 2 tokens, the three prompts worked by hand, and a fourth that shares nothing."""
    engine, kv = radix_engine(model, num_blocks=9, block_size=2, max_num_seqs=4)
    frames: list[Frame] = []

    def then(title: str, max_tokens: int = 0, **prompts: Sequence[int]) -> None:
        for name, prompt in prompts.items():
            engine.add(Request(name, list(prompt), SamplingParams(max_tokens=max_tokens, ignore_eos=True)))
        engine.step()
        frames.append(frame(kv, f"{len(frames) + 1}. {title}"))

    then("A has read its 7 tokens", 3, A=HAND["A"])
    then("B hits 1 2 | 3 4: the edge is split", 4, B=HAND["B"])
    then("A has ended; its whole blocks stay")
    then("C's six ids are all known, four are a hit", 2, C=HAND["C"])
    then("B and C have ended: nothing is locked")
    then("D needs 5 blocks, 2 are free: 3 are evicted", 2, D=range(20, 30))
    return frames


def tree_picture(frames: Sequence[Frame]) -> Figure:
    """The tree at each moment, from left to right, with the running requests' tables below."""
    rows = -(-len(frames) // 2)
    figure = Figure(figsize=(10.6, 2.1 * rows), layout=ConstrainedLayoutEngine(wspace=0.08))
    panels = figure.subplots(rows, 2, squeeze=False)
    for axes, moment in zip(panels.flat, frames, strict=False):
        _draw_frame(axes, moment)
    handles = [Patch(facecolor=LOCKED, edgecolor="black", label="locked: a running request stands on it"),
               Patch(facecolor=EVICTABLE, edgecolor="black", label="evictable: only the tree holds it")]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
    return figure


def _draw_frame(axes: Axes, moment: Frame) -> None:
    axes.text(0.0, 0.0, "root", ha="center", va="center", fontsize=9)
    _draw_edges(axes, moment.edges, 0.45, 0.0)
    below = PITCH * max(1, sum(edge.leaves for edge in moment.edges)) - 0.5
    for i, (name, table) in enumerate(moment.tables.items()):
        axes.text(-0.35, below + 0.45 * i, f"{name}: block table {' '.join(map(str, table))}, {moment.tokens[name]} "
                  "tokens stored", ha="left", va="center", fontsize=9)
    axes.set(xlim=(-0.6, 9.4), ylim=(2 * PITCH + 0.3, -0.95))
    axes.set_title(moment.title, loc="left", fontsize=10)
    axes.set_title(f"{moment.free} free, {moment.evictable} evictable", loc="right", fontsize=9)
    axes.axis("off")


def _draw_edges(axes: Axes, edges: Sequence[Edge], x: float, y: float) -> None:
    """Edges from (x, y) on: the first goes straight on, the others hang below it."""
    row = y
    for edge in edges:
        axes.plot([x, x, x + 0.35], [y, row, row], color="black", linewidth=1.2, zorder=1)
        end = x + 0.35
        for ids, block in zip(edge.key, edge.blocks, strict=True):
            axes.add_patch(Rectangle((end, row - 0.4), 1.3, 0.8, facecolor=LOCKED if edge.locks else EVICTABLE,
                                     edgecolor="black", linewidth=0.9, zorder=2))
            axes.text(end + 0.65, row - 0.12, " ".join(map(str, ids)), ha="center", va="center", fontsize=10, zorder=3)
            axes.text(end + 0.65, row + 0.22, f"block {block}", ha="center", va="center", fontsize=7, zorder=3)
            end += 1.3
        if edge.locks:
            axes.text(x + 0.37, row - 0.44, f"{edge.locks} lock{'s' * (edge.locks > 1)}", ha="left", va="bottom",
                      fontsize=8)
        if edge.children:
            axes.plot([end, end + 0.2], [row, row], color="black", linewidth=1.2, zorder=1)
            _draw_edges(axes, edge.children, end + 0.2, row)
        row += PITCH * edge.leaves


# --- one tree by itself, for the notebook ----------------------------------------------------------------------------


def outline(tree: RadixTree) -> Iterator[str]:
    """The tree as lines of text: the ids of each block, its number, the locks."""
    waiting = [(child, 0) for child in reversed(tree.root.children.values())]
    while waiting:
        node, depth = waiting.pop()
        blocks = " | ".join(" ".join(map(str, ids)) for ids in node.key)
        yield f"{'    ' * depth}{blocks:14} blocks {node.blocks}, {node.lock_count} locks"
        waiting += [(child, depth + 1) for child in reversed(node.children.values())]


# --- a chat ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chat:
    """A conversation through one engine: what each turn sent, found and computed."""

    prompts: list[int]        # tokens of each turn's prompt
    cached: list[int]         # of them, found stored
    computed: list[int]       # tokens that went through the model in each turn, the answer's own included
    answers: list[list[int]]
    counters: Counters


def chat(model: LoadedModel, row: str, turns: int = TURNS, block_size: int = 16) -> Chat:
    """Each turn sends the whole conversation so far and a new question; the answer joins the conversation."""
    engine = lineage.build(lineage.find(row), model, num_blocks=64, block_size=block_size, max_num_seqs=1)
    history = [(5 * i) % 61 for i in range(SYSTEM)]
    found = Chat([], [], [], [], engine.counters)
    for turn in range(turns):
        history += [(7 * turn + 3 * i) % 59 for i in range(TURN)]
        request = Request(str(turn), list(history), SamplingParams(max_tokens=ANSWER, ignore_eos=True))
        before = engine.counters.tokens_computed
        list(run(engine, [request]))
        found.prompts.append(len(history))
        found.cached.append(request.num_cached_tokens or 0)
        found.computed.append(engine.counters.tokens_computed - before)
        found.answers.append(request.output_token_ids)
        history += request.output_token_ids
    return found


def chat_picture(chats: Mapping[str, Chat]) -> Figure:
    """Tokens computed in each turn, row beside row."""
    figure = Figure(figsize=(8.6, 3.3), layout="constrained")
    axes, width = figure.subplots(), 0.84 / len(chats)
    for i, (name, found) in enumerate(chats.items()):
        places = [turn + (i - (len(chats) - 1) / 2) * width for turn in range(1, len(found.computed) + 1)]
        bars = axes.bar(places, found.computed, width * 0.95, color=(GREY, BLUE)[i % 2],
                        label=f"{name}: {sum(found.computed):,} tokens computed in all")
        axes.bar_label(bars, fontsize=8.5, padding=2)
    some = next(iter(chats.values()))
    axes.set_xticks(range(1, len(some.prompts) + 1), [f"{turn}\n{n}" for turn, n in enumerate(some.prompts, 1)])
    axes.set(ylabel="tokens computed", xlabel="turn, and tokens of its prompt", ylim=(0, max(some.computed) * 1.15))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", frameon=False)
    return figure


# --- time to first token ---------------------------------------------------------------------------------------------


def ttft_picture(result: Mapping[str, Any]) -> Figure:
    """Cold and cached TTFT by the length of the shared prefix; dashes are what the machine allows, if known."""
    rows = result["rows"]
    figure = Figure(figsize=(8.6, 3.6), layout="constrained")
    axes, places = figure.subplots(), range(len(rows))
    for what, colour, shift in (("cold", GREY, -0.21), ("cached", BLUE, 0.21)):
        times = [row[f"{what}_ms"] for row in rows]
        bars = axes.bar([x + shift for x in places], times, 0.4, color=colour, label=what)
        axes.bar_label(bars, [f"{ms:,.0f} ms\n{row[f'{what}_tokens']:,} tokens" for ms, row in
                              zip(times, rows, strict=True)], fontsize=8, padding=2)
        for x, ms in zip(places, ceilings(result, what), strict=False):
            axes.hlines(ms, x + shift - 0.2, x + shift + 0.2, color=VERMILION, linestyle="--", linewidth=1.6,
                        label="" if x or what == "cached" else "what the machine allows")
    axes.set_xticks(list(places), [f"{row['prefix']:,} + {result['question']}" for row in rows])
    axes.set(yscale="log", ylabel="TTFT in ms, logarithmic", xlabel="tokens of the shared prefix and of the question",
             ylim=(min(row["cached_ms"] for row in rows) / 6, max(row["cold_ms"] for row in rows) * 4))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", frameon=False)
    return figure


def ceilings(result: Mapping[str, Any], what: str) -> list[float]:
    """The least milliseconds of each prompt, cold or cached; empty if the machine's limits were not measured."""
    from benchmarks.ceilings import Sizes, Step, allowed  # beside the chapters in the repository, not of the package

    machine = result["machine"]
    if not {"bandwidth_gb_s", "peak_gflop_s"} <= machine.keys():
        return []
    config = load_model(result["model"]["name"], result["model"]["dtype"], "cpu").config
    sizes = Sizes.of(config, getattr(torch, result["model"]["dtype"]))
    steps = [Step(row[f"{what}_tokens"], row["cold_tokens"], cached=True) for row in result["rows"]]
    return [allowed(step, sizes, machine)[0] * 1000 for step in steps]
