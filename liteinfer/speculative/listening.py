"""A runner that hands the target's last hidden states to whoever asked for them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from liteinfer.runner import Runner, StepOutput
from liteinfer.scheduler import Chunk

Listener = Callable[[Chunk, Tensor], None]   # a chunk, and the hidden states [num_tokens, E] of its tokens


class ListeningRunner(Runner):
    """Another runner's passes; after each, `listen` hears of every chunk of it, prompts' pieces included."""

    def __init__(self, runner: Runner, listen: Listener) -> None:
        super().__init__(runner.llama, runner.cache)
        self.runner, self.listen = runner, listen

    def run(self, chunks: tuple[Chunk, ...]) -> StepOutput:
        output = self.runner.run(chunks)
        rows = output.hidden_states.split([chunk.num_tokens for chunk in chunks])
        for chunk, hidden in zip(chunks, rows, strict=True):
            self.listen(chunk, hidden)
        return output
