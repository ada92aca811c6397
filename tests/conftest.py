"""Fixtures shared by all tests: two tiny random models, and the bundled real one, each loaded once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

# Triton's kernels run in its interpreter where there is no GPU; it reads this once, when it is first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from benchmarks.result_file import load
from liteinfer import lineage
from liteinfer.engines.base import Engine, run
from liteinfer.engines.continuous import ContinuousEngine
from liteinfer.loading import LoadedModel, load_model, tiny_model
from liteinfer.model.layout import Layout
from liteinfer.request import Request, SamplingParams
from liteinfer.runner import StepOutput
from tests.results import FIXTURE

ROWS = [row.name for row in lineage.LADDER if row.needs is None]   # a kernel's row is tested beside the kernel
CHAPTER_MARKS = {row.name: getattr(pytest.mark, f"ch{row.chapter:02}") for row in lineage.LADDER}


def rows(*, but_first: bool = False) -> list:
    """Every row that runs on any machine, as a pytest parameter carrying its chapter's marker."""
    return [pytest.param(name, marks=CHAPTER_MARKS[name]) for name in ROWS[1 if but_first else 0:]]


@pytest.fixture
def result() -> dict:
    """A small result with three rows of the ladder, as it is read from its file."""
    return load(FIXTURE)


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """One thread for tiny models, whose operations are shorter than waking a second one; all for the real one."""
    before = torch.get_num_threads()
    if "smol" not in request.fixturenames:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", params=["llama", "qwen2"])
def tiny(request: pytest.FixtureRequest) -> LoadedModel:
    return tiny_model(request.param)


@pytest.fixture(scope="session")
def tiny_llama() -> LoadedModel:
    return tiny_model("llama")


@pytest.fixture(scope="session")
def smol() -> LoadedModel:
    torch.manual_seed(0)
    return load_model("smollm2-135m", dtype="float32", device="cpu")


def build(name: str, model: LoadedModel, **settings: object) -> Engine:
    return lineage.build(lineage.find(name), model, **settings)


def outputs(engine: Engine, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    """Run all prompts through an engine; their output token ids, in order."""
    each = params if isinstance(params, list) else [params] * len(prompts)
    requests = [Request(str(i), p, s) for i, (p, s) in enumerate(zip(prompts, each, strict=True))]
    errors = [event.error for event in run(engine, requests) if event.error]
    assert not errors, errors
    return [request.output_token_ids for request in requests]


def replace_pass(engine: Any, logits_of: Callable[[Callable[[], torch.Tensor], list[Request]], torch.Tensor]) -> None:
    """Put `logits_of(healthy, requests)` in the place of an engine's forward pass, whatever rung it is of.

    It returns logits [B, V], one row for each of `requests`; `healthy()` makes the pass that it replaces.
    """
    if isinstance(engine, ContinuousEngine):
        runner: Any = engine.runner
        run_chunks = runner.run

        def run(chunks: tuple) -> StepOutput:
            made = []

            def healthy() -> torch.Tensor:
                made.append(run_chunks(chunks))
                return made[0].logits

            logits = logits_of(healthy, [chunk.request for chunk in chunks if chunk.num_logits])
            if not made:   # the cache must be told of the step all the same
                sequences = [(chunk.request.request_id, chunk.start, chunk.num_tokens) for chunk in chunks]
                engine.cache.begin(Layout.of(sequences, torch.device("cpu")))
            return StepOutput(logits, torch.empty(0))

        runner.run = run
        return
    next_logits = engine.next_logits

    def replaced(whose: Request | list[Request]) -> torch.Tensor:
        if isinstance(whose, list):
            return logits_of(lambda: next_logits(whose), whose)
        return logits_of(lambda: next_logits(whose)[None], [whose])[0]

    engine.next_logits = replaced
