"""The ladder: the single source of every row's name, chapter, base and engine.

Benchmark rows, the tables of README and chapters, and the ladder-wide tests all
derive from here. Engines are named as "module:Object" strings and imported only
when asked for, so that reading one rung never loads a later one.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from liteinfer.engines.base import Engine
    from liteinfer.loading import LoadedModel


@dataclass(frozen=True)
class Row:
    """One row of the ladder.

    `parts` are the engine's constructor arguments that make it this row: an
    argument's name, and a "module:Class()" that is built for it, or a
    "module:Class" that the engine builds itself. `needs` is what it takes to run it
    besides: None, "CUDA", "a draft model", of which one comes with the bundled model, or "make references".
    `environment` is for references only, which run in a process of their own: "here" with the Python that runs us,
    any other with the one that `make references` put into .references/ under that name.
    """

    name: str
    chapter: int
    engine: str
    what: str
    improves_on: str | None = None
    widths: tuple[int, ...] = (1,)
    parts: Mapping[str, str] = field(default_factory=dict)
    needs: str | None = None
    environment: str | None = None

    @property
    def reference(self) -> str:
        """The row of vLLM that is as wide as this one's widest."""
        return reference_at(max(self.widths))


FAST = {"linear": "liteinfer.fast.linear:Panels()", "attention": "liteinfer.fast.attention:FastAttention()",
        "runner": "liteinfer.fast.runner:fast_runner", "drafter": "liteinfer.fast.sampling:BatchSampler"}

LADDER: tuple[Row, ...] = (
    Row("liteinfer-nocache", 1, "liteinfer.engines.no_cache:NoCacheEngine",
        "no KV cache: every step feeds the whole sequence again"),
    Row("liteinfer-eager", 2, "liteinfer.engines.dynamic_cache:DynamicCacheEngine",
        "transformers' model and its DynamicCache", improves_on="liteinfer-nocache"),
    Row("liteinfer-native-eager", 3, "liteinfer.engines.native_cache:NativeCacheEngine",
        "our own forward, keys and values in plain tensors", improves_on="liteinfer-eager",
        parts={"linear": "liteinfer.model.linear:Plain()"}),
    Row("liteinfer-native-packed", 3, "liteinfer.engines.native_cache:NativeCacheEngine",
        "the same, weights fused and laid out for this machine", improves_on="liteinfer-native-eager",
        parts={"linear": "liteinfer.model.linear:Packed()"}),
    Row("liteinfer-paged", 4, "liteinfer.engines.paged:PagedEngine",
        "blocks from a pool, gathered before attention", improves_on="liteinfer-native-packed",
        parts={"linear": "liteinfer.model.linear:Packed()", "attention": "liteinfer.cache.paged:GatherSdpa()"}),
    Row("liteinfer-paged-triton", 4, "liteinfer.engines.paged:PagedEngine",
        "a kernel reads the pages in place", improves_on="liteinfer-paged", needs="CUDA",
        parts={"linear": "liteinfer.model.linear:Packed()",
               "attention": "liteinfer.kernels.paged_attention:TritonAttention()"}),
    Row("liteinfer-eager-b4", 5, "liteinfer.engines.static_batch:DynamicStaticBatch",
        "DynamicCache in static batches of 4, padded on the left", improves_on="liteinfer-eager", widths=(4,)),
    Row("liteinfer-native-eager-b4", 5, "liteinfer.engines.static_batch:NativeStaticBatch",
        "our forward in static batches of 4, ragged", improves_on="liteinfer-native-eager", widths=(4,),
        parts={"linear": "liteinfer.model.linear:Plain()"}),
    Row("liteinfer-paged-b4", 5, "liteinfer.engines.static_batch:PagedStaticBatch",
        "pages in static batches of 4", improves_on="liteinfer-paged", widths=(4,),
        parts={"linear": "liteinfer.model.linear:Packed()", "attention": "liteinfer.cache.paged:GatherSdpa()"}),
    Row("liteinfer-paged-b32", 5, "liteinfer.engines.static_batch:PagedStaticBatch",
        "pages in static batches of 32", improves_on="liteinfer-paged-b4", widths=(32,),
        parts={"linear": "liteinfer.model.linear:Packed()", "attention": "liteinfer.cache.paged:GatherSdpa()"}),
    Row("liteinfer-continuous", 6, "liteinfer.engines.continuous:ContinuousEngine",
        "requests come and go at every step, up to 32 at a time", improves_on="liteinfer-paged-b4", widths=(32,),
        parts={"linear": "liteinfer.model.linear:Packed()", "attention": "liteinfer.cache.paged:GatherSdpa()"}),
    Row("liteinfer-radix", 7, "liteinfer.engines.continuous:ContinuousEngine",
        "the same with a prefix cache: what prompts share is computed once", improves_on="liteinfer-continuous",
        widths=(32,),
        parts={"linear": "liteinfer.model.linear:Packed()", "attention": "liteinfer.cache.paged:GatherSdpa()",
               "kv_manager": "liteinfer.radix_manager:RadixManager"}),
    Row("liteinfer-ngram", 8, "liteinfer.engines.continuous:ContinuousEngine",
        "up to 4 tokens guessed from prompt and output, checked in one pass", improves_on="liteinfer-radix",
        widths=(1, 32),
        parts={"linear": "liteinfer.model.linear:Packed()", "attention": "liteinfer.cache.paged:GatherSdpa()",
               "kv_manager": "liteinfer.radix_manager:RadixManager",
               "drafter": "liteinfer.speculative.ngram:NgramDrafter"}),
    Row("liteinfer-speculative", 8, "liteinfer.engines.continuous:ContinuousEngine",
        "n-grams first, where they have nothing a draft head trained on a laptop", improves_on="liteinfer-radix",
        widths=(1, 32), needs="a draft model",
        parts={"linear": "liteinfer.model.linear:Packed()", "attention": "liteinfer.cache.paged:GatherSdpa()",
               "kv_manager": "liteinfer.radix_manager:RadixManager",
               "drafter": "liteinfer.speculative.choose:shipped"}),
    Row("liteinfer-fast", 9, "liteinfer.engines.continuous:ContinuousEngine",
        "the step made cheap: our own operators for linear layers, attention and what lies between",
        improves_on="liteinfer-continuous", widths=(1, 4, 32), parts=FAST),
    Row("liteinfer-fast-radix", 9, "liteinfer.engines.continuous:ContinuousEngine",
        "the same with the prefix cache: what LLM and the command line use", improves_on="liteinfer-fast",
        widths=(32,), parts=FAST | {"kv_manager": "liteinfer.radix_manager:RadixManager"}),
)

