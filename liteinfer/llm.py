"""`LLM`: text in, text out, over any rung's engine.

>>> llm = LLM("smollm2-135m", row="liteinfer-eager")          # doctest: +SKIP
>>> llm.generate("The sky is")[0].text                        # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, cast

import torch

from liteinfer import lineage
from liteinfer.detokenizer import TextOutput
from liteinfer.engines.base import run
from liteinfer.engines.continuous import NoDrafter
from liteinfer.loading import LoadedModel, load_model
from liteinfer.logits_processors import LogitsProcessors, check
from liteinfer.request import Completion, FinishReason, Request, SamplingParams, TokenEvent, TokenLogprobs
from liteinfer.speculative.choose import SHIPPED, drafter

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Delta:
    """What one step added to one of a stream's prompts (`index`): tokens, the text that is certain by now, the end.

    Text comes later than its tokens where a character or a possible stop string is unfinished;
    a request's texts join to the text of its completion.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()

    @staticmethod
    def of(index: int, output: TextOutput, event: TokenEvent) -> Delta:
        """Feed an event to the request's `output`. If that has stopped, it is the end, and the engine is to be told."""
        before = output.n_tokens
        text = output.feed(event.token_ids, event.finish_reason)
        kept = output.n_tokens - before
        return Delta(index, text, event.token_ids[:kept], "stop" if output.stopped else event.finish_reason,
                     event.error, event.logprobs[:kept])


