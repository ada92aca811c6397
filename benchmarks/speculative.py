"""The speculative table: what guessing tokens ahead gains, by kind of prompt, draft and width; losses included.

All drafts run in the same engine, the prefix cache's, and are compared with it
without a draft, the baseline. At width 1 they take turns prompt by prompt, each in
an engine of its own, so that a slow minute hits all alike. At a larger width one
follows the other: the same prompts over and over until that many requests are
there, all at once. Every pass starts with an empty prefix cache, after a warm-up
on other text. Outputs are greedy and end at EOS. A prompt whose baseline output
falls into a loop is in no row: drafts from the text gain there, and nobody wants
the text. What they gain is in a part of its own.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import metrics
from benchmarks.codehash import row_hash
from benchmarks.drafts import Variant
from benchmarks.loop import drive
from benchmarks.measurement import Measurement, pool_blocks, requests
from benchmarks.radix import forget
from benchmarks.repetition import falls_into_a_loop, repetition_share
from benchmarks.result_file import Result
from benchmarks.run import BLOCK_SIZE, Watch, attempt, check_fits, differing, rotated
from benchmarks.speculative_cases import (
    BASELINE,
    COUNTED,
    Case,
    Group,
    Taken,
    decodes,
    described,
    figures,
    outputs,
    rate,
    repeated,
    summed,
    title,
    wanted,
)
from benchmarks.workloads import Shape, short_hash, take
from liteinfer import lineage
from liteinfer.loading import LoadedModel
from liteinfer.scheduler import SchedulerConfig
from liteinfer.trace import StepTrace

PROMPT, PASS = "prompt", "throughput"   # what the watch is told, with tok/s: of the baseline alone, of a case
WARMUP = (16, 8)   # tokens that a warm-up prompt says twice, so that all have something to guess; of its output
WARMUP_LENGTH = 2 * WARMUP[0] + WARMUP[1]


@dataclass
class Speculative(Measurement):
    """One run, and all it needs. `build` and `clock` are replaced in tests.

    Args:
        prompts: token ids, by kind.
        widths: 1, where loops are found, and any others.
        max_tokens: of every output.
    """

    kind = "speculative"

    model: LoadedModel
    variants: Sequence[Variant]
    prompts: Mapping[str, list[list[int]]]
    widths: Sequence[int]
    max_tokens: int
    rounds: int
    machine: Mapping[str, Any]
    watch: Watch
    out: Path | None = None
    build: Callable[..., Any] = lineage.build
    clock: Callable[[], float] = time.perf_counter
    groups: list[Group] = field(init=False)
    interrupted: bool = False

    def __post_init__(self) -> None:
        for kind, prompts in self.prompts.items():
            output = (self.max_tokens, self.max_tokens)
            check_fits(self.model, Shape(kind, max(map(len, prompts)), output, 1, {1: 1}))
        self.hashes = {variant.row: row_hash(lineage.find(variant.row)) for variant in self.variants}
        self.groups = [Group(kind, prompts, [Case(kind, variant, width) for width in self.widths
                                             for variant in (None, *self.variants)])
                       for kind, prompts in self.prompts.items()]
        for variant in self.variants:
            self._engine(variant, [], 1)   # refuses a draft that is none of this model's, before anything is measured

    @property
    def turns(self) -> Sequence[Group]:
        return self.groups

    @property
    def listed(self) -> Sequence[Group | Case]:
        return [*self.groups, *(case for group in self.groups for case in group.cases)]

    def _turn(self, group: Group, round_: int) -> None:
        self._one_by_one(group, round_)
        if not group.counting:
            raise RuntimeError(f"the outputs of all {len(group.prompts)} prompts fall into loops")
        for width in self.widths[1:]:
            for case in rotated(group.at(width), round_ + self.groups.index(group)):
                gc.collect()   # engines that are gone give their memory back before the next one asks
                if case.stopped is None:
                    self._attempt(case, partial(self._together, group, case, round_))
        group.rounds.append(round_)

    def _attempt(self, case: Case, work: Callable[[], object]) -> None:
        """What a draft raises costs this case its turns; what the baseline raises, the whole group."""
        if case.variant is None:
            work()
        else:
            attempt(case, work, self.watch)

    def _one_by_one(self, group: Group, round_: int) -> None:
        """Width 1: all take turns on every prompt."""
        engines, passes = dict[int, Any](), list[list[Taken]]()
        cases = group.at(1)

        def start(number: int) -> None:
            engines[number] = self._engine(cases[number].variant, group.prompts, 1, warm=True)

        def say(number: int, prompt: list[int]) -> None:
            passes[number].append(self._take(engines[number], [prompt]))

        for number, case in enumerate(cases):
            passes.append([])
            if case.stopped is None:
                self._attempt(case, partial(start, number))
        for i, prompt in enumerate(group.prompts):
            for number in rotated(range(len(cases)), round_ + i):
                if cases[number].stopped is None:
                    self._attempt(cases[number], partial(say, number, prompt))
            self.watch.passed(group.kind, 1, round_, PROMPT, rate(passes[0][-1:]))
        group.loops = group.loops or [falls_into_a_loop(taken.traces[0].token_ids) for taken in passes[0]]
        for case, taken in zip(cases, passes, strict=True):
            if case.stopped is None:
                self._attempt(case, partial(case.keep, taken))

    def _together(self, group: Group, case: Case, round_: int) -> None:
        """A larger width: that many requests at once."""
        prompts = repeated([group.prompts[i] for i in group.counting], case.width)
        case.keep([self._take(self._engine(case.variant, prompts, case.width, warm=True), prompts)])
        self.watch.passed(*case.label, round_, PASS, rate(case.rounds[-1]))

    def _engine(self, variant: Variant | None, prompts: Sequence[list[int]], width: int, warm: bool = False) -> Any:
        """The baseline's engine with this draft, and blocks for as many of the prompts as are in flight at a time."""
        lengths = [max(len(prompt) + self.max_tokens, WARMUP_LENGTH) for prompt in prompts] or [WARMUP_LENGTH]
        lengths = sorted(lengths, reverse=True)[:width]
        drafting = {} if variant is None else {"drafter": variant.drafter()}
        engine = self.build(lineage.find(BASELINE), self.model, max_num_seqs=width, max_model_len=max(lengths),
                            block_size=BLOCK_SIZE, num_blocks=pool_blocks(lengths),
                            trace=StepTrace(clock=self.clock), **drafting)
        if warm:
            warmup = [2 * ids for ids in take(self.model, WARMUP[0], width)]
            drive(engine, requests("warmup", warmup, WARMUP[1]), None, self.clock)
        return engine

    def _take(self, engine: Any, prompts: Sequence[list[int]]) -> Taken:
        """All these prompts at once, with nothing cached. Raises RuntimeError if one of them fails."""
        forget(engine)
        engine.counters = type(engine.counters)()
        engine.trace.steps.clear()
        asked = requests("prompt", prompts, self.max_tokens, ignore_eos=False)
        traces = drive(engine, asked, None, self.clock)
        if failed := metrics.failures(traces, wanted(traces)):
            raise RuntimeError(failed[0])
        counters = {key: count for key, count in asdict(engine.counters).items() if key in COUNTED}
        prefilled = {request.request_id: len(request.prompt_token_ids) for request in asked}
        counted, alone = decodes([*engine.trace.steps], prefilled)
        return Taken(traces, counters | counted, alone)

    def result(self) -> Result:
        """The result JSON of what is finished so far."""
        drafting = [(group, case) for group in self.groups for variant in self.variants for width in self.widths
                    for case in group.at(width) if case.variant == variant]
        return self.framed(
            max_tokens=self.max_tokens,
            prompt_hash=short_hash([token for prompts in self.prompts.values() for prompt in prompts
                                    for token in (*prompt, -1)]),
            rows=[self._row(group, case) for group, case in drafting
                  if group.counting and case.rounds and group.at(case.width)[0].rounds],
            loops=[self._loops(group) for group in self.groups if group.loops],
            costs=[self._cost(variant) for variant in self.variants if variant.pause is None])

    def _row(self, group: Group, case: Case) -> Result:
        assert case.variant is not None
        base = group.at(case.width)[0]
        rounds = [figures(mine, theirs) for mine, theirs
                  in zip(group.passes(case), group.passes(base), strict=False)]   # Ctrl-C: fewer of one
        of = partial(summed, group.passes(case)[0])
        differ = differing(outputs(group, case), outputs(group, base))
        drafted, passes, speedups = of("drafted_tokens"), of("decode_passes"), [taken["speedup"] for taken in rounds]
        medians = {key: median([taken[key] for taken in rounds]) if rounds[0][key] is not None else None
                   for key in ("baseline_tok_s", "tok_s", "speedup", "itl_p50_ms", "tpot_p50_ms")}
        return {"name": case.variant.row, "prompts_kind": group.kind, **described(case.variant), "width": case.width,
                "prompts": differ["prompts"], "output_tokens": of("output_tokens"), "decode_passes": passes,
                "drafted_tokens": drafted, "accepted_tokens": of("accepted_tokens"),
                "acceptance": of("accepted_tokens") / drafted if drafted else None,
                "tokens_per_pass": of("decode_tokens") / passes if passes else None,
                **medians, "speedup_range": [min(speedups), max(speedups)],
                "differs_from_baseline": differ, "rounds": rounds,
                "code_hash": self.hashes[case.variant.row], **({"stopped": case.stopped} if case.stopped else {})}

    def _loops(self, group: Group) -> Result:
        """Of a kind's prompts, those that fall into a loop, and what drafts gain there."""
        base, *drafting = group.at(1)
        shares = [repetition_share(taken.traces[0].token_ids) for taken in base.rounds[0]]
        speedups = []
        for case in drafting:
            assert case.variant is not None
            pairs = zip(group.passes(case, loops=True), group.passes(base, loops=True), strict=False)
            each = [figures(mine, theirs)["speedup"] for mine, theirs in pairs if mine]
            speedups.append({**described(case.variant), "speedup": median(each) if each else None})
        by = {which: [share for share, loops in zip(shares, group.loops, strict=True) if loops == which]
              for which in (True, False)}
        return {"prompts_kind": group.kind, "prompts": len(by[True]), "of": len(shares),
                "repetition_share": median(by[True]) if by[True] else None,
                "repetition_share_others": median(by[False]) if by[False] else None, "speedups": speedups}

    def _cost(self, variant: Variant) -> Result:
        """What one drafted token costs at width 1, drafting included, as a share of a step without drafts."""
        plain, checked = (
            [seconds * 1000 for group in self.groups for case in group.at(1) if case.variant == which
             for passes in group.passes(case) for taken in passes for guesses, seconds in taken.alone
             if guesses == k]
            for which, k in ((None, 0), (variant, variant.k)))
        times = median(plain) if plain else None, median(checked) if checked else None
        cost = (times[1] / times[0] - 1) / variant.k if times[0] and times[1] else None
        return {"draft": described(variant)["draft"], "k": variant.k, "plain_ms": times[0], "checked_ms": times[1],
                "checked_steps": len(checked), "cost": cost}


def stages(prompts: Mapping[str, Sequence[object]], variants: Sequence[Variant], widths: Sequence[int],
           max_tokens: int) -> list[tuple[tuple[str, int, str], int]]:
    """All that the watch is told of in a round, with the tokens it takes at most."""
    found = []
    for kind, each in prompts.items():
        found += [((kind, 1, PROMPT), max_tokens * (1 + len(variants)))] * len(each)
        found += [((title(kind, variant), width, PASS), max_tokens * width) for width in widths[1:]
                  for variant in (None, *variants)]
    return found


def check_sizes(widths: Sequence[int], max_tokens: int, rounds: int) -> None:
    """Raises ValueError for what makes no table; the message names the setting and the numbers."""
    if widths[0] != 1:
        raise ValueError(f"widths must begin with 1, where loops are found, got {', '.join(map(str, widths))}")
    SchedulerConfig(max_num_seqs=widths[-1])   # refuses what no step has room for
    if max_tokens < 2:
        raise ValueError(f"max-tokens must be at least 2 to have a step after the first, got {max_tokens}")
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
