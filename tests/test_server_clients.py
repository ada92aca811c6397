"""Clients that people already use, unchanged: openai, curl, servebench; and those that mean no good: fuzzers."""

from __future__ import annotations

import json
import random
import shutil
import string
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import schemathesis
import servebench
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from liteinfer import LLM, SamplingParams
from liteinfer.loading import LoadedModel
from liteinfer.server.protocol import ChatAsk, CompletionAsk
from tests.served import WAYS, Running, lettered, nothing_left, parrot, path, serving

pytestmark = pytest.mark.ch10
KEY = "sesame"


@pytest.fixture(scope="module")
def birds() -> Iterator[Running]:
    engine = parrot(max_num_seqs=8)
    with serving(engine.model, engine, api_key=KEY) as server:
        server.http.headers["authorization"] = f"Bearer {KEY}"
        yield server
        server.until(nothing_left)


@pytest.fixture
def client(birds: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=birds.base + "/v1", api_key=KEY, max_retries=0) as client:
        yield client


# --- openai -----------------------------------------------------------------------------------------------------------


def test_openai_chat(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "letters", "messages": [{"role": "user", "content": "hello"}], "temperature": 0}
    whole = client.chat.completions.create(**asked, n=2, logprobs=True, top_logprobs=1, max_completion_tokens=20)
    assert [choice.message.content for choice in whole.choices] == ["hello", "hello"]
    assert whole.choices[0].finish_reason == "stop" and whole.usage.completion_tokens == 12
    assert [one.token for one in whole.choices[0].logprobs.content] == [*"hello", "<eos>"]
    assert whole.usage.prompt_tokens_details.cached_tokens >= 0 and whole.model_extra["timings"]["predicted_n"] == 12
    again = [*asked["messages"], whole.choices[0].message, {"role": "user", "content": "you"}]
    followed = client.chat.completions.create(**asked | {"messages": again})
    assert followed.choices[0].message.content == "hello\nhello\nyou"
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True},
                                                 extra_body={"min_tokens": 2, "top_k": 4}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hello"
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == 12


def test_openai_completions_and_models(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="letters", prompt=["ab", "cd"], temperature=0, max_tokens=9, logprobs=1)
    assert [choice.text for choice in whole.choices] == ["ab", "cd"]
    told = whole.choices[1].logprobs
    assert (told.tokens, told.text_offset) == (["c", "d", "<eos>"], [0, 1, 2])
    stream = client.completions.create(model="letters", prompt="abc", temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "abc"
    assert [model.id for model in client.models.list()] == ["letters"] == [client.models.retrieve("letters").id]


def test_openai_sees_errors_as_its_own(client: openai.OpenAI, birds: Running) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="letters", messages=messages, top_p=2)
    assert bad.value.param == "top_p" and bad.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-4", messages=messages)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=birds.base + "/v1", api_key="wrong", max_retries=0).models.list()


def test_openai_sees_a_stream_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = parrot()

    def before(_: object) -> None:
        if engine.counters.forward_passes == 3:
            raise RuntimeError("the kernel is out of order")

    engine.runner.before = before
    with serving(engine.model, engine) as server:
        client = openai.OpenAI(base_url=server.base + "/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.APIError, match="the kernel is out of order"):
            list(client.completions.create(model="letters", prompt="a" * 20, stream=True))


def test_openai_against_the_real_model(smol: LoadedModel) -> None:
    """T9 and T5 where a token has several letters: SmolLM's template, and a stop string between two tokens."""
    llm = LLM(smol, row="radix", num_blocks=64)
    messages: Any = [{"role": "user", "content": "Name three colors."}]
    expected = llm.generate(smol.encode_chat(messages), SamplingParams(max_tokens=16))[0]
    first, second = (smol.decode([token]) for token in expected.token_ids[2:4])
    stop = first[-2:] + second[:2]
    before = expected.text[:expected.text.index(stop)]
    with serving(smol, LLM(smol, row="radix", num_blocks=64).engine, name="smol") as server:
        client = openai.OpenAI(base_url=server.base + "/v1", api_key="none", max_retries=0)
        asked: dict[str, Any] = {"model": "smol", "messages": messages, "temperature": 0, "max_tokens": 16}
        answer = client.chat.completions.create(**asked)
        assert answer.choices[0].message.content == expected.text
        ids = smol.tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
        assert answer.usage.prompt_tokens == len(ids)
        prompt = smol.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        for endpoint, stream in WAYS:
            body = {"temperature": 0, "max_tokens": 16, "stop": stop}
            body |= {"messages": messages} if endpoint == "chat" else {"prompt": prompt}
            found = server.http.post(path(endpoint), json=body | {"model": "smol", "stream": stream})
            assert text_of(found, stream) == before


def text_of(answer: httpx.Response, stream: bool) -> str:
    bodies = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")] if stream else [
        answer.json()]
    choices = [body["choices"][0] for body in bodies]
    return "".join(choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content") or ""
                   for choice in choices)


