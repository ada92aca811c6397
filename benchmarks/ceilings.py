"""What the machine allows a decode step, beside what the row took.

A step cannot be faster than reading its bytes (every linear weight once, and the
keys and values it attends to) at the machine's bandwidth, nor than doing its
arithmetic at the machine's peak. The larger of the two times is the ceiling.
Which steps a row makes is read off its counters, never off its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from benchmarks.machine import GB, timed

if TYPE_CHECKING:
    from liteinfer.loading import LoadedModel, ModelConfig

NEVER_ABOVE = 1.05   # a row this much faster than its ceiling means that the ceiling was measured wrong


@dataclass(frozen=True)
class Sizes:
    """A model's numbers that decide what a step costs."""

    parameters: int       # all of them, a tied head counted once
    layer_linear: int     # weights of the linear layers of all decoder layers
    head: int             # weights of the output head
    kv_per_token: int     # numbers of keys and values per token, over all layers
    pair_flops: int       # operations per (query, key) pair, over all layers and heads
    itemsize: int         # bytes per number

    @staticmethod
    def of(config: ModelConfig, dtype: torch.dtype) -> Sizes:
        hidden, layers = config.hidden_size, config.num_layers
        q, kv = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
        linear = layers * (hidden * (2 * q + 2 * kv) + 3 * hidden * config.intermediate_size)
        head = config.vocab_size * hidden
        biases = layers * (q + 2 * kv) if config.architecture == "qwen2" else 0
        norms = (2 * layers + 1) * hidden
        parameters = linear + head * (1 if config.tie_word_embeddings else 2) + biases + norms
        # A pair costs a dot product and a weighted sum: 2 + 2 operations per number of the head.
        return Sizes(parameters, linear, head, 2 * layers * kv, 4 * layers * q, dtype.itemsize)

    @property
    def weight_bytes(self) -> int:
        return self.parameters * self.itemsize


@dataclass(frozen=True)
class Step:
    """A row's mean decode step: tokens fed, tokens of the sequence after it, whether the others were cached.

    In a batch all that is said of each of the `sequences`.
    """

    tokens: float
    context: float
    cached: bool
    sequences: int = 1

    def bytes(self, sizes: Sizes) -> float:
        """Bytes that have to be read: weights once, keys and values of every sequence.

        Activations and embedding rows are left out as negligible.
        """
        kv = sizes.kv_per_token * self.context * self.sequences if self.cached else 0
        return (sizes.layer_linear + sizes.head + kv) * sizes.itemsize

    def flops(self, sizes: Sizes) -> float:
        """Operations: two per weight and token, logits of one token a sequence, and the causal attention pairs."""
        pairs = self.tokens * (self.context - self.tokens) + self.tokens * (self.tokens + 1) / 2
        each = 2 * (sizes.layer_linear * self.tokens + sizes.head) + sizes.pair_flops * pairs
        return each * self.sequences


def mean_step(counters: Mapping[str, int], requests: int, isl: int, mean_osl: float) -> Step | None:
    """The mean decode step of a latency pass, from its counters: all but the first pass of each request.

    None if no request had a second step. A sequence that will be `isl + mean_osl` long is, on
    average over the steps after the first, isl + mean_osl / 2 long.
    """
    passes = counters["forward_passes"] - requests
    if passes <= 0:
        return None
    tokens = (counters["tokens_computed"] - requests * isl) / passes
    return Step(tokens, max(tokens, isl + mean_osl / 2), cached=counters.get("kv_bytes_peak", 0) > 0)


def allowed(step: Step, sizes: Sizes, machine: Mapping[str, Any]) -> tuple[float, str]:
    """The ceiling of a step in seconds, and what binds: "bandwidth" or "compute"."""
    reading = step.bytes(sizes) / (machine["bandwidth_gb_s"] * GB)
    computing = step.flops(sizes) / (machine["peak_gflop_s"] * GB)
    return max((reading, "bandwidth"), (computing, "compute"))


def turning_point(step: Step, sizes: Sizes, machine: Mapping[str, Any]) -> float | None:
    """The number of sequences at which computing a step takes as long as reading for it; None if it never does.

    Reading is the weights' bytes and each sequence's, computing only the latter's operations.
    """
    none, one = replace(step, sequences=0), replace(step, sequences=1)
    bandwidth, peak = machine["bandwidth_gb_s"] * GB, machine["peak_gflop_s"] * GB
    gained = one.flops(sizes) / peak - (one.bytes(sizes) - none.bytes(sizes)) / bandwidth   # seconds per sequence
    return none.bytes(sizes) / bandwidth / gained if gained > 0 else None


