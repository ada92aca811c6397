"""Pictures of chapter 4: a pool of blocks at work, the slots of a step, the bytes held, the slots wasted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from liteinfer.cache.contiguous import ContiguousCache
from liteinfer.cache.paged import GatherSdpa, PagedCache
from liteinfer.engines.paged import feed
from liteinfer.loading import ModelConfig, load_model, tiny_model
from liteinfer.model.layout import Layout
from liteinfer.model.linear import Plain
from liteinfer.model.llama import load_llama
from liteinfer.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY
from liteinfer.request import Counters

CPU = torch.device("cpu")
MB = 1e6
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SEQUENCES = "ABCD"
COLOURS = (SKY, ORANGE, PURPLE, GREEN)   # of sequences A, B, C, D
LEFT_OVER = "#DDDDDD"
WIDTH = 0.92                             # of a slot in the drawings; the rest is the gap to the next one


def pictures() -> dict[str, Figure]:
    """The chapter's stored pictures."""
    from benchmarks.workloads import SHAPES  # beside the chapters in the repository, not part of the package

    ragged, config = SHAPES["ragged"], load_model("smollm2-135m", "float32", "cpu").config
    outputs = [ragged.output_length(i) for i in range(ragged.prompts_at(1))]
    return {"pool.svg": pool_picture(pool_story()), "slots.svg": slots_picture(*used_pool()),
            "memory.svg": memory_picture(config, 2048),
            "waste.svg": waste_picture(waste(ragged.isl, outputs), mean_length(ragged.isl, outputs))}


# --- a pool at work --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slot:
    """One slot of a block: the token whose key lies there, and whether a sequence still counts it as its own."""

    token: str    # "a5": token 5 of sequence A; "" if nothing was ever written
    alive: bool


@dataclass(frozen=True)
class Frame:
    """What a pool looked like at one moment."""

    title: str
    blocks: list[list[Slot]]
    holders: list[int]             # of each block
    tables: dict[Any, list[int]]   # of each sequence
    free: list[int]                # in the order in which they will be handed out