# --- curl and servebench ----------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(birds: Running) -> None:
    def curl(*arguments: str) -> str:
        command = ["curl", "-sS", "--max-time", "20", "-H", f"Authorization: Bearer {KEY}", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    body = json.dumps(birds.body("chat", "hello"))
    as_json = ("-H", "Content-Type: application/json", "-d", body)
    url = birds.base + path("chat")
    assert json.loads(curl(*as_json, url))["choices"][0]["message"]["content"] == "hello"
    assert curl("-N", *as_json[:-1], body.replace("{", '{"stream": true, ', 1), url).endswith("data: [DONE]\n\n")
    assert "of content-type application/json" in curl("-d", body, url), "curl's own is another"
    assert curl("-o", "/dev/null", "-w", "%{http_code}", birds.base + "/health") == "200"
    assert "liteinfer_requests_running 0.0" in curl(birds.base + "/metrics")


def test_servebench(birds: Running, tmp_path: Path) -> None:
    for endpoint in ("chat", "completions"):
        saved = tmp_path / f"{endpoint}.json"
        result = servebench.benchmark(birds.base + "/v1", "letters", levels=[1, 2, 4], num_requests=8, input_len=8,
                                      output_len=6, endpoint=endpoint, api_key=KEY, warmup=1, gpu_telemetry=False,
                                      save_path=saved)
        assert saved.exists() and [level.value for level in result.levels] == [1, 2, 4]
        for level in result.levels:
            assert (level.summary.completed, level.summary.failed) == (8, 0), level.requests[0].error
            for request in level.requests:
                assert (request.output_tokens, request.token_source) == (6, "usage")
                assert request.server_prefill_ms > 0 and request.server_decode_ms > 0


# --- fuzzers ----------------------------------------------------------------------------------------------------------


def fuzzing(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
                    suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.value)
def test_schemathesis_finds_no_server_error(mode: schemathesis.GenerationMode) -> None:
    """From the server's own description: no 5xx, and no answer that it does not describe."""
    engine = parrot(max_num_seqs=8)
    with serving(engine.model, engine) as server:
        schema = schemathesis.openapi.from_url(server.base + "/openapi.json")
        operations = [found.ok() for found in schema.get_all_operations()]
        assert {operation.path for operation in operations} == {
            "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{name}", "/health", "/metrics",
            "/live/state"}
        seen: set[tuple[str, int]] = set()
        for operation in operations:
            if mode.is_negative and operation.method == "get":
                continue     # nothing can be wrong about a request without a body

            @fuzzing(80 if operation.method == "post" else 5)
            @given(case=operation.as_strategy(generation_mode=mode))
            def check(case: schemathesis.Case) -> None:
                answer = case.call(timeout=20)
                case.validate_response(answer, checks=[not_a_server_error, status_code_conformance,
                                                       content_type_conformance, response_schema_conformance])
                seen.add((case.operation.path, answer.status_code))

            check()
        assert (path("chat"), 400) in seen or (path("chat"), 404) in seen
        assert server.ask("chat", False, "the next", max_tokens=20).text == "the next"
        server.until(nothing_left, 10)


def test_the_description_is_honest(birds: Running) -> None:
    schema = birds.http.get("/openapi.json").json()
    for endpoint in ("chat", "completions"):
        operation = schema["paths"][path(endpoint)]["post"]
        assert set(operation["responses"]) == {"200", "400", "401", "404", "413", "429", "500", "503"}
        assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
        assert operation["security"], "this server asks for a key"
    assert schema["components"]["schemas"]["ChatAsk"]["additionalProperties"] is False
    assert "HTTPValidationError" not in schema["components"]["schemas"]


FIELDS = (*CompletionAsk.model_fields, *ChatAsk.model_fields, "tools", "suffix", "")


def odd(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON value, often one at the edge of something."""
    text = "".join(rng.choice(string.printable + "é日\u0000\ud800👩") for _ in range(rng.choice([0, 1, 3, 40])))
    plain = [None, True, False, 0, 1, -1, 2, 63, 64, 999_999, 2**31, 2**63, 10**40, 0.0, -0.0, 0.5, 1.0, 1e308, 5e-324,
             float("nan"), float("inf"), "", "letters", "abc", text, "a" * 3000, [], {}]
    if depth > 3 or rng.random() < 0.7:
        return rng.choice(plain)
    if rng.random() < 0.5:
        return [odd(rng, depth + 1) for _ in range(rng.choice([1, 2, 20]))]
    return {rng.choice([*FIELDS, "role", "content", "type", "text", "include_usage", text]): odd(rng, depth + 1)
            for _ in range(rng.choice([1, 3]))}


def fuzzed(rng: random.Random, endpoint: str) -> bytes:
    """A good body with some of its fields made odd; or one whose bytes are broken."""
    body: Any = {"model": "letters", "max_tokens": 3}
    body |= {"messages": [{"role": "user", "content": "hello"}]} if endpoint == "chat" else {"prompt": "hello"}
    for _ in range(rng.choice([0, 1, 1, 2, 4])):
        body[rng.choice(FIELDS)] = odd(rng)
    if rng.random() < 0.05:
        body = odd(rng)
    raw = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    if rng.random() < 0.2:
        cut = rng.randrange(len(raw) + 1)
        raw = raw[:cut] + rng.choice([b"", b"\x00", b"\xff", b'"', b"}", raw]) + raw[cut + rng.choice([0, 1, 5]):]
    return raw


def test_a_thousand_fuzzed_bodies_leave_it_healthy() -> None:
    rng, statuses = random.Random(10), dict[int, int]()
    model = lettered(eos=())
    engine = LLM(model, row="radix", max_model_len=64, num_blocks=64, block_size=4).engine
    expected = LLM(model, row="nocache").generate("hello", SamplingParams(max_tokens=8))[0].text
    with serving(model, engine) as server:
        for i in range(1000):
            endpoint = rng.choice(["chat", "completions"])
            answer = server.http.post(path(endpoint), content=fuzzed(rng, endpoint),
                                      headers={"content-type": "application/json"})
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            assert answer.status_code in (200, 400, 404), (answer.status_code, answer.request.content, answer.text)
            if answer.status_code != 200:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            if i % 100 == 99:
                assert server.http.get("/health").status_code == 200
                server.until(nothing_left)
                assert all(server.ask(*way, "hello", max_tokens=8).text == expected for way in WAYS)
    assert min(statuses[200], statuses[400]) > 100, statuses
