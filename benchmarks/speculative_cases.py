"""What the speculative table is counted from: passes, the cases they belong to, and the arithmetic over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks import metrics
from benchmarks.drafts import Variant, shown
from benchmarks.loop import Trace
from benchmarks.measurement import same_counts
from benchmarks.result_file import Result
from benchmarks.run import raw
from liteinfer.trace import StepRecord

BASELINE = "liteinfer-radix"
COUNTED = ("forward_passes", "tokens_computed", "prefix_hit_tokens", "drafted_tokens", "accepted_tokens", "preemptions")


@dataclass(frozen=True)
class Taken:
    """One pass: requests in flight together, the first to the last of them.

    `alone`: of each decode step that ran one request and nothing else, how many guesses it checked, and its seconds.
    """

    traces: list[Trace]
    counters: dict[str, int]
    alone: list[tuple[int, float]]

    @property
    def seconds(self) -> float:
        return metrics.throughput(self.traces, wanted(self.traces))["wall_s"] or 0.0


@dataclass
class Case:
    """A draft (None: the baseline) on a kind of prompt at a width, and what it has shown so far."""

    kind: str
    variant: Variant | None
    width: int
    counters: list[dict[str, int]] = field(default_factory=list)
    rounds: list[list[Taken]] = field(default_factory=list)   # at width 1 a pass for each prompt, in order
    stopped: str | None = None     # why it takes no further turns

    @property
    def label(self) -> tuple[str, int]:
        return title(self.kind, self.variant), self.width

    def keep(self, passes: list[Taken]) -> None:
        """A round is done. Raises RuntimeError if it counted anything else than the first."""
        self.counters = same_counts(self.counters, [taken.counters for taken in passes])
        self.rounds.append(passes)


@dataclass
class Group:
    """The prompts of one kind, and all cases on them."""

    kind: str
    prompts: list[list[int]]
    cases: list[Case]
    loops: list[bool] = field(default_factory=list)   # of each prompt; empty until the baseline has run them
    rounds: list[int] = field(default_factory=list)   # those of which everything was run
    stopped: str | None = None

    @property
    def label(self) -> tuple[str, int]:
        return self.kind, 1

    @property
    def counting(self) -> list[int]:
        return [i for i, loops in enumerate(self.loops) if not loops]

    def at(self, width: int) -> list[Case]:
        """The baseline, then the drafts."""
        return [case for case in self.cases if case.width == width]

    def passes(self, case: Case, loops: bool = False) -> list[list[Taken]]:
        """Of each round the passes that count; or, at width 1, those of the prompts that loop."""
        if case.width > 1:
            return case.rounds
        return [[one for one, looping in zip(taken, self.loops, strict=True) if looping == loops]
                for taken in case.rounds]


def decodes(steps: Sequence[StepRecord], prefilled: Mapping[str, int]
            ) -> tuple[dict[str, int], list[tuple[int, float]]]:
    """What the decode parts of some steps gave; and guesses and seconds of each step that was one of them and no more.

    A part is a decode if the whole prompt (`prefilled` tokens) was computed before: the last token of a
    prompt may be computed alone as well.
    """
    parts = [part for step in steps for part in step.parts if part.start >= prefilled[part.request_id]]
    alone = [(len(step.parts[0].draft), step.ended_at - step.started_at) for step in steps
             if len(step.parts) == 1 and step.parts[0].start >= prefilled[step.parts[0].request_id]]
    tokens = sum(part.new_tokens for step in steps for part in step.parts)
    return {"output_tokens": tokens, "decode_passes": len(parts),
            "decode_tokens": sum(part.new_tokens for part in parts)}, alone


def figures(mine: Sequence[Taken], theirs: Sequence[Taken]) -> Result:
    """One round of a draft, beside the baseline's."""
    traces = [trace for taken in mine for trace in taken.traces]
    latency = metrics.latency(traces, wanted(traces))
    tok_s, baseline = rate(mine), rate(theirs)
    return {"tok_s": tok_s, "baseline_tok_s": baseline, "speedup": tok_s / baseline,
            "itl_p50_ms": latency["itl_p50_ms"], "tpot_p50_ms": latency["tpot_p50_ms"],
            "raw": [[raw(trace, taken.traces[0].added_at) for trace in taken.traces] for taken in mine]}


def rate(passes: Sequence[Taken]) -> float:
    """Output tokens over the time the passes took, one after the other, from the first add to the last token."""
    return summed(passes, "output_tokens") / sum(taken.seconds for taken in passes)


def summed(passes: Sequence[Taken], key: str) -> int:
    return sum(taken.counters[key] for taken in passes)


def wanted(traces: Sequence[Trace]) -> dict[str, int]:
    """A token at least: outputs end at EOS."""
    return {trace.request_id: 1 for trace in traces}


def outputs(group: Group, case: Case) -> dict[str, list[int]]:
    """The first round's tokens, by prompt; of one that was run several times, all of its outputs with -1 between."""
    found: dict[str, list[int]] = {}
    traces = [trace for taken in group.passes(case)[0] for trace in taken.traces]
    for i, trace in zip(repeated(group.counting, len(traces)), traces, strict=True):
        found.setdefault(str(i), []).extend((*trace.token_ids, -1))
    return found


def repeated(items: Sequence[Any], count: int) -> list[Any]:
    """The items over and over, until there are `count`."""
    return [items[i % len(items)] for i in range(count)]


def described(variant: Variant) -> Result:
    return {"draft": shown(variant.name), "k": variant.k, "pause": asdict(variant.pause) if variant.pause else None}


def title(kind: str, variant: Variant | None) -> str:
    return f"{kind}, {variant or BASELINE}"