# What the ladder is measured against, on request: engines of others, under the same loop.
REFERENCES: tuple[Row, ...] = (
    *(Row(name, 0, "benchmarks.references.vllm_engine:VllmEngine", what, widths=(width,), needs="make references",
          environment="vllm")
      for name, width, what in (("vllm", 1, "vLLM, one request at a time"),
                                ("vllm-b4", 4, "vLLM, up to 4 requests at a time"),
                                ("vllm-continuous", 32, "vLLM, up to 32 requests at a time"))),
    Row("transformers", 0, "benchmarks.references.transformers_engine:GenerateEngine",
        "transformers' own generate, one request at a time", environment="here"),
    Row("transformers-continuous", 0, "benchmarks.references.transformers_engine:ContinuousEngine",
        "transformers' own continuous batching, up to 32 requests at a time", widths=(32,), environment="here"),
)
ROOT = Path(__file__).resolve().parent.parent

DEFAULT = "liteinfer-fast-radix"   # what LLM and the command line use unless told otherwise

# The chapter that introduces each file of the package; 0 is ground that no chapter explains.
FILES: dict[str, int] = {
    "__init__.py": 0, "__main__.py": 0, "lineage.py": 0, "llm.py": 0, "cli.py": 0, "terminal.py": 0,
    "loading.py": 0, "checkpoint.py": 0, "conversion.py": 0, "cuda.py": 0, "detokenizer.py": 0,
    "plots/__init__.py": 0, "plots/__main__.py": 0, "plots/ch01.py": 0, "plots/ch02.py": 0, "plots/ch03.py": 0,
    "plots/ch04.py": 0, "plots/ch05.py": 0, "plots/ch06.py": 0, "plots/ch07.py": 0, "plots/ch08.py": 0,
    "plots/ch09.py": 0, "trace.py": 0,
    "engines/__init__.py": 0, "model/__init__.py": 0, "cache/__init__.py": 0, "kernels/__init__.py": 0,
    "speculative/__init__.py": 0, "speculative/choose.py": 8,
    "request.py": 1, "sampling.py": 1, "engines/base.py": 1, "engines/no_cache.py": 1,
    "engines/dynamic_cache.py": 2,
    "model/layout.py": 3, "model/rope.py": 3, "model/linear.py": 3, "model/llama.py": 3,
    "cache/contiguous.py": 3, "engines/native_cache.py": 3,
    "cache/block_pool.py": 4, "cache/paged.py": 4, "cache/pool_size.py": 4, "engines/paged.py": 4,
    "kernels/paged_attention.py": 4,
    "engines/static_batch.py": 5,
    "scheduler.py": 6, "kv_manager.py": 6, "runner.py": 6, "engines/continuous.py": 6,
    "cache/radix.py": 7, "radix_manager.py": 7,
    "speculative/verify.py": 8, "speculative/drafter.py": 8, "speculative/ngram.py": 8,
    "speculative/draft_model.py": 8, "speculative/early_exit.py": 8,
    "speculative/listening.py": 8, "speculative/draft_head.py": 8, "speculative/fallback.py": 8,
    "speculative/train/ahead.py": 8, "speculative/train/fit.py": 8,
    "speculative/head_files.py": 8, "speculative/train/__init__.py": 0, "speculative/train/__main__.py": 8,
    "speculative/train/prompts.py": 8, "speculative/train/corpus.py": 8, "speculative/train/run.py": 8,
    "speculative/train/plan.py": 8,
    "kernels/build.py": 0, "kernels/cpu.py": 9, "fast/__init__.py": 0, "fast/linear.py": 9, "fast/attention.py": 9,
    "fast/forward.py": 9, "fast/runner.py": 9, "fast/graphs.py": 9, "fast/sampling.py": 9,
    "server/__init__.py": 0, "server/async_engine.py": 10, "server/generation.py": 10, "server/answers.py": 10,
    "server/app.py": 10, "server/service.py": 10, "server/protocol.py": 10, "server/responses.py": 10,
    "server/errors.py": 10, "server/limits.py": 10, "server/metrics.py": 10, "server/snapshot.py": 10,
    "server/live.py": 10, "server/serve.py": 10, "logits_processors.py": 10,
}
# These may name any chapter's files: the ladder, its two front doors, and the pictures drawn from live engines.
EXEMPT = ("lineage.py", "llm.py", "cli.py", "terminal.py",
          *(path for path in FILES if path.startswith("plots/ch")))


