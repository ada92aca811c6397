"""An engine without arithmetic: the next token is a function of request and position (SCRIPT of cases.md).

What is real: scheduler, KV manager, cache bookkeeping, sampling. Each slot of the
pool remembers which tokens it was written for, and every step looks whether what
a request attends to is still its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch

from liteinfer.cache.paged import PagedCache
from liteinfer.engines.continuous import ContinuousEngine
from liteinfer.loading import tiny_model
from liteinfer.model.layout import Layout
from liteinfer.model.llama import Llama
from liteinfer.request import Request, SamplingParams
from liteinfer.runner import Runner, StepOutput
from liteinfer.scheduler import Chunk

V = 64
MODEL = tiny_model("llama")


def scripted(request_id: str, position: int) -> int:
    """The token that follows position `position` of a request."""
    return zlib.crc32(f"{request_id}:{position}".encode()) % V


def expected(request: Request) -> list[int]:
    """What the request says when it runs alone, and to its end."""
    tokens: list[int] = []
    for i in range(request.params.max_tokens):
        tokens.append(scripted(request.request_id, len(request.prompt_token_ids) - 1 + i))
        if tokens[-1] in request.params.stop_token_ids:
            break
    return tokens


class ScriptRunner(Runner):
    """Says the script; checks what it is fed and what lies in the pages."""

    before: Callable[[Sequence[Chunk]], None] | None = None   # called in each step: to fail, or to abort somebody

    def __init__(self, llama: Llama, cache: PagedCache) -> None:
        super().__init__(llama, cache)
        self.written: dict[int, int] = {}   # slot -> hash of the tokens up to and with the one stored there

    def run(self, chunks: tuple[Chunk, ...]) -> StepOutput:
        sequences = [(chunk.request.request_id, chunk.start, chunk.num_tokens) for chunk in chunks]
        self.cache.begin(Layout.of(sequences, torch.device("cpu")))
        for chunk in chunks:
            self.touch(chunk)
        if self.before is not None:
            self.before(chunks)
        rows = [self.row(chunk.request.request_id, chunk.start + chunk.num_tokens - 1 - back)
                for chunk in chunks for back in reversed(range(chunk.num_logits))]
        return StepOutput(torch.stack(rows) if rows else torch.empty(0, V), torch.empty(0))

    def row(self, request_id: str, position: int) -> torch.Tensor:
        logits = torch.zeros(V)
        logits[scripted(request_id, position)] = 20.0
        return logits

    def touch(self, chunk: Chunk) -> None:
        """Write the chunk's slots; assert that those before it hold this request's own tokens."""
        request, size = chunk.request, self.cache.pool.block_size
        ids = request.token_ids[:chunk.start] + chunk.token_ids
        table, held = self.cache.tables[request.request_id], 0
        for position, token in enumerate(ids):
            held = hash((held, token))
            slot = table[position // size] * size + position % size
            if position < chunk.start:
                assert self.written.get(slot) == held, f"position {position} of {request.request_id} was overwritten"
            else:
                self.written[slot] = held


class RandomRunner(ScriptRunner):
    """Flat random logits of request and position: for sampling."""

    def row(self, request_id: str, position: int) -> torch.Tensor:
        return torch.randn(V, generator=torch.Generator().manual_seed(scripted(request_id, position) * 1000 + position))


def script_engine(runner: type[Runner] = ScriptRunner, **settings: object) -> ContinuousEngine:
    return ContinuousEngine(MODEL, runner=runner, **({"max_num_seqs": 8} | settings))


def request(name: str, prompt: int, max_tokens: int, **params: object) -> Request:
    """A request of that many prompt tokens, which depend on its name."""
    ids = [zlib.crc32(f"{name}-{i}".encode()) % V for i in range(prompt)]
    return Request(name, ids, SamplingParams(max_tokens=max_tokens, **params))


def check(engine: ContinuousEngine) -> None:
    """Every invariant that must hold between two steps."""
    scheduler, cache = engine.scheduler, engine.cache
    scheduler.kv.check()
    running = {r.request_id: r for r in scheduler.running}
    assert set(cache.tables) == set(running), "blocks are held by somebody who does not run"
    for name, r in running.items():
        assert cache.lengths[name] == r.num_computed_tokens < r.num_tokens
        assert len(cache.tables[name]) == cache.pool.blocks_for(r.num_computed_tokens)
    assert all(r.num_computed_tokens == 0 for r in scheduler.waiting)
    assert len(running) <= scheduler.config.max_num_seqs


def drain(engine: ContinuousEngine, limit: int = 2000) -> list:
    """Step to the end with the invariants after each step; all events."""
    events = []
    for _ in range(limit):
        if not engine.has_unfinished():
            tree = getattr(engine.scheduler.kv, "tree", None)
            held = engine.cache.pool.num_used - (tree.num_evictable if tree else 0)
            assert held == 0, f"{held} blocks were not given back, or not unlocked"
            return events
        events += engine.step()
        check(engine)
    raise AssertionError(f"still unfinished after {limit} steps")
