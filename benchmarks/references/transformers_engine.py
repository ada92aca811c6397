"""transformers under the engine contract: its `generate`, and its continuous batching.

Both keep their own loop, so they run it in a thread of theirs, and `step` waits for what that hands over. They are
asked for what they are meant for: `generate` streams one request at a time, the manager of continuous batching gets
all and chooses. Prefix sharing is off.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from importlib.metadata import version
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from benchmarks.references.contract import Event, Request, Settings

PAGE = 256   # tokens in a page of the manager's cache: its own default
BATCH_TOKENS = 2048   # tokens in a step, as of vLLM and of our scheduler; by itself it would ask the GPU's memory


class _Transformers:
    """What both have in common: the model, in eval mode, with the attention transformers chooses."""

    def __init__(self, settings: Settings) -> None:
        model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=getattr(torch, settings.dtype))
        self.model, self.device = model.to(settings.device).eval(), settings.device

    @staticmethod
    def versions() -> dict[str, str]:
        return {name: version(name) for name in ("transformers", "torch")}


class _Handed(BaseStreamer):
    """A streamer that hands each new token over; the first thing `generate` puts is the prompt."""

    def __init__(self, out: queue.Queue[Any]) -> None:
        self.out = out
        self.prompt_seen = False

    def put(self, value: torch.Tensor) -> None:   # value: [1, L] once, then [1]
        if self.prompt_seen:
            self.out.put(value.tolist())
        self.prompt_seen = True

    def end(self) -> None:
        self.out.put(None)


class GenerateEngine(_Transformers):
    """`model.generate` with its default cache, one request at a time, first come, first served."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.waiting: deque[Request] = deque()
        self.running: Request | None = None
        self.made = 0
        self.handed: queue.Queue[Any] = queue.Queue()   # lists of new tokens, then None, or what was raised

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def has_unfinished(self) -> bool:
        return self.running is not None or bool(self.waiting)

    def step(self) -> list[Event]:
        if self.running is None:
            self.running, self.made = self.waiting.popleft(), 0
            threading.Thread(target=self._generate, args=(self.running,), daemon=True).start()
        name, tokens = self.running.request_id, self.handed.get()
        if isinstance(tokens, Exception):
            raise tokens
        if tokens is None:
            self.running = None
            return []
        self.made += len(tokens)
        return [Event(name, tokens, "length" if self.made >= self.running.max_tokens else None)]

    def _generate(self, request: Request) -> None:
        ids = torch.tensor([request.prompt_token_ids], device=self.device)   # [1, L]
        settings = GenerationConfig(max_new_tokens=request.max_tokens, do_sample=False, eos_token_id=None,
                                    pad_token_id=0)
        try:
            with torch.inference_mode():
                self.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings,
                                    streamer=_Handed(self.handed))
        except Exception as error:
            self.handed.put(error)


class ContinuousEngine(_Transformers):
    """The manager behind `generate_batch`, streaming. Its cache has room for max_num_seqs of the longest requests."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        sequences, longest = settings.max_num_seqs, settings.max_model_len
        config = ContinuousBatchingConfig(
            page_size=PAGE, num_blocks=sequences * -(-longest // PAGE), max_requests_per_batch=sequences,
            max_batch_tokens=BATCH_TOKENS, allow_block_sharing=False)
        self.manager = self.model.init_continuous_batching(
            GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=longest),
            continuous_batching_config=config)
        self.told: dict[str, int] = {}   # tokens handed on so far, by request in flight
        with torch.inference_mode():     # its thread takes over the mode it is started in
            self.manager.start()

    def add(self, request: Request) -> None:
        self.manager.add_request(request.prompt_token_ids, request.request_id, max_new_tokens=request.max_tokens,
                                 streaming=True, eos_token_id=-1)
        self.told[request.request_id] = 0

    def has_unfinished(self) -> bool:
        return bool(self.told)

    def step(self) -> list[Event]:
        """Wait for one output, then take what else is there: the outputs of a step come together."""
        first = self.manager.get_result(timeout=1.0)
        if first is None:
            if fault := self.manager.background_thread_status.fatal_error:
                raise RuntimeError(f"continuous batching stopped: {fault}")
            return []
        outputs = [first]
        while not self.manager.output_router.output_queue.empty():
            outputs.append(self.manager.output_router.output_queue.get())
        return [self._event(output) for output in outputs]

    def _event(self, output: Any) -> Event:
        name = output.request_id
        new = list(output.generated_tokens[self.told[name]:])
        self.told[name] += len(new)
        over = output.is_finished()
        if over:
            del self.told[name]
        return Event(name, new, ("error" if output.error else "length") if over else None, output.error)
