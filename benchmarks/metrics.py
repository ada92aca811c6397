"""The arithmetic from traces to the tables' columns. Pure functions, no clock.

Definitions, used everywhere. A token event is an event that carries at least
one token; events without tokens count for nothing.

- TTFT: from add() to the first token event. Where requests arrive by themselves, add() means
  the moment a request was due: it may have waited for the step that was running to end.
- Queueing time: from there to the start of the first step that ran the request, which the
  engine's own trace tells.
- ITL: the gaps between consecutive token events of one request, pooled over all
  requests. An event with several tokens ends one gap, not several.
- TPOT: (last token event - first token event) / (tokens - 1) of one request;
  undefined below 2 tokens. With several tokens in an event, TPOT is the time per
  token and ITL the time per event; with one token each they agree on the mean.
- E2E: from add() to the last token event.
- wall: from the first add() to the last token event of the whole pass.
- tok/s and req/s: output tokens, and number, of the successful requests / wall.
- A request failed if it ended in an error or an abort, gave no token, or gave
  fewer tokens than it was told to. Failed requests are in no latency statistic.
- Percentiles interpolate linearly between samples (numpy's default).
- Over rounds: the median of the rounds' values, with the least and the greatest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

import numpy as np

from benchmarks.loop import Trace

Metrics = dict[str, float | None]


def failure(trace: Trace, wanted: int) -> str | None:
    """Why this request failed, or None: it gave its `wanted` tokens."""
    if trace.error is not None:
        return trace.error
    if trace.finish_reason == "abort":
        return f"aborted after {len(trace.token_ids)} tokens"
    if len(trace.token_ids) < wanted:
        return f"gave {len(trace.token_ids)} of {wanted} tokens, finish_reason {trace.finish_reason}"
    return None


def failures(traces: Sequence[Trace], wanted: Mapping[str, int]) -> list[str]:
    """One line per failed request; `wanted` is the number of tokens due by request id."""
    reasons = ((trace.request_id, failure(trace, wanted[trace.request_id])) for trace in traces)
    return [f"{request_id}: {reason}" for request_id, reason in reasons if reason is not None]


def successful(traces: Sequence[Trace], wanted: Mapping[str, int]) -> list[Trace]:
    return [trace for trace in traces if failure(trace, wanted[trace.request_id]) is None]


def token_times(trace: Trace) -> list[float]:
    """When each token event came."""
    return [at for at, tokens in trace.events if tokens > 0]


def ttft(trace: Trace) -> float | None:
    """Seconds from add() to the first token event; None without one."""
    times = token_times(trace)
    return times[0] - trace.added_at if times else None


def e2e(trace: Trace) -> float | None:
    """Seconds from add() to the last token event; None without one."""
    times = token_times(trace)
    return times[-1] - trace.added_at if times else None


def gaps(trace: Trace) -> list[float]:
    """Seconds between consecutive token events: one fewer than there are such events."""
    times = token_times(trace)
    return [after - before for before, after in pairwise(times)]


def tpot(trace: Trace) -> float | None:
    """Seconds per token after the first; None below 2 tokens.

    >>> tpot(Trace("r", 0.0, [(0.5, 1), (0.8, 3), (1.1, 3)], list(range(7))))   # 0.6 s / 6
    0.1
    """
    times, tokens = token_times(trace), len(trace.token_ids)
    return (times[-1] - times[0]) / (tokens - 1) if tokens >= 2 else None


def latency(traces: Sequence[Trace], wanted: Mapping[str, int]) -> Metrics:
    """The latency table's columns, in milliseconds; None where no successful request defines one."""
    good = successful(traces, wanted)
    itl = [gap for trace in good for gap in gaps(trace)]
    first = [ttft(trace) for trace in good]
    return {
        "itl_p50_ms": _percentile_ms(itl, 50), "itl_p95_ms": _percentile_ms(itl, 95),
        "tpot_p50_ms": _percentile_ms([tpot(trace) for trace in good], 50),
        "ttft_p50_ms": _percentile_ms(first, 50), "ttft_p95_ms": _percentile_ms(first, 95),
        "e2e_p50_ms": _percentile_ms([e2e(trace) for trace in good], 50),
    }


def throughput(traces: Sequence[Trace], wanted: Mapping[str, int]) -> Metrics:
    """The throughput table's columns. A failed request's time is in the wall, its tokens are in no rate."""
    good = successful(traces, wanted)
    times = [at for trace in traces for at in token_times(trace)]
    wall = max(times) - min(trace.added_at for trace in traces) if times else None
    tokens = sum(len(trace.token_ids) for trace in good)
    return {
        "tok_s": tokens / wall if wall else None,
        "req_s": len(good) / wall if wall else None,
        "wall_s": wall,
        "itl_p50_ms": _percentile_ms([gap for trace in good for gap in gaps(trace)], 50),
        "tpot_p50_ms": _percentile_ms([tpot(trace) for trace in good], 50),
    }


def arrivals(traces: Sequence[Trace], wanted: Mapping[str, int], started: Mapping[str, float] | None) -> Metrics:
    """The columns that the throughput table has besides, where requests arrive by themselves.

    Args:
        started: by request id, when the first step that ran it began; None if the engine does not tell.
    """
    good = successful(traces, wanted)
    first = [ttft(trace) for trace in good]
    queued = [] if started is None else [started[trace.request_id] - trace.added_at for trace in good]
    return {"ttft_p50_ms": _percentile_ms(first, 50), "ttft_p95_ms": _percentile_ms(first, 95),
            "queue_p50_ms": _percentile_ms(queued, 50), "queue_p95_ms": _percentile_ms(queued, 95)}


def over_rounds(rounds: Sequence[Metrics]) -> tuple[Metrics, dict[str, list[float] | None]]:
    """Median, and [least, greatest], of each metric over the rounds that define it."""
    medians: Metrics = {}
    ranges: dict[str, list[float] | None] = {}
    for key in rounds[0]:
        values = [value for one in rounds if (value := one[key]) is not None]
        medians[key] = median(values) if values else None
        ranges[key] = [min(values), max(values)] if values else None
    return medians, ranges


def _percentile_ms(seconds: Sequence[float | None], percent: float) -> float | None:
    defined = [value for value in seconds if value is not None]
    return float(np.percentile(defined, percent)) * 1000 if defined else None
