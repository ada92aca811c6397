"""What the target says to the prompts, and its hidden states on the way: the data, on disk in shards.

A shard is the target's answers to so many prompts, six of seven greedy and one
drawn. Whatever is written stays: a run that was cut short goes on with the next
shard.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from liteinfer.engines.continuous import ContinuousEngine
from liteinfer.loading import LoadedModel
from liteinfer.request import Request, SamplingParams
from liteinfer.scheduler import Chunk
from liteinfer.speculative.listening import ListeningRunner
from liteinfer.speculative.train.prompts import Prompt

SHARD = 96          # prompts
DRAWN = 7           # one of so many answers is drawn, of every kind in turn; the others are greedy
TEMPERATURE = 0.8   # of the drawn ones

Asked = tuple[str, list[int]]   # the kind of a prompt, and its tokens


@dataclass(frozen=True)
class Example:
    """A prompt and the target's answer.

    Args:
        ids: [S] tokens of both.
        features: [S - 1, E] float16, the normed last hidden states of all but the last token, which was never fed.
        prompt_len: tokens of the prompt.
        kind: of the prompt.
    """

    ids: Tensor
    features: Tensor
    prompt_len: int
    kind: str


class Recorder:
    """Keeps the normed hidden states of every request of an engine."""

    def __init__(self, engine: ContinuousEngine) -> None:
        self.llama, self.heard = engine.llama, dict[str, list[Tensor]]()   # not the engine: no cycle keeps its pool
        engine.runner = ListeningRunner(engine.runner, self.listen)

    def listen(self, chunk: Chunk, hidden: Tensor) -> None:
        llama, name = self.llama, chunk.request.request_id
        if chunk.start == 0:
            self.heard[name] = []          # also when it comes back from a preemption
        normed = F.rms_norm(hidden, llama.norm.shape, llama.norm, llama.config.rms_norm_eps)
        self.heard[name].append(normed.half().cpu())


def encode(model: LoadedModel, prompts: Sequence[Prompt]) -> list[Asked]:
    """The prompts in the model's chat template."""
    return [(prompt.kind, model.encode_chat([{"role": "user", "content": prompt.text}])) for prompt in prompts]


def check_prompts(model: LoadedModel, prompts: Sequence[Prompt], answer: int) -> None:
    """Raises ValueError for a prompt that leaves no room for an answer of so many tokens."""
    limit = model.config.max_position_embeddings - answer
    for i, (_, ids) in enumerate(encode(model, prompts), 1):
        if len(ids) > limit:
            raise ValueError(f"your prompt {i} has {len(ids):,} tokens; beside an answer of {answer} there is room for "
                             f"{limit:,}")


def answers(model: LoadedModel, asked: Sequence[Asked], seed: int, max_tokens: int, greedy: bool = False,
            max_num_seqs: int = 32, on_step: Callable[[int], None] = lambda _: None) -> list[Example]:
    """The target's answers, in the order of the prompts; `on_step` is told how many tokens each step brought.

    Args:
        asked: of each prompt its kind and its tokens.
        seed: of the drawn answers; `greedy` draws none.
        max_tokens: of each answer; it ends at EOS before that.
    """
    longest = max(len(ids) for _, ids in asked) + max_tokens
    engine = ContinuousEngine(model, max_num_seqs=max_num_seqs, max_model_len=longest)
    recorder, requests = Recorder(engine), list[Request]()
    for i, (_, ids) in enumerate(asked):
        temperature = 0.0 if greedy or i % DRAWN else TEMPERATURE
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed + i)
        requests.append(Request(str(i), ids, params))
        engine.add(requests[-1])
    while engine.has_unfinished():
        events = engine.step()
        if failed := next((event for event in events if event.finish_reason == "error"), None):
            raise RuntimeError(f"the target failed on prompt {failed.request_id}: {failed.error}")
        on_step(sum(len(event.token_ids) for event in events))
    return [Example(torch.tensor(request.token_ids), torch.cat(recorder.heard[request.request_id]),
                    len(request.prompt_token_ids), kind)
            for request, (kind, _) in zip(requests, asked, strict=True)]


def save(path: Path, examples: Sequence[Example]) -> None:
    """Write a shard: whole, or not at all."""
    tensors = {"ids": torch.cat([example.ids for example in examples]).int(),
               "features": torch.cat([example.features for example in examples])}
    described = [[len(example.ids), example.prompt_len, example.kind] for example in examples]
    unfinished = path.with_suffix(".unfinished")
    save_file(tensors, unfinished, metadata={"examples": json.dumps(described)})
    unfinished.replace(path)


def load(path: Path) -> Iterator[Example]:
    """Read a shard again."""
    with safe_open(path, framework="pt") as file:
        ids, features = file.get_tensor("ids").long(), file.get_tensor("features")
        described = json.loads(file.metadata()["examples"])
    lengths = [length for length, _, _ in described]
    each = zip(ids.split(lengths), features.split([length - 1 for length in lengths]), described, strict=True)
    for tokens, hidden, (_, prompt_len, kind) in each:
        yield Example(tokens, hidden, prompt_len, kind)