class LLM:
    """A model and one rung's engine over it. Not thread-safe.

    Args:
        model: a model's name, a folder, a hub id, or an already loaded model.
        row: which rung of the ladder; the newest unless told otherwise.
        max_model_len: the most tokens, prompt plus output, of one request.
        draft: who guesses tokens: "ngram", "draft-head", "early-exit:N" (the model's first N layers), the folder
            of a trained head, a draft model, or two of these as "A+B"; for rows that run continuously.
        num_speculative_tokens: the most tokens of a draft, 4 unless given.
        dtype, device: as in `load_model`.
        settings: further ones of the row's engine, such as num_blocks or max_num_seqs.

    Raises:
        ValueError: unknown row, model that cannot be loaded, a setting out of range, or one that the row does not have.
    """

    def __init__(self, model: str | LoadedModel = "smollm2-135m", row: str = lineage.DEFAULT, *,
                 max_model_len: int | None = None, draft: str | None = None,
                 num_speculative_tokens: int | None = None, dtype: str | torch.dtype | None = None,
                 device: str | torch.device | None = None, **settings: Any) -> None:
        self.row = lineage.find(row)   # an unknown row is refused before anything is loaded
        part = _drafter(self.row, draft, num_speculative_tokens)
        self.model = model if isinstance(model, LoadedModel) else load_model(model, dtype=dtype, device=device)
        self.engine = lineage.build(self.row, self.model, max_model_len=max_model_len, **part, **settings)
        self._ids = count()

    def generate(self, prompts: Prompt | Sequence[Prompt],
                 params: SamplingParams | Sequence[SamplingParams] | None = None) -> list[Completion]:
        """Complete each prompt (text, or token ids), in the order given.

        `params` is one for all or one per prompt. A request that fails on the
        way has finish_reason "error" and says why in `error`; the others go on.

        Raises:
            ValueError: a request that cannot run; none of them is started then.
        """
        requests = self._requests(prompts, params)
        completions = [Completion(r.request_id, r.prompt_token_ids) for r in requests]
        for delta in self._deltas(requests):
            completion = completions[delta.index]
            completion.text += delta.text
            completion.token_ids.extend(delta.token_ids)
            completion.logprobs.extend(delta.logprobs)
            completion.finish_reason, completion.error = delta.finish_reason, delta.error
        for completion, request in zip(completions, requests, strict=True):
            completion.num_cached_tokens = request.num_cached_tokens or 0
            completion.num_drafted_tokens = request.num_drafted_tokens
            completion.num_accepted_tokens = request.num_accepted_tokens
        return completions

    def stream(self, prompts: Prompt | Sequence[Prompt],
               params: SamplingParams | Sequence[SamplingParams] | None = None) -> Generator[Delta, None, None]:
        """Like `generate`, but step by step as tokens come. Closing the iterator aborts what still runs.

        Raises:
            ValueError: a request that cannot run; at once, not at the first step.
        """
        return self._deltas(self._requests(prompts, params))

    def chat(self, messages: Sequence[Mapping[str, str]], params: SamplingParams | None = None) -> Completion:
        """Answer a conversation of {"role": ..., "content": ...} messages, in the model's own chat template."""
        return self.generate(self.model.encode_chat(messages), params)[0]

    def _requests(self, prompts: Prompt | Sequence[Prompt],
                  params: SamplingParams | Sequence[SamplingParams] | None) -> list[Request]:
        many = _each(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(many)
        if len(params) != len(many):
            raise ValueError(f"{len(many)} prompts but {len(params)} params: give one for all, or one for each")
        if self.model.tokenizer is None and any(each.stop for each in params):
            raise ValueError(f"stop strings need a tokenizer, and {self.model.name} has none")
        ids = (self.model.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in many)
        requests = [Request(str(next(self._ids)), i, p) for i, p in zip(ids, params, strict=True)]
        for request in requests:
            self.engine.check(request)
            check(self.engine, self.row.name, request.params)
        return requests

    def _deltas(self, requests: Sequence[Request]) -> Generator[Delta, None, None]:
        if self.engine.has_unfinished():
            raise RuntimeError("another stream of this LLM is still open: finish or close it first")
        decode = (lambda ids: "") if self.model.tokenizer is None else self.model.decode
        outputs = {r.request_id: (i, TextOutput(decode, r.params.stop)) for i, r in enumerate(requests)}
        try:
            for event in run(self.engine, requests):
                index, output = outputs[event.request_id]
                if output.stopped:
                    continue
                delta = Delta.of(index, output, event)
                if output.stopped:
                    self.engine.finish(event.request_id, output.n_tokens)
                yield delta
        finally:   # interrupted: leave nothing behind for the next call
            for request in requests:
                self.engine.abort(request.request_id)
            while self.engine.has_unfinished():
                self.engine.step()


def _drafter(row: lineage.Row, draft: str | None, num_speculative_tokens: int | None) -> dict[str, Any]:
    """The engine's argument for these, with logits processors over it; none for rows that do not run continuously.

    Raises ValueError for a draft that cannot be.
    """
    if draft is None and num_speculative_tokens is not None and "drafter" not in row.parts:
        raise ValueError(f"num_speculative_tokens {num_speculative_tokens} needs a draft, and row {row.name} has none")
    if row.engine != lineage.find("continuous").engine:
        if draft is not None:
            raise ValueError(f"draft {draft!r} needs a row that runs continuously, as liteinfer-radix does, and "
                             f"{row.name} does not")
        return {}
    if draft is None and num_speculative_tokens is None:
        return {"drafter": LogitsProcessors.over(lineage.part(row, "drafter", NoDrafter))}
    own = SHIPPED if row.needs == "a draft model" else "ngram"
    k = 4 if num_speculative_tokens is None else num_speculative_tokens
    return {"drafter": LogitsProcessors.over(drafter(draft or own, k))}


def _each(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, as text or as token ids, is a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise ValueError(f"prompts must be text, a list of token ids or a list of those, got {type(prompts).__name__}")
    if prompts and not any(isinstance(item, (str, list, tuple)) for item in prompts):
        return [cast(Sequence[int], prompts)]   # whatever is no token id there, the engine names
    for item in prompts:
        if not isinstance(item, (str, list, tuple)):
            raise ValueError(f"a prompt must be text or a list of token ids, got {item!r}")
    return list(cast(Sequence[Prompt], prompts))
