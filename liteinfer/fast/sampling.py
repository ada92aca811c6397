"""Tokens for all requests of a step at once, where they ask for nothing but the best one."""

from __future__ import annotations

from collections.abc import Sequence

from liteinfer.engines.continuous import NoDrafter, Verdict
from liteinfer.runner import StepOutput
from liteinfer.scheduler import Chunk


class BatchSampler(NoDrafter):
    """Guesses nothing. Greedy requests share one maximum over [M, V]; any other draws by itself, as before."""

    def verify(self, chunks: Sequence[Chunk], output: StepOutput) -> list[Verdict]:
        best = output.logits.max(dim=-1)                                     # [M] values, [M] ids
        fine, ids = best.values.isfinite().tolist(), best.indices.tolist()   # the maximum of anything with a NaN is NaN
        return [[ids[row]] if fine[row] and chunk.request.params.temperature == 0 else
                self._sample(output.logits[row], chunk.request) for row, chunk in enumerate(chunks)]
