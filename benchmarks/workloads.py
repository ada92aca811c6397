"""What the rows are asked to do: named shapes, and the prompts that fill them.

Prompts are windows of data/prose.txt, tokenized once by the model's own
tokenizer. They start at word boundaries spread over the text, and no two begin
with the same 8 tokens, so a prefix cache finds nothing to share. The order does
not depend on how many are taken or how long they are: a row that runs 4 prompts
runs the first 4 of the row that runs 64.
"""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from liteinfer.request import Request, SamplingParams

if TYPE_CHECKING:
    from liteinfer.loading import LoadedModel

PROSE = Path(__file__).parent / "data" / "prose.txt"
FIRST_BLOCK = 8          # no two prompts share their first 8 tokens
LONGEST_ISL = 4096
GOLDEN = (5**0.5 - 1) / 2
ROLES = ("throughput", "latency", "warmup")   # prompt 3 i + r is the i-th of role r: no role sees another's


@dataclass(frozen=True)
class Shape:
    """How long, and how many. `output` is the shortest and the longest output, in tokens.

    `rate`: how many requests of the throughput pass arrive in a second; None if they are all there at once.
    """

    name: str
    isl: int
    output: tuple[int, int]
    latency_prompts: int
    throughput_prompts: Mapping[int, int]   # by width; a width not listed takes the next smaller one's
    warmup_tokens: int = 4
    rate: float | None = None

    @property
    def osl(self) -> int | str:
        shortest, longest = self.output
        return longest if shortest == longest else f"{shortest}..{longest}"

    def output_length(self, i: int) -> int:
        """Tokens that prompt i must give: spread evenly over `output`, the same on every machine."""
        shortest, longest = self.output
        return shortest + int((i * GOLDEN) % 1 * (longest - shortest + 1))

    def prompts_at(self, width: int) -> int:
        listed = [w for w in self.throughput_prompts if w <= width] or [min(self.throughput_prompts)]
        return self.throughput_prompts[max(listed)]

    def arrivals(self, count: int) -> list[float] | None:
        """When each of `count` requests is due, in seconds; None without a rate.

        A Poisson process: gaps are exponential, with a mean of 1 / rate. The same for every row and
        round; a row with fewer prompts has the first of them.
        """
        if self.rate is None:
            return None
        draw = random.Random(0)
        return list(accumulate(draw.expovariate(self.rate) for _ in range(count)))

    def override(self, isl: int | None = None, osl: int | None = None, prompts: int | None = None,
                 rate: float | None = None) -> Shape:
        """The same shape with other numbers. Raises ValueError for one that is out of range."""
        for setting, value in (("isl", isl), ("osl", osl), ("prompts", prompts)):
            if value is not None and value < 1:
                raise ValueError(f"{setting} must be at least 1, got {value}")
        if isl is not None and isl > LONGEST_ISL:
            raise ValueError(f"isl must be at most {LONGEST_ISL}, got {isl}")
        if rate is not None and not 0 < rate < inf:
            raise ValueError(f"rate must be above 0 requests per second, got {rate:g}")
        shape = self if rate is None else replace(self, rate=rate)
        if isl is not None:
            shape = replace(shape, isl=isl)
        if osl is not None:
            shape = replace(shape, output=(osl, osl))
        if prompts is not None:
            shape = replace(shape, latency_prompts=prompts, throughput_prompts={1: prompts})
        return shape


SHAPES: Mapping[str, Shape] = {shape.name: shape for shape in (
    Shape("quick", 64, (24, 24), 4, {1: 4, 4: 8, 32: 64}),
    Shape("course", 128, (64, 64), 2, {1: 2, 4: 16, 32: 64}),
    Shape("paper", 128, (256, 256), 50, {1: 200}),
    Shape("ragged", 128, (16, 256), 2, {1: 128}),
)}


def find_shape(name: str) -> Shape:
    """Raises ValueError for an unknown name; the message lists those there are."""
    if name not in SHAPES:
        raise ValueError(f"unknown shape {name!r}; the shapes are {', '.join(SHAPES)}")
    return SHAPES[name]