class Recorder:
    """A paged cache on the tiny model, and who wrote each slot, by the slot mapping of every step."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        model = tiny_model("llama")
        self.llama = load_llama(model, Plain())
        self.cache = PagedCache(model.config, num_blocks, block_size, model.dtype, model.device, GatherSdpa())
        self.cache.keys.fill_(float("nan"))
        self.names = [""] * (num_blocks * block_size)

    @torch.inference_mode()
    def grow(self, **lengths: int) -> None:
        """One step: A=6, B=3 feeds A up to 6 tokens and B up to 3."""
        sequences = {SEQUENCES.index(name): list(range(length)) for name, length in lengths.items()}
        for seq, ids in sequences.items():
            self.cache.reserve(seq, len(ids))
        feed(self.llama, self.cache, sequences, Counters())
        layout, row = self.cache.layout, 0
        for seq, new in zip(layout.seq_ids, layout.query_lens, strict=True):
            for i in range(row, row + new):
                self.names[int(layout.slot_mapping[i])] = f"{SEQUENCES[seq].lower()}{int(layout.positions[i])}"
            row += new
        self.cache.check()

    def fork(self, name: str, of: str, tokens: int) -> None:
        """A sequence that begins with the first `tokens` of another, a whole number of blocks, and shares them."""
        seq, pool = SEQUENCES.index(name), self.cache.pool
        shared = self.cache.tables[SEQUENCES.index(of)][:tokens // pool.block_size]
        pool.share(shared)
        self.cache.tables[seq], self.cache.lengths[seq] = list(shared), tokens

    def end(self, name: str) -> None:
        self.cache.free(SEQUENCES.index(name))
        self.cache.check()

    def frame(self, title: str) -> Frame:
        cache, size = self.cache, self.cache.pool.block_size
        written = ~cache.keys[0, :-1].isnan().any(dim=(2, 3)).flatten()       # the null block aside
        assert written.tolist() == [bool(name) for name in self.names]
        alive = {table[t // size] * size + t % size
                 for seq, table in cache.tables.items() for t in range(cache.lengths[seq])}
        slots = [Slot(name, i in alive) for i, name in enumerate(self.names)]
        return Frame(title, [slots[i:i + size] for i in range(0, len(slots), size)], list(cache.pool.ref_counts),
                     {seq: list(table) for seq, table in sorted(cache.tables.items())}, cache.pool.free_list[::-1])


def pool_story() -> list[Frame]:
    """Six blocks of 4 tokens, and four sequences: they start, grow, share, end and start."""
    story = Recorder(num_blocks=6, block_size=4)
    frames: list[Frame] = []

    def then(title: str, do: Callable[[], None]) -> None:
        do()
        frames.append(story.frame(f"{len(frames) + 1}. {title}"))

    then("A starts with 5 tokens", lambda: story.grow(A=5))
    then("one step: A adds 1, B starts with 3", lambda: story.grow(A=6, B=3))
    then("A grows to 9: its next block is not beside its last", lambda: story.grow(A=9))
    story.fork("C", of="A", tokens=4)
    then("C begins like A: it shares block 0, then adds 2", lambda: story.grow(C=6))
    then("A ends: two blocks are free, block 0 has a holder", lambda: story.end("A"))
    then("D starts with 3: its last slot still holds A's a7", lambda: story.grow(D=3))
    return frames


def pool_picture(frames: Sequence[Frame]) -> Figure:
    """The pool at each moment: slots in the colour of who holds them, tables and free list below."""
    rows = -(-len(frames) // 2)
    figure = Figure(figsize=(10.4, 1.6 * rows), layout="constrained")
    for axes, frame in zip(figure.subplots(rows, 2, squeeze=False).flat, frames, strict=False):
        _frame(axes, frame)
    looks = {"never written": "white", "left over: a key that no living sequence owns": LEFT_OVER}
    figure.legend([Rectangle((0, 0), 1, 1, facecolor=colour, edgecolor="black") for colour in looks.values()],
                  list(looks), loc="outside lower center", ncols=2, frameon=False)
    return figure


def _frame(axes: Axes, frame: Frame) -> None:
    size = len(frame.blocks[0])
    pitch = size + 0.55
    owners = [[seq for seq, table in frame.tables.items() if block in table] for block in range(len(frame.blocks))]
    for block, slots in enumerate(frame.blocks):
        x, holders = block * pitch, frame.holders[block]
        axes.text(x + size / 2, 1.12, f"block {block}", ha="center", va="bottom", fontsize=9)
        axes.add_patch(Rectangle((x - 0.12, -0.12), size + 0.2, 1.24, fill=False,
                                 linewidth=2.0 if holders else 0.8, edgecolor="black" if holders else GREY))
        for s, slot in enumerate(slots):
            _slot(axes, x + s, 0, slot, [COLOURS[seq] for seq in owners[block]])
        if holders > 1:
            axes.text(x + size / 2, -0.2, f"{holders} holders", ha="center", va="top", fontsize=8)
    tables = "    ".join(f"{SEQUENCES[seq]}: {' '.join(map(str, table))}" for seq, table in frame.tables.items())
    axes.text(-0.1, -0.85, f"block tables   {tables}", ha="left", va="center", fontsize=9)
    free = " ".join(map(str, frame.free)) or "none"
    axes.text(len(frame.blocks) * pitch - 0.6, -0.85, f"free: {free}", ha="right", va="center", fontsize=9)
    axes.set(xlim=(-0.4, len(frame.blocks) * pitch - 0.4), ylim=(-1.1, 1.55))
    axes.set_title(frame.title, loc="left", fontsize=10)
    axes.axis("off")


def _slot(axes: Axes, x: float, y: float, slot: Slot, colours: Sequence[str]) -> None:
    """One slot: split between the colours of all who hold it; what nobody counts as a token is grey or white."""
    if slot.alive:
        for i, colour in enumerate(colours):
            axes.add_patch(Rectangle((x, y + i / len(colours)), WIDTH, 1 / len(colours), facecolor=colour))
    else:
        axes.add_patch(Rectangle((x, y), WIDTH, 1, facecolor=LEFT_OVER if slot.token else "white"))
    axes.add_patch(Rectangle((x, y), WIDTH, 1, fill=False, edgecolor="black", linewidth=0.6))
    axes.text(x + WIDTH / 2, y + 0.5, slot.token, ha="center", va="center", fontsize=8,
              color="black" if slot.alive else "#666666")


# --- the slots of a step ---------------------------------------------------------------------------------------------


def used_pool() -> tuple[PagedCache, Layout]:
    """The hand-worked step in a pool of 8 blocks of 4: A has 5 tokens and adds 1, B starts with 3.

    Eight sequences of one block each were there before; those in blocks 5, 2
    and 7 have ended, so the free list hands out 7, 2, 5.
    """
    model = tiny_model("llama")
    cache = PagedCache(model.config, 8, 4, model.dtype, model.device, GatherSdpa())
    for other in range(8):
        cache.reserve(100 + other, 4)
    for block in (5, 2, 7):
        cache.free(100 + block)
    cache.reserve(0, 5)
    cache.begin(Layout.of([(0, 0, 5)], CPU))
    cache.reserve(0, 6)
    cache.reserve(1, 3)
    layout = Layout.of([(0, 5, 1), (1, 0, 3)], CPU)
    cache.begin(layout)
    return cache, layout


def slots_picture(cache: PagedCache, layout: Layout) -> Figure:
    """The flat row of a step's tokens, the block tables, and where in the pool each token goes."""
    figure = Figure(figsize=(9.6, 3.9), layout="constrained")
    axes, size = figure.subplots(), cache.pool.block_size
    pitch, top = size + 0.6, 4.3
    seqs = [seq for seq, new in zip(layout.seq_ids, layout.query_lens, strict=True) for _ in range(new)]
    for block in range(cache.pool.num_blocks):
        x = block * pitch
        owner = next((seq for seq in layout.seq_ids if block in cache.tables[seq]), None)
        used = cache.lengths[owner] - cache.tables[owner].index(block) * size if owner is not None else size
        axes.text(x + size / 2, -0.75, f"block {block}", ha="center", va="top", fontsize=9)
        for s in range(size):
            token = "" if owner is None or s >= used else (
                f"{SEQUENCES[owner].lower()}{cache.tables[owner].index(block) * size + s}")
            _slot(axes, x + s, 0, Slot(token, bool(token)), [] if owner is None else [COLOURS[owner]])
            if owner is None:
                axes.add_patch(Rectangle((x + s, 0), WIDTH, 1, facecolor=LEFT_OVER, edgecolor="black", linewidth=0.6))
            axes.text(x + s + WIDTH / 2, -0.12, str(block * size + s), ha="center", va="top", fontsize=7, color=GREY)
    start = 13.0
    for row, (seq, position, slot) in enumerate(zip(seqs, layout.positions.tolist(),
                                                    cache.layout.slot_mapping.tolist(), strict=True)):
        x = start + row * 2.2
        axes.add_patch(Rectangle((x, top), 1.6, 1, facecolor=COLOURS[seq], edgecolor="black"))
        axes.text(x + 0.8, top + 0.5, f"{SEQUENCES[seq].lower()}{position}", ha="center", va="center", fontsize=11)
        axes.text(x + 0.8, top + 1.1, f"slot {slot}", ha="center", va="bottom", fontsize=9)
        end = (slot // size * pitch + slot % size + WIDTH / 2, 1.08)
        axes.add_patch(FancyArrowPatch((x + 0.8, top), end, arrowstyle="-|>", mutation_scale=11, linewidth=1.3,
                                       color=COLOURS[seq]))
    axes.text(start - 0.5, top + 0.5, "the step", ha="right", va="center")
    axes.text(start - 0.5, top + 1.1, "slot_mapping", ha="right", va="bottom", fontsize=9)
    for i, seq in enumerate(layout.seq_ids):
        table = "  ".join("null" if block == cache.pool.null_block else str(block)
                          for block in cache.layout.block_tables[i].tolist())
        axes.text(27.5, top + 1.0 - 0.75 * i, f"block table of {SEQUENCES[seq]}:  {table}", ha="left", va="center")
    axes.text(-0.1, 1.35, "the pool", ha="left", va="bottom")
    axes.text(-0.1, -1.55, "grey: other sequences' blocks. Small numbers: slots, counted through the pool.", ha="left",
              va="top", fontsize=9)
    axes.set(xlim=(-0.4, cache.pool.num_blocks * pitch), ylim=(-2.3, top + 2.0))
    axes.axis("off")
    return figure


# --- bytes held ------------------------------------------------------------------------------------------------------


def held(config: ModelConfig, lengths: Iterable[int], block_size: int = 16,
         dtype: torch.dtype = torch.float32) -> list[int]:
    """Bytes of blocks that one sequence holds at each of these growing lengths, asked of a live cache."""
    wanted = list(lengths)
    cache = PagedCache(config, -(-max(wanted) // block_size), block_size, dtype, CPU, GatherSdpa())
    found = []
    for length in wanted:
        cache.reserve(0, length)
        found.append(cache.pool.num_used * cache.block_bytes)
    return found


def memory_picture(config: ModelConfig, max_model_len: int, block_size: int = 16) -> Figure:
    """Bytes that one sequence holds against its tokens: reserved whole, or block by block."""
    contiguous = ContiguousCache(config, 1, max_model_len, torch.float32, CPU).nbytes
    per_token = contiguous // max_model_len
    figure = Figure(figsize=(9.0, 3.4), layout="constrained")
    whole, near = figure.subplots(1, 2)
    for axes, lengths in ((whole, range(1, max_model_len + 1)), (near, range(100, 165))):
        axes.plot(lengths, [n / MB for n in held(config, lengths, block_size)], drawstyle="steps-mid", color=BLUE,
                  linewidth=2, label=f"paged, blocks of {block_size}")
        axes.plot(lengths, [n * per_token / MB for n in lengths], color=ORANGE, linewidth=1.5, label="tokens stored")
        axes.set(xlabel="tokens of the sequence", ylabel="MB held")
        axes.spines[["top", "right"]].set_visible(False)
    whole.axhline(contiguous / MB, color="black", linestyle="--", label=f"contiguous, {max_model_len:,} reserved")
    whole.set(title="one sequence from start to limit", xlim=(0, max_model_len), ylim=(0, contiguous / MB * 1.08))
    near.set(title="a closer look: at most one block too much")
    handles, labels = whole.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return figure


# --- slots wasted ----------------------------------------------------------------------------------------------------


def waste(isl: int, outputs: Sequence[int], block_sizes: Sequence[int] = BLOCK_SIZES) -> dict[int, float]:
    """The share of held slots without a token, by block size, over all steps of all requests.

    Each request is a prompt of `isl` tokens and its output's length. Asked of a
    live cache; keys and values themselves are not needed for it.
    """
    config, found = tiny_model("llama").config, {}
    for block_size in block_sizes:
        blocks = -(-(isl + max(outputs)) // block_size)
        cache = PagedCache(config, blocks, block_size, torch.float32, CPU, GatherSdpa())
        slots = tokens = 0
        for output in outputs:
            for length in range(isl, isl + output):                          # the last token is never stored
                cache.reserve(0, length)
                slots, tokens = slots + cache.pool.num_used * block_size, tokens + length
            cache.free(0)
        found[block_size] = 1 - tokens / slots
    return found


def mean_length(isl: int, outputs: Sequence[int]) -> float:
    """Tokens stored by a request, on average over all steps of all requests."""
    steps = [length for output in outputs for length in range(isl, isl + output)]
    return sum(steps) / len(steps)


def expected_waste(block_size: int, stored: float) -> float:
    """The share of slots wasted if every fill of the last block is equally likely: (block_size - 1) / 2 slots."""
    tail = (block_size - 1) / 2
    return tail / (stored + tail)


def waste_picture(measured: Mapping[int, float], stored: float) -> Figure:
    """Waste by block size: measured, and what (block_size - 1) / 2 slots a sequence would be."""
    figure = Figure(figsize=(7.6, 3.2), layout="constrained")
    axes, places = figure.subplots(), list(range(len(measured)))
    bars = axes.bar(places, [share * 100 for share in measured.values()], 0.62,
                    color=[ORANGE if size == 16 else BLUE for size in measured], label="measured")
    axes.bar_label(bars, [f"{share:.1%}" for share in measured.values()], padding=3, fontsize=9)
    axes.plot(places, [expected_waste(size, stored) * 100 for size in measured], color="black", marker="_",
              markersize=22, linestyle="none", label=f"(block size - 1) / 2 empty slots beside {stored:.0f} full ones")
    axes.set_xticks(places, [str(size) for size in measured])
    axes.set(xlabel="block size", ylabel="% of held slots without a token", ylim=(0, max(measured.values()) * 118))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    return figure
