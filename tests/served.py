"""What the tests of the server share: a server that really listens, a model that speaks in letters, and a client.

Parrot: an engine without arithmetic that says its prompt again, and then the end. So a test writes down what will be
said by asking for it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Thread
from time import monotonic, sleep
from typing import Any

import httpx
import torch

from liteinfer.engines.base import Engine
from liteinfer.engines.continuous import ContinuousEngine, NoDrafter
from liteinfer.loading import LoadedModel, tiny_model
from liteinfer.logits_processors import LogitsProcessors
from liteinfer.radix_manager import RadixManager
from liteinfer.request import Request
from liteinfer.runner import StepOutput
from liteinfer.scheduler import Chunk
from liteinfer.server.app import build_app
from liteinfer.server.serve import Server, bind, url
from liteinfer.server.service import Service
from tests.scripted import ScriptRunner, V

EOS, BOS = 0, 1
ALPHABET = ["<eos>", "<bos>", "token ", "ends", "STO", "PX",
            *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,:\n!"]
WAYS = [("chat", False), ("chat", True), ("completions", False), ("completions", True)]


class Letters:
    """A tokenizer of one token per character, and a few for several. It begins every text with BOS; so does its chat
    template."""

    bos_token_id, adds_bos = BOS, True
    chat_template = "BOS and what was said"

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids, rest = list[int](), text
        while rest:
            token = next((i for i, piece in enumerate(ALPHABET) if rest.startswith(piece)), ALPHABET.index("!"))
            ids.append(token)
            rest = rest[len(ALPHABET[token]):]
        return {"input_ids": [BOS, *ids] if add_special_tokens and self.adds_bos else ids}

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], **_: Any) -> str:
        return "<bos>" + "\n".join(message["content"] for message in messages)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True, **_: Any) -> str:
        return "".join(ALPHABET[i] for i in ids if not (skip_special_tokens and i in (EOS, BOS)))


def lettered(eos: Sequence[int] = (EOS,), **settings: Any) -> LoadedModel:
    """A tiny model that reads and writes letters."""
    model = tiny_model("llama", **settings)
    model.config, model.tokenizer = replace(model.config, eos_token_ids=tuple(eos)), Letters()
    return model


class Parrot(ScriptRunner):
    """Says the prompt again without its special tokens, then EOS for ever. `pause` makes each step last."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.requests: dict[str, Request] = {}
        self.pause = 0.0

    def run(self, chunks: tuple[Chunk, ...]) -> StepOutput:
        sleep(self.pause)
        self.requests |= {chunk.request.request_id: chunk.request for chunk in chunks}
        return super().run(chunks)

    def row(self, request_id: str, position: int) -> torch.Tensor:
        prompt = self.requests[request_id].prompt_token_ids
        said = [token for token in prompt if token not in (EOS, BOS)]
        i = position - (len(prompt) - 1)
        logits = torch.zeros(V)
        logits[said[i] if 0 <= i < len(said) else EOS] = 20.0
        return logits

    def touch(self, chunk: Chunk) -> None:
        """A prefix cache hands over slots that another request wrote: what lies in them is not looked at."""


def parrot(pause: float = 0.0, model: LoadedModel | None = None, **settings: Any) -> ContinuousEngine:
    engine = ContinuousEngine(model or lettered(), runner=Parrot, kv_manager=RadixManager,
                              drafter=LogitsProcessors.over(NoDrafter),
                              **({"max_num_seqs": 4, "num_blocks": 256, "block_size": 4} | settings))
    engine.runner.pause = pause
    return engine