@dataclass(frozen=True)
class Workload:
    """A shape with its prompts: what one row at one width runs. Prompts are lists of token ids."""

    shape: Shape
    latency: list[list[int]]
    throughput: list[list[int]]
    warmup: list[list[int]]
    hashes: list[str] = field(default_factory=list)   # of the throughput prompts, in order

    def requests(self, role: str) -> list[Request]:
        """Fresh requests: greedy, and of a forced length."""
        prompts = {"latency": self.latency, "throughput": self.throughput, "warmup": self.warmup}[role]
        lengths = [self.shape.warmup_tokens if role == "warmup" else self.shape.output_length(i)
                   for i in range(len(prompts))]
        return [Request(f"{role}-{i}", list(prompt), SamplingParams(max_tokens=length, seed=0, ignore_eos=True))
                for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))]

    @property
    def prompt_hash(self) -> str:
        """Over the ids of every prompt, whatever its role."""
        return short_hash([token for prompts in (self.latency, self.throughput, self.warmup)
                           for prompt in prompts for token in (*prompt, -1)])


def workload(model: LoadedModel, shape: Shape, width: int = 1) -> Workload:
    """The prompts of a shape for a row of this width; as many warm-ups as the row is wide.

    Raises:
        ValueError: the text has too few distinct windows; the message has both numbers.
    """
    counts = {"throughput": shape.prompts_at(width), "latency": shape.latency_prompts, "warmup": width}
    taken = take(model, shape.isl, len(ROLES) * max(counts.values()))
    prompts = {role: taken[r::len(ROLES)][:counts[role]] for r, role in enumerate(ROLES)}
    return Workload(shape, prompts["latency"], prompts["throughput"], prompts["warmup"],
                    [short_hash(prompt) for prompt in prompts["throughput"]])


def take(model: LoadedModel, isl: int, count: int) -> list[list[int]]:
    """The first `count` prompts of `isl` tokens each, distinct in their first 8 tokens."""
    if model.tokenizer is None:
        candidates = random_prompts(model.config.vocab_size, isl)
    else:
        candidates = text_windows(*tokenize(model.tokenizer, PROSE.read_text(encoding="utf-8")), isl)
    prompts: dict[tuple[int, ...], list[int]] = {}
    for prompt in candidates:
        if len(prompts) == count:
            break
        prompts.setdefault(tuple(prompt[:FIRST_BLOCK]), prompt)
    if len(prompts) < count:
        raise ValueError(f"{count} distinct prompts asked for, but there are only {len(prompts)} "
                         f"that differ in their first {min(isl, FIRST_BLOCK)} tokens")
    return list(prompts.values())


def tokenize(tokenizer: object, text: str) -> tuple[list[int], list[int]]:
    """The ids of the text, and the indices of the tokens at which a word begins."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)  # type: ignore[operator]
    starts = [i for i, (start, end) in enumerate(encoded["offset_mapping"]) if _begins_word(text, start, end)]
    return list(encoded["input_ids"]), starts


def _begins_word(text: str, start: int, end: int) -> bool:
    """Tokenizers differ in whether a token's span includes the space before it."""
    after_space = start == 0 or text[start].isspace() or text[start - 1].isspace()
    return after_space and text[start:end].strip()[:1].isalnum()


def text_windows(ids: Sequence[int], starts: Sequence[int], isl: int) -> Iterator[list[int]]:
    """A window at each word start once, in an order that spreads; past the end it goes on at the beginning.

    Steps of the golden ratio fill the text evenly however many windows are taken. Where a
    start was already used, the next free one is taken.
    """
    free = list(range(len(starts)))
    for i in range(len(starts)):
        place = bisect_left(free, int((i * GOLDEN) % 1 * len(starts))) % len(free)
        start = starts[free.pop(place)]
        yield [ids[(start + offset) % len(ids)] for offset in range(isl)]


def random_prompts(vocab_size: int, isl: int) -> Iterator[list[int]]:
    """Seeded random ids, for tiny models without a tokenizer. Gives up after 100,000 prompts."""
    for i in range(100_000):
        draw = random.Random(i)
        yield [draw.randrange(vocab_size) for _ in range(isl)]


def short_hash(ids: Sequence[int]) -> str:
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:12]
