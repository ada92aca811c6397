"""What /metrics says, in Prometheus' text form: what the engine is at, what it did, how long clients waited.

Engine numbers are read when somebody asks; only latencies and finish reasons are counted as they happen. Everything
lies in a registry of its own, so that several servers may live in one process.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from liteinfer.engines.base import Engine

COUNTERS = {
    "forward_passes": "calls of the model",
    "tokens_computed": "tokens fed through the layers",
    "prompt_tokens": "prompt tokens of requests that were admitted",
    "prefix_hit_tokens": "those of them whose keys and values were found stored",
    "drafted_tokens": "guesses that were checked in a pass",
    "accepted_tokens": "those of them that stood",
    "preemptions": "times a running request lost its blocks",
}
TTFT = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """The server's own counters; `text` adds the engine's."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self._ttft = Histogram("liteinfer_time_to_first_token_seconds", "from a request's arrival to its first token",
                               buckets=TTFT, registry=self.registry)
        self._itl = Histogram("liteinfer_inter_token_latency_seconds", "between two events with tokens of a request, "
                              "whose second may have several", buckets=ITL, registry=self.registry)
        self._tokens = Counter("liteinfer_generation_tokens", "tokens that were given out", registry=self.registry)
        self._finished = Counter("liteinfer_requests_finished", "requests that are over, by finish reason",
                                 ["finish_reason"], registry=self.registry)
        for reason in ("stop", "length", "abort", "error"):
            self._finished.labels(reason)                    # a line at 0 from the beginning
        self.registry.register(EngineCollector(engine))

    def tokens(self, n: int, seconds: float, first: bool) -> None:
        """A request was given n tokens, so long after its last ones, or after its arrival if these are its first."""
        self._tokens.inc(n)
        (self._ttft if first else self._itl).observe(seconds)

    def finished(self, reason: str) -> None:
        self._finished.labels(reason).inc()

    def text(self) -> bytes:
        """All of it as Prometheus reads it."""
        return generate_latest(self.registry)


class EngineCollector(Collector):
    """Numbers that the engine keeps anyway. They are read while a step may run, so two of them may be a step apart."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def collect(self) -> Iterable[Metric]:
        for name, value, what in self._gauges():
            yield GaugeMetricFamily(f"liteinfer_{name}", what, value=value)
        for name, what in COUNTERS.items():
            yield CounterMetricFamily(f"liteinfer_{name}", what, value=getattr(self.engine.counters, name))

    def _gauges(self) -> Iterable[tuple[str, int, str]]:
        engine: Any = self.engine
        queue = getattr(engine, "scheduler", engine)          # rungs below 6 keep both lists themselves
        yield "requests_running", len(queue.running), "requests that steps work on"
        yield "requests_waiting", len(queue.waiting), "requests in the engine's queue"
        pool = getattr(getattr(engine, "cache", None), "pool", None)
        if pool is not None:
            cached = blocks_cached(engine)
            yield "kv_blocks_total", pool.num_blocks, "KV blocks of the pool"
            yield "kv_blocks_used", pool.num_used - cached, "KV blocks that requests hold"
            yield "kv_blocks_cached", cached, "KV blocks that only the prefix cache holds"
            yield "kv_blocks_free", pool.num_free, "KV blocks that nobody holds"


def blocks_cached(engine: Any) -> int:
    """KV blocks that no request holds and that could be evicted; none without a prefix cache."""
    tree = getattr(getattr(getattr(engine, "scheduler", None), "kv", None), "tree", None)
    return 0 if tree is None else int(tree.num_evictable)