@dataclass
class Said:
    """An answer, whole or streamed, in one form."""

    text: str = ""
    reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)
    tokens: list[str] = field(default_factory=list)           # of the log-probabilities
    logprobs: list[float] = field(default_factory=list)
    chunks: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Running:
    """A server that listens on `base`."""

    base: str
    service: Service
    server: Server
    http: httpx.Client

    def post(self, endpoint: str, **body: Any) -> httpx.Response:
        return self.http.post(path(endpoint), json={"model": self.service.model_name} | body)

    def body(self, endpoint: str, prompt: str, **fields: Any) -> dict[str, Any]:
        """Greedy unless told otherwise."""
        asked = {"messages": [{"role": "user", "content": prompt}]} if endpoint == "chat" else {"prompt": prompt}
        return {"model": self.service.model_name, "temperature": 0} | asked | fields

    def ask(self, endpoint: str, stream: bool, prompt: str, **fields: Any) -> Said:
        """One answer with one choice. Streamed, it is checked to be a proper stream."""
        body = self.body(endpoint, prompt, **fields)
        if not stream:
            answer = self.http.post(path(endpoint), json=body)
            assert answer.status_code == 200, answer.text
            return said(answer.json())
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        answer = self.http.post(path(endpoint), json=body)
        assert answer.status_code == 200, answer.text
        return said_in(events(answer.text))

    def in_engine(self, question: Callable[[Any], Any]) -> Any:
        """What `question` says of the engine between two steps."""
        engine = self.service.engine
        return asyncio.run_coroutine_threadsafe(engine.ask(question), engine._loop).result(10)

    def until(self, holds: Callable[[Any], object], seconds: float = 2.0) -> None:
        """Wait until something holds of the engine; fail if that takes longer."""
        deadline = monotonic() + seconds
        while not self.in_engine(holds):
            assert monotonic() < deadline, f"still not so after {seconds} s"
            sleep(0.01)


def path(endpoint: str) -> str:
    return "/v1/chat/completions" if endpoint == "chat" else "/v1/completions"


def events(text: str) -> list[Any]:
    """The data of each server-sent event; "[DONE]" as it is."""
    blocks = [block for block in text.split("\n\n") if block]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [block[6:] if block == "data: [DONE]" else json.loads(block[6:]) for block in blocks]


def said(body: dict[str, Any]) -> Said:
    (choice,) = body["choices"]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    answer = Said(text, choice["finish_reason"], body["usage"], body["timings"], chunks=[body])
    _note_logprobs(answer, choice)
    return answer


def said_in(chunks: list[Any]) -> Said:
    """A stream as one answer: exactly one role (chat), one finish reason, one usage chunk and [DONE], in this order."""
    *chunks, done = chunks
    assert done == "[DONE]", done
    *chunks, last = chunks
    assert last["choices"] == [] and all(chunk["usage"] is None for chunk in chunks)
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in [*chunks, last]}) == 1
    answer = Said(usage=last["usage"], timings=chunks[-1]["timings"], chunks=chunks)
    for place, chunk in enumerate(chunks):
        (choice,) = chunk["choices"]
        if "delta" in choice:
            assert ("role" in choice["delta"]) == (place == 0)
            answer.text += choice["delta"].get("content", "")
        else:
            answer.text += choice["text"]
        _note_logprobs(answer, choice)
        assert (choice["finish_reason"] is not None) == (place == len(chunks) - 1)
        answer.reason = choice["finish_reason"]
    return answer


def _note_logprobs(answer: Said, choice: dict[str, Any]) -> None:
    told = choice.get("logprobs") or {"content": []}
    if "content" in told:
        answer.tokens += [one["token"] for one in told["content"]]
        answer.logprobs += [one["logprob"] for one in told["content"]]
    else:
        answer.tokens += told["tokens"]
        answer.logprobs += told["token_logprobs"]


@contextmanager
def serving(model: LoadedModel, engine: Engine, *, max_num_waiting: int = 256, drain_seconds: float = 0.0,
            row: str = "liteinfer-radix", name: str = "letters", **app: Any) -> Iterator[Running]:
    """uvicorn in a thread, on a free port, as `liteinfer serve` runs it."""
    service = Service(model, engine, row, name, max_num_waiting)
    listener = bind("127.0.0.1", 0)
    server = Server(build_app(service, **app), service.engine, drain_seconds)
    thread = Thread(target=server.run, args=([listener],))
    base = url(listener)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            sleep(0.005)
        with httpx.Client(base_url=base, timeout=30) as client:
            yield Running(base, service, server, client)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive() and not service.engine._thread.is_alive()


def nothing_left(engine: ContinuousEngine) -> bool:
    """Nobody runs or waits, and every block is free or only in the tree."""
    tree = getattr(engine.scheduler.kv, "tree", None)
    held = engine.cache.pool.num_used - (tree.num_evictable if tree else 0)
    engine.scheduler.kv.check()
    return not engine.has_unfinished() and held == 0