def forecast(sizes: Sizes, machine: Mapping[str, Any], isl: int, mean_osl: float) -> list[str]:
    """The ceilings in words, before anything is measured: a step with a cache, and one without."""
    whole = isl + mean_osl / 2
    lines = []
    for step, what in ((Step(1, whole, True), "one token, the others cached"),
                       (Step(whole, whole, False), f"all {whole:,.0f} tokens, nothing cached")):
        seconds, bound = allowed(step, sizes, machine)
        lines.append(f"ceiling of a step that feeds {what}: {step.bytes(sizes) / 1e6:,.0f} MB to read, "
                     f"{step.flops(sizes) / GB:,.2f} GFLOP, so at least {seconds * 1000:,.1f} ms ({bound})")
    return lines


def report(step: Step | None, sizes: Sizes, machine: Mapping[str, Any], measured_ms: float | None,
           linear_ms: float | None) -> dict[str, Any] | None:
    """The `ceiling` entry of a row; None where there was no decode step to measure."""
    if step is None or measured_ms is None:
        return None
    seconds, bound = allowed(step, sizes, machine)
    ceiling_ms = seconds * 1000
    rest_ms = None if linear_ms is None else measured_ms - linear_ms
    return {"bound": bound, "bytes": round(step.bytes(sizes)), "flops": round(step.flops(sizes)),
            "itl_ms": ceiling_ms, "measured_itl_ms": measured_ms, "ratio": ceiling_ms / measured_ms,
            "linear_ms": linear_ms, "rest_ms": rest_ms, "tokens_per_step": step.tokens,
            "note": note(step, sizes, bound, ceiling_ms, measured_ms, linear_ms)}


def note(step: Step, sizes: Sizes, bound: str, ceiling_ms: float, measured_ms: float, linear_ms: float | None) -> str:
    """Where the time went, in one sentence; or a warning that the ceiling itself is wrong."""
    if ceiling_ms / measured_ms > NEVER_ABOVE:
        return (f"Warning: {measured_ms:,.1f} ms measured is below the ceiling of {ceiling_ms:,.1f} ms, so the "
                f"machine's limit ({bound}) was measured too low: something else was running; measure again.")
    if linear_ms is None:
        return f"The step took {measured_ms:,.1f} ms, {measured_ms / ceiling_ms:,.2f} times its ceiling."
    if bound == "bandwidth":
        rate = f"{(sizes.layer_linear + sizes.head) * sizes.itemsize / linear_ms / 1e6:,.1f} GB/s"
    else:
        operations = 2 * (sizes.layer_linear * step.tokens + sizes.head) * step.sequences
        rate = f"{operations / linear_ms / 1e6:,.0f} GFLOP/s"
    if linear_ms > measured_ms:
        return (f"The linear layers alone took {linear_ms:,.1f} ms ({rate}), longer than the whole step: something "
                "else was running; measure again.")
    return (f"The linear layers alone take {linear_ms:,.1f} ms ({rate}); attention, norms, sampling and Python "
            f"make up the other {measured_ms - linear_ms:,.1f} ms.")


@torch.inference_mode()
def linear_ms(engine: Any, model: LoadedModel, tokens: int, sequences: int = 1, calls: int = 3) -> float:
    """Milliseconds of the row's linear layers alone for `tokens` tokens: the fastest of a few calls.

    The head is applied to one token of each sequence.

    An engine with a `llama` (our forward) has its own layers timed, packed or
    plain; any other is timed by F.linear over the model's weights.
    """
    llama = getattr(engine, "llama", None)
    make = partial(_weights_pass, model) if llama is None else partial(_llama_pass, llama)
    run = make(tokens, sequences)
    timed(run)
    return min(timed(run) for _ in range(calls)) * 1000


def _llama_pass(llama: Any, tokens: int, sequences: int) -> Callable[[], None]:
    config, like = llama.config, llama.embedding

    def ones(features: int) -> torch.Tensor:
        return torch.ones(tokens, features, dtype=like.dtype, device=like.device)

    hidden, heads = ones(config.hidden_size), ones(config.num_heads * config.head_size)
    inner = ones(config.intermediate_size)

    def run() -> None:
        for layer in llama.layers:
            layer.qkv(hidden)
            layer.o(heads)
            layer.gate_up(hidden)
            layer.down(inner)
        llama.head(hidden[:sequences])

    return run


def _weights_pass(model: LoadedModel, tokens: int, sequences: int) -> Callable[[], None]:
    weights = model.weights()
    layers = [(w, weights.get(name.removesuffix("weight") + "bias"))
              for name, w in weights.items() if name.endswith("_proj.weight")]
    head = weights["model.embed_tokens.weight" if model.config.tie_word_embeddings else "lm_head.weight"]
    inputs = {w.shape[1]: torch.ones(tokens, w.shape[1], dtype=w.dtype, device=w.device) for w, _ in layers}
    last = torch.ones(sequences, head.shape[1], dtype=head.dtype, device=head.device)

    def run() -> None:
        for w, bias in layers:
            F.linear(inputs[w.shape[1]], w, bias)
        F.linear(last, head)

    return run