def missing(row: Row) -> str | None:
    """What this machine lacks to run the row, in a few words; None if it can be run as it is."""
    lacks = (row.needs == "CUDA" and not torch.cuda.is_available()) or (
        row.environment is not None and not finished(row))
    return f"needs {row.needs}" if lacks else None


def reference_at(width: int) -> str:
    """The row of vLLM that has so many requests in a step, or the next wider."""
    return "vllm" if width == 1 else "vllm-b4" if width <= 4 else "vllm-continuous"


def finished(row: Row) -> bool:
    """Whether the environment of a reference is there; `make references` leaves its mark at the end."""
    return row.environment == "here" or (python_of(row).parent.parent / ".installed").is_file()


def python_of(row: Row) -> Path:
    """The Python that runs a reference."""
    return Path(sys.executable) if row.environment == "here" else (
        ROOT / ".references" / str(row.environment) / "bin" / "python")


def find(name: str, among: Sequence[Row] = LADDER) -> Row:
    """The row of this name; "native-packed" finds "liteinfer-native-packed".

    Raises:
        ValueError: no such row; the message lists those there are.
    """
    for row in among:
        if name in (row.name, row.name.removeprefix("liteinfer-")):
            return row
    raise ValueError(f"unknown row {name!r}; the rows are {', '.join(row.name for row in among)}")


def build(row: Row, model: LoadedModel, **settings: Any) -> Engine:
    """Make the row's engine over a loaded model.

    Args:
        settings: the engine's own (max_model_len, ...), also in the place of a part; max_num_seqs is the
            row's widest width unless given.

    Raises:
        ValueError: a setting that the row's engine does not have; or the row needs a draft model, none comes with
            this model, and no `drafter` is given.
    """
    engine = _resolve(row.engine)
    unknown = [name for name in settings if name not in signature(engine).parameters]
    if unknown:
        raise ValueError(f"row {row.name} does not have the setting {', '.join(unknown)}")
    if max(row.widths) > 1:
        settings = {"max_num_seqs": max(row.widths)} | settings
    parts = {argument: part(row, argument) for argument in row.parts if argument not in settings}
    return engine(model, **parts, **settings)


def part(row: Row, argument: str, default: Any = None) -> Any:
    """What the row gives its engine for this argument; `default` if nothing."""
    return _resolve(row.parts[argument]) if argument in row.parts else default


def _resolve(path: str) -> Any:
    """ "module:Name" is that object, "module:Name()" what it makes when called."""
    module, name = path.split(":")
    found = getattr(import_module(module), name.removesuffix("()"))
    return found() if name.endswith("()") else found
