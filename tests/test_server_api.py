"""Both endpoints, whole and streamed: the same text, reason and usage; and every bad field refused by its name.

Case numbers are those of the project's list of failure cases.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from liteinfer import LLM, SamplingParams
from liteinfer.loading import LoadedModel
from tests.served import (
    ALPHABET,
    BOS,
    EOS,
    WAYS,
    Letters,
    Running,
    events,
    lettered,
    nothing_left,
    parrot,
    path,
    serving,
)

pytestmark = pytest.mark.ch10
ENDPOINTS = ("chat", "completions")
L = 64   # max_model_len of the server with a real, tiny model
four_ways = pytest.mark.parametrize(("endpoint", "stream"), WAYS)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return lettered(eos=())


@pytest.fixture(scope="module")
def tiny(model: LoadedModel) -> Iterator[Running]:
    """A real forward pass, whose tokens rung 1 knows too."""
    engine = LLM(model, row="radix", max_model_len=L, num_blocks=64, block_size=4).engine
    with serving(model, engine) as server:
        yield server
        server.until(nothing_left)


@pytest.fixture(scope="module")
def birds() -> Iterator[Running]:
    """Says what it is told, then EOS."""
    engine = parrot()
    with serving(engine.model, engine) as server:
        yield server
        server.until(nothing_left)


@pytest.fixture(scope="module")
def reference(model: LoadedModel) -> LLM:
    return LLM(model, row="nocache", max_model_len=L)


def refused(answer: httpx.Response, status: int = 400, param: str | None = None) -> str:
    """Check OpenAI's error shape; the message."""
    assert answer.status_code == status, (answer.status_code, answer.text)
    (name, error), = answer.json().items()
    assert name == "error" and set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert error["message"] and "\n" not in error["message"]
    return error["message"]


# --- the same words everywhere ----------------------------------------------------------------------------------------


@four_ways
def test_h10_the_tokens_are_those_of_rung_1(tiny: Running, reference: LLM, endpoint: str, stream: bool) -> None:
    expected = reference.generate("how are you", SamplingParams(max_tokens=20))[0]
    answer = tiny.ask(endpoint, stream, "how are you", max_tokens=20, logprobs=True if endpoint == "chat" else 0)
    assert (answer.text, answer.reason) == (expected.text, "length")
    assert answer.tokens == [ALPHABET[token] for token in expected.token_ids]
    cached = answer.usage.pop("prompt_tokens_details")["cached_tokens"]
    assert answer.usage == {"prompt_tokens": 12, "completion_tokens": 20, "total_tokens": 32}
    timings = answer.timings
    assert (timings["prompt_n"] + timings["cache_n"], timings["cache_n"], timings["predicted_n"]) == (12, cached, 20)
    assert timings["prompt_ms"] > 0 and timings["predicted_ms"] > 0 and timings["queue_ms"] >= 0


@four_ways
def test_seeded_sampling_repeats_and_differs_by_seed(tiny: Running, endpoint: str, stream: bool) -> None:
    def say(seed: int) -> str:
        return tiny.ask(endpoint, stream, "once upon", max_tokens=12, temperature=1.5, seed=seed).text

    assert say(1) == say(1) != say(2)


@four_ways
@pytest.mark.parametrize("fields", [
    {"logit_bias": {str(ALPHABET.index("q")): 100.0}}, {"presence_penalty": 2}, {"frequency_penalty": 1.5},
    {"repetition_penalty": 3.0}, {"min_p": 0.3, "temperature": 1, "seed": 3},
], ids=lambda fields: next(iter(fields)))
def test_m5_what_changes_the_logits_does_so_on_every_way(tiny: Running, model: LoadedModel, endpoint: str,
                                                         stream: bool, fields: dict[str, Any]) -> None:
    asked = dict(fields)
    if "logit_bias" in asked:
        asked["logit_bias"] = {int(token): bias for token, bias in fields["logit_bias"].items()}
    alone = LLM(model, row="continuous", num_blocks=32)
    expected = alone.generate("how are", SamplingParams(max_tokens=12, **asked))[0]
    answer = tiny.ask(endpoint, stream, "how are", max_tokens=12, **fields)
    assert answer.text == expected.text != tiny.ask(endpoint, stream, "how are", max_tokens=12).text


@four_ways
def test_min_tokens_puts_the_end_off(birds: Running, endpoint: str, stream: bool) -> None:
    answer = birds.ask(endpoint, stream, "abc", max_tokens=9, min_tokens=6)
    assert answer.text.startswith("abc") and answer.usage["completion_tokens"] == 7 and answer.reason == "stop"
    refused(birds.post(endpoint, **fields_of(endpoint, "abc"), max_tokens=5, min_tokens=6), param="min_tokens")


def test_choices_of_n_have_the_seeds_that_follow(tiny: Running) -> None:
    asked = {"max_tokens": 12, "temperature": 1.5}
    both = tiny.post("completions", prompt="once upon", n=2, seed=5, **asked).json()
    each = [tiny.ask("completions", False, "once upon", seed=seed, **asked).text for seed in (5, 6)]
    assert [choice["text"] for choice in both["choices"]] == each
    assert [choice["index"] for choice in both["choices"]] == [0, 1]


def test_left_out_temperature_is_one(tiny: Running) -> None:
    asked = {"prompt": "once upon", "max_tokens": 12, "seed": 3}
    texts = {tiny.post("completions", **asked, **more).json()["choices"][0]["text"]
             for more in ({}, {"temperature": 1}, {"temperature": 1.0, "top_p": 1})}
    assert len(texts) == 1 and texts != {tiny.ask("completions", False, "once upon", max_tokens=12).text}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("fields", [{"top_k": k} for k in (0, -1, 1, 64, 65, 10**7)] + [
    {"top_p": p} for p in (0, 1)] + [{"temperature": t} for t in (0, 1e-6, 2)])
def test_m3_limits_of_sampling_are_fine(tiny: Running, endpoint: str, fields: dict[str, Any]) -> None:
    greedy = tiny.ask(endpoint, False, "abc", max_tokens=4)
    answer = tiny.ask(endpoint, False, "abc", **{"max_tokens": 4, "temperature": 1, "seed": 1} | fields)
    assert answer.usage["completion_tokens"] == 4
    if fields in ({"top_k": 1}, {"top_p": 0}, {"temperature": 0}, {"temperature": 1e-6}):
        assert answer.text == greedy.text


# --- text: stop strings, ends, special tokens -------------------------------------------------------------------------


@four_ways
def test_t5_a_stop_string_across_two_tokens(birds: Running, endpoint: str, stream: bool) -> None:
    answer = birds.ask(endpoint, stream, "a token ends here", max_tokens=50, stop="n en")
    assert (answer.text, answer.reason) == ("a toke", "stop")
    assert answer.usage["completion_tokens"] == 4, "tokens up to the one that completed it: a, space, token, ends"
    every = answer.text if not stream else "".join(json.dumps(chunk) for chunk in answer.chunks)
    assert "n" not in answer.text and "ends" not in every
    birds.until(nothing_left)


@four_ways
def test_t6_what_could_have_become_a_stop_string_is_delivered(birds: Running, endpoint: str, stream: bool) -> None:
    ended = birds.ask(endpoint, stream, "go STO", max_tokens=50, stop=["STOPX", "zzz"])
    assert (ended.text, ended.reason) == ("go STO", "stop")
    cut = birds.ask(endpoint, stream, "go STOP", max_tokens=4, stop=["STOPX"])
    assert (cut.text, cut.reason) == ("go STO", "length")
    stopped = birds.ask(endpoint, stream, "go STOPXab", max_tokens=50, stop=["STOPX"])
    assert (stopped.text, stopped.reason) == ("go ", "stop")


@four_ways
def test_t8_every_eos_of_a_list_ends_it(endpoint: str, stream: bool) -> None:
    model = lettered(eos=(EOS, ALPHABET.index("q"), ALPHABET.index("Z")))
    with serving(model, parrot(model=model)) as server:
        for prompt, text in (("abqcd", "ab"), ("abZcd", "ab"), ("abcd", "abcd")):
            answer = server.ask(endpoint, stream, prompt, max_tokens=9)
            assert (answer.text, answer.reason) == (text, "stop")
        on = server.ask(endpoint, stream, "abqcd", max_tokens=9, ignore_eos=True)
        assert (on.text, on.reason, on.usage["completion_tokens"]) == ("abqcd", "length", 9)
        c = ALPHABET.index("c")
        by_id = server.ask(endpoint, stream, "abcd", max_tokens=9, ignore_eos=True, stop_token_ids=[c])
        assert (by_id.text, by_id.reason) == ("ab", "stop")


@four_ways
def test_t9_one_bos(birds: Running, endpoint: str, stream: bool) -> None:
    answer = birds.ask(endpoint, stream, "hello", max_tokens=9)
    assert answer.usage["prompt_tokens"] == 6
    newest = birds.in_engine(lambda engine: list(engine.runner.requests.values())[-1])
    assert newest.prompt_token_ids == [BOS, *(ALPHABET.index(letter) for letter in "hello")]


@four_ways
def test_t10_reasons_and_no_special_text(birds: Running, endpoint: str, stream: bool) -> None:
    for max_tokens, reason, tokens in ((4, "stop", 4), (3, "length", 3), (9, "stop", 4)):
        answer = birds.ask(endpoint, stream, "abc", max_tokens=max_tokens)
        assert (answer.text, answer.reason, answer.usage["completion_tokens"]) == ("abc", reason, tokens)
    on = birds.ask(endpoint, stream, "abc", max_tokens=9, ignore_eos=True)
    assert (on.text, on.reason, on.usage["completion_tokens"]) == ("abc", "length", 9)


@four_ways
def test_an_eos_at_once_is_an_empty_text(birds: Running, endpoint: str, stream: bool) -> None:
    answer = birds.ask(endpoint, stream, "<bos>", max_tokens=9)
    assert (answer.text, answer.reason, answer.usage["completion_tokens"]) == ("", "stop", 1)


# --- lengths ----------------------------------------------------------------------------------------------------------


def fields_of(endpoint: str, prompt: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}]} if endpoint == "chat" else {"prompt": prompt}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_h1_max_tokens(tiny: Running, endpoint: str) -> None:
    asked = fields_of(endpoint, "abc") | {"temperature": 0}
    default = L - 4 if endpoint == "chat" else 16
    for absent in ({}, {"max_tokens": None}):
        answer = tiny.post(endpoint, **asked, **absent)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == default
    for bad in (0, -1, "5", 1.5, 5.0, True, [5]):
        refused(tiny.post(endpoint, **asked, max_tokens=bad), param="max_tokens")
    message = refused(tiny.post(endpoint, **asked, max_tokens=10**9), param="max_tokens")
    assert f"{10**9}" in message and f"max_model_len {L}" in message
    assert tiny.post(endpoint, **asked, max_tokens=1).json()["usage"]["completion_tokens"] == 1


def test_max_completion_tokens_is_the_other_name(tiny: Running) -> None:
    asked = fields_of("chat", "abc") | {"temperature": 0}
    for limits in ({"max_completion_tokens": 3}, {"max_completion_tokens": 3, "max_tokens": 3}):
        assert tiny.post("chat", **asked, **limits).json()["usage"]["completion_tokens"] == 3
    message = refused(tiny.post("chat", **asked, max_completion_tokens=3, max_tokens=4), param="max_completion_tokens")
    assert "3" in message and "4" in message
    refused(tiny.post("chat", **asked, max_completion_tokens=0), param="max_completion_tokens")
    refused(tiny.post("completions", prompt="abc", max_completion_tokens=3), param="max_completion_tokens")


@four_ways
def test_h2_prompts_about_as_long_as_the_context(tiny: Running, endpoint: str, stream: bool) -> None:
    """max_model_len holds prompt and output: L - 1 leaves one token, L and more are refused."""
    last = tiny.ask(endpoint, stream, "a" * (L - 2), **({"max_tokens": 1} if endpoint == "completions" else {}))
    cached = last.usage.pop("prompt_tokens_details")["cached_tokens"]
    assert last.usage == {"prompt_tokens": L - 1, "completion_tokens": 1, "total_tokens": L} and cached < L
    assert last.reason == "length"
    field = "messages" if endpoint == "chat" else "prompt"
    for length in (L, L + 1, 10 * L):
        message = refused(tiny.post(endpoint, stream=stream, **fields_of(endpoint, "a" * (length - 1))), param=field)
        assert f"{length} tokens" in message and f"{L} of max_model_len" in message
    longer = tiny.post(endpoint, stream=stream, **fields_of(endpoint, "a" * (L - 3)), max_tokens=3)
    assert f"{L + 1} is over max_model_len {L}" in refused(longer, param="max_tokens")


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_s1_what_the_pool_can_never_hold_is_refused_at_once(endpoint: str) -> None:
    engine = parrot(num_blocks=8, max_model_len=128)
    with serving(engine.model, engine) as server:
        message = refused(server.post(endpoint, **fields_of(endpoint, "a" * 39)),
                          param="messages" if endpoint == "chat" else "prompt")
        assert "40 tokens" in message and "33" in message, "8 blocks of 4, and one token that is never fed"
        message = refused(server.post(endpoint, **fields_of(endpoint, "a" * 19), max_tokens=40), param="max_tokens")
        assert "need 15 KV blocks" in message and "the pool has 8" in message
        assert server.ask(endpoint, False, "abcd", max_tokens=9).text == "abcd"
        room = server.post("chat", **fields_of("chat", "abc"), ignore_eos=True).json()["usage"]
        assert room["total_tokens"] == 33, "left out, max_tokens is what fits"


# --- what is refused --------------------------------------------------------------------------------------------------

BAD_FIELDS = [
    ("temperature", -0.1), ("temperature", 2.1), ("temperature", "hot"), ("temperature", True), ("top_p", 1.5),
    ("top_p", -0.1), ("top_k", -2), ("top_k", 1.5), ("top_k", 10**30), ("seed", -1), ("seed", 2**63), ("seed", "x"),
    ("n", 0), ("n", -1), ("n", 129), ("n", "2"), ("stream", "yes"), ("stream", 1), ("stream_options", True),
    ("stop", ""), ("stop", [""]), ("stop", 5), ("stop", ["a"] * 17), ("stop", "a" * 257), ("stop_token_ids", [999999]),
    ("stop_token_ids", [-1]), ("stop_token_ids", [True]), ("stop_token_ids", 5), ("ignore_eos", 1), ("user", 5),
    ("cache_salt", ""), ("cache_salt", 7), ("model", 5), ("max_tokens", 2**40), ("tools", []), ("best_of", 1),
    ("response_format", {"type": "json_object"}), ("temprature", 0), ("suffix", "x"), ("logit_bias", {"x": 1}),
    ("logit_bias", {"1": 101}), ("logit_bias", [1]), ("logit_bias", {"999999": 1}),
    ("logit_bias", {"-1": 1}), ("min_p", 1.5), ("min_tokens", -1), ("repetition_penalty", 0),
    ("presence_penalty", 2.1), ("frequency_penalty", "1"),
]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize(("field", "value"), BAD_FIELDS, ids=lambda value: str(value)[:20])
def test_bad_fields_are_named(tiny: Running, endpoint: str, field: str, value: object) -> None:
    answer = tiny.post(endpoint, **fields_of(endpoint, "abc") | {field: value})
    assert field in refused(answer, param=field)


@pytest.mark.parametrize("prompt", [[64], [-1], [], [True], [1.5], [[1], [64]], [[]], ["a", 1], [[1, "a"]], "", None,
                                    {}, 5, [None], [["a"]]], ids=str)
def test_h4_bad_prompts_are_refused_and_hurt_nobody(tiny: Running, reference: LLM, prompt: object,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Letters, "adds_bos", False)    # or no text would be empty
    answer = tiny.post("completions", prompt=prompt, max_tokens=4)
    refused(answer, param="prompt")
    expected = reference.generate([5, 6, 7], SamplingParams(max_tokens=6))[0].text
    fine = tiny.post("completions", prompt=[5, 6, 7], max_tokens=6, temperature=0)
    assert fine.status_code == 200 and fine.json()["choices"][0]["text"] == expected


@pytest.mark.parametrize("messages", [
    [], None, "hi", [{}], [{"role": "user"}], [{"content": "x"}], [{"role": "tool", "content": "x"}],
    [{"role": "user", "content": 5}], [{"role": "user", "content": None}],
    [{"role": "user", "content": "x", "name": "a"}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], ["hi"],
], ids=str)
def test_bad_messages_are_refused(tiny: Running, messages: object) -> None:
    assert "messages" in refused(tiny.post("chat", messages=messages), param="messages")


def test_x15_echo_is_not_supported(tiny: Running) -> None:
    for _ in range(2):
        refused(tiny.post("completions", prompt="a" * 32, echo=True, logprobs=1, max_tokens=1), param="echo")
    assert tiny.post("completions", prompt="abc", echo=False, max_tokens=1).status_code == 200


def test_top_logprobs_needs_logprobs(tiny: Running) -> None:
    assert "needs logprobs" in refused(tiny.post("chat", **fields_of("chat", "abc"), top_logprobs=2),
                                       param="top_logprobs")
    refused(tiny.post("chat", **fields_of("chat", "abc"), logprobs=True, top_logprobs=21), param="top_logprobs")
    refused(tiny.post("completions", prompt="abc", logprobs=21), param="logprobs")
    refused(tiny.post("completions", prompt="abc", logprobs=True), param="logprobs")
    refused(tiny.post("completions", prompt="abc", top_logprobs=1), param="top_logprobs")


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_stream_options_are_for_streams(tiny: Running, endpoint: str) -> None:
    asked = fields_of(endpoint, "abc")
    refused(tiny.post(endpoint, **asked, stream_options={"include_usage": True}), param="stream_options")
    refused(tiny.post(endpoint, **asked, stream=True, stream_options={"usage": True}), param="stream_options")


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_null_is_the_same_as_nothing(birds: Running, endpoint: str) -> None:
    names = ("n", "stream", "stream_options", "top_p", "top_k", "min_p", "min_tokens", "repetition_penalty",
             "logit_bias", "presence_penalty", "frequency_penalty", "seed", "stop", "stop_token_ids", "ignore_eos",
             "cache_salt", "user", "logprobs", "tools", "response_format")
    asked = fields_of(endpoint, "abc") | {"temperature": 0}
    plain = birds.post(endpoint, **asked).json()["choices"]
    assert birds.post(endpoint, **asked, **dict.fromkeys(names)).json()["choices"] == plain


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("body", [
    b"", b"{", b"[]", b"null", b"5", b'"x"', b"\xff\xfe", b'{"model": NaN}', b"[" * 100_000, b'{"a":' * 20_000,
    b'{"model": "\\ud800"}', b'{"\\ud800": 1}', b'{"n": 1' + b"0" * 5000 + b"}",
    b'{"model": "letters", "prompt": "\\ud800"}',
    b'{"model": "letters", "messages": [{"role": "user", "content": "\\udfff"}]}',
], ids=lambda body: str(body[:24]))
def test_bodies_that_are_no_request(tiny: Running, endpoint: str, body: bytes) -> None:
    answer = tiny.http.post(path(endpoint), content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert tiny.http.get("/health").status_code == 200


def test_a_body_of_another_content_type_is_refused(tiny: Running) -> None:
    answer = tiny.http.post(path("chat"), content=b'{"model": "letters"}', headers={"content-type": "text/plain"})
    assert "application/json" in refused(answer)


def test_unknown_models_and_paths(tiny: Running) -> None:
    for endpoint in ENDPOINTS:
        message = refused(tiny.post(endpoint, **fields_of(endpoint, "x") | {"model": "gpt-4"}), 404, "model")
        assert "'gpt-4'" in message and "'letters'" in message
    refused(tiny.http.get("/v1/nothing"), 404)
    not_allowed = tiny.http.get(path("chat"))
    refused(not_allowed, 405)
    assert not_allowed.headers["allow"] == "POST"


def test_the_api_key_is_asked_for(model: LoadedModel) -> None:
    with serving(model, parrot(model=model), api_key="sesame") as server:
        guarded = (path("chat"), path("completions"), "/v1/models", "/metrics", "/live/state", "/v1/nothing")
        for key in (None, "sesam", "sesame!", "open sesame", "sésame"):
            headers = {} if key is None else {"authorization": f"Bearer {key}".encode()}
            for url in guarded:
                answer = server.http.request("GET" if "/v1/m" in url else "POST", url, headers=headers, content=b"{")
                assert "API key" in refused(answer, 401)
        refused(server.http.get("/v1/models", headers={"authorization": "Basic sesame"}), 401)
        assert server.http.get("/health").status_code == 200
        for scheme in ("Bearer", "bearer"):
            assert server.http.get("/v1/models", headers={"authorization": f"{scheme} sesame"}).status_code == 200


def test_a_body_that_is_too_long_is_a_413(model: LoadedModel) -> None:
    with serving(model, parrot(model=model), max_body_bytes=1000) as server:
        body = json.dumps(server.body("completions", "abc", user="x" * 2000)).encode()

        def chunks() -> Iterator[bytes]:
            for start in range(0, len(body), 100):
                yield body[start:start + 100]

        headers = {"content-type": "application/json"}
        for content in (body, chunks()):
            answer = server.http.post(path("completions"), content=content, headers=headers)
            assert "max_body_bytes is 1,000" in refused(answer, 413)
        assert server.ask("completions", False, "abc").text == "abc"


# --- what answers hold ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_h6_the_usage_chunk_comes_if_and_only_if_asked_for(birds: Running, endpoint: str) -> None:
    asked = fields_of(endpoint, "abc") | {"temperature": 0, "stream": True}
    for options in ({}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}):
        *chunks, done = events(birds.post(endpoint, **asked, **options).text)
        assert done == "[DONE]" and all(len(chunk["choices"]) == 1 and "usage" not in chunk for chunk in chunks)
    asked_for = birds.post(endpoint, **asked, stream_options={"include_usage": True})
    assert asked_for.headers["content-type"].startswith("text/event-stream")
    *_, last, done = events(asked_for.text)
    whole = birds.ask(endpoint, False, "abc", max_tokens=16).usage
    for usage in (whole, last["usage"]):
        usage.pop("prompt_tokens_details")   # the second finds more of the prompt stored than the first
    assert last["choices"] == [] and last["usage"] == whole


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_several_choices(birds: Running, stream: bool) -> None:
    asked = {"prompt": ["abc", "token ends", "x"], "n": 2, "temperature": 0, "max_tokens": 12}
    texts, reasons = [""] * 6, [None] * 6
    if stream:
        chunks = events(birds.post("completions", **asked, stream=True, stream_options={"include_usage": True}).text)
        assert chunks.pop() == "[DONE]"
        usage = chunks.pop()["usage"]
        for choice in (chunk["choices"][0] for chunk in chunks):
            assert reasons[choice["index"]] is None, "something came after the end"
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] = choice["finish_reason"]
        assert ["timings" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    else:
        body = birds.post("completions", **asked).json()
        assert [choice["index"] for choice in body["choices"]] == list(range(6))
        texts, reasons = ([choice[key] for choice in body["choices"]] for key in ("text", "finish_reason"))
        usage = body["usage"]
    assert texts == ["abc", "abc", "token ends", "token ends", "x", "x"] and reasons == ["stop"] * 6
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4 + 3 + 2, 2 * (4 + 3 + 2))


@pytest.mark.parametrize("stream", [False, True])
def test_chat_with_n(birds: Running, stream: bool) -> None:
    asked = fields_of("chat", "abc") | {"n": 3, "temperature": 0, "stream": stream}
    answer = birds.post("chat", **asked)
    if not stream:
        assert [choice["message"]["content"] for choice in answer.json()["choices"]] == ["abc"] * 3
        return
    *chunks, done = events(answer.text)
    roles = [chunk["choices"][0]["index"] for chunk in chunks if "role" in chunk["choices"][0]["delta"]]
    ends = [chunk["choices"][0]["index"] for chunk in chunks if chunk["choices"][0]["finish_reason"]]
    assert done == "[DONE]" and roles == [0, 1, 2] and sorted(ends) == [0, 1, 2]
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_token_ids_are_prompts_too(birds: Running) -> None:
    ids = [ALPHABET.index(letter) for letter in "abc"]
    one = birds.post("completions", prompt=ids, temperature=0).json()
    assert one["choices"][0]["text"] == "abc" and one["usage"]["prompt_tokens"] == 3
    two = birds.post("completions", prompt=[ids, ids[::-1]], temperature=0).json()
    assert [choice["text"] for choice in two["choices"]] == ["abc", "cba"]


def test_more_choices_than_may_ever_be_in_flight_are_refused(model: LoadedModel) -> None:
    engine = parrot(model=model)
    with serving(model, engine, max_num_waiting=2) as server:
        message = refused(server.post("completions", prompt=["a"] * 7), param="prompt")
        assert "over the 6 that may run and wait" in message
        refused(server.post("chat", **fields_of("chat", "a"), n=7), param="n")
        assert server.post("completions", prompt=["a"] * 6, temperature=0).status_code == 200


def test_messages_may_come_in_parts_and_from_a_developer(birds: Running) -> None:
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]
    answer = birds.post("chat", temperature=0, messages=[{"role": "developer", "content": "x"},
                                                         {"role": "user", "content": parts, "name": None}])
    assert answer.json()["choices"][0]["message"] == {"role": "assistant", "content": "x\nabc"}


@four_ways
def test_log_probabilities(tiny: Running, reference: LLM, endpoint: str, stream: bool) -> None:
    expected = reference.generate("abc", SamplingParams(max_tokens=6, logprobs=True, top_logprobs=2))[0]
    asked = {"logprobs": True, "top_logprobs": 2} if endpoint == "chat" else {"logprobs": 2}
    answer = tiny.ask(endpoint, stream, "abc", max_tokens=6, **asked)
    assert answer.tokens == [ALPHABET[one.token_id] for one in expected.logprobs]
    assert answer.logprobs == pytest.approx([one.logprob for one in expected.logprobs], abs=1e-6)
    tops = [[(ALPHABET[token], pytest.approx(value, abs=1e-6)) for token, value in one.top]
            for one in expected.logprobs]
    told = [choice["logprobs"] for chunk in answer.chunks for choice in chunk["choices"] if choice.get("logprobs")]
    if endpoint == "chat":
        content = [one for each in told for one in each["content"]]
        assert [[(top["token"], top["logprob"]) for top in one["top_logprobs"]] for one in content] == tops
        assert all(bytes(one["bytes"]).decode() == one["token"] for one in content)
    else:
        assert [sorted(top.items()) for each in told for top in each["top_logprobs"]] == [sorted(top) for top in tops]
        offsets = [offset for each in told for offset in each["text_offset"]]
        assert offsets == [sum(map(len, answer.tokens[:i])) for i in range(6)]


def test_no_logprobs_unless_asked_for(birds: Running) -> None:
    for endpoint in ENDPOINTS:
        body = birds.post(endpoint, **fields_of(endpoint, "abc")).json()
        assert body["choices"][0]["logprobs"] is None
    none_on_top = birds.ask("completions", False, "abc", logprobs=0).chunks[0]["choices"][0]["logprobs"]
    assert none_on_top["top_logprobs"] is None and len(none_on_top["tokens"]) == 4


def test_half_a_character_has_no_bytes(birds: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(birds.service, "token_text", lambda token: "\ufffd" if token == EOS else ALPHABET[token])
    body = birds.post("chat", **fields_of("chat", "a"), logprobs=True, temperature=0).json()
    assert [one["bytes"] for one in body["choices"][0]["logprobs"]["content"]] == [[97], None]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_x11_a_salt_keeps_prefixes_apart(endpoint: str) -> None:
    engine = parrot()
    with serving(engine.model, engine) as server:
        salts = ("a", "a", "b", "b", None, None)
        cached = [server.ask(endpoint, False, "abcdefghijklmno", cache_salt=salt).usage["prompt_tokens_details"][
            "cached_tokens"] for salt in salts]
    assert cached == [0, 12, 0, 12, 0, 12]


def test_models_and_health(tiny: Running) -> None:
    (card,) = tiny.http.get("/v1/models").json()["data"]
    assert tiny.http.get("/v1/models/letters").json() == card
    refused(tiny.http.get("/v1/models/some/other"), 404, "model")
    assert (card["id"], card["object"], card["max_model_len"]) == ("letters", "model", L)
    health = tiny.http.get("/health").json()
    assert health == {"status": "ok", "reason": None, "engine": "liteinfer-radix", "model": "letters", "in_flight": 0,
                      "capacity": 32 + 256}


@pytest.mark.parametrize("row", ["nocache", "eager-b4", "paged"])
def test_any_rung_can_be_served(model: LoadedModel, reference: LLM, row: str) -> None:
    expected = [reference.generate(prompt, SamplingParams(max_tokens=6))[0].text for prompt in ("abc", "xyz")]
    with serving(model, LLM(model, row=row, max_model_len=L).engine, row=row) as server:
        both = server.post("completions", prompt=["abc", "xyz"], max_tokens=6, temperature=0).json()
        assert [choice["text"] for choice in both["choices"]] == expected
        assert both["timings"]["prompt_ms"] > 0
        assert server.ask("chat", True, "abc", max_tokens=6).text == expected[0]
        assert server.http.get("/metrics").status_code == server.http.get("/live/state").status_code == 200
        message = refused(server.post("completions", prompt="abc", presence_penalty=1), param="presence_penalty")
        assert f"needs a row that runs continuously, as liteinfer-radix does, and {row} does not" in message


def test_a_model_without_a_tokenizer_takes_and_tells_token_ids(tiny_llama: LoadedModel, reference: LLM) -> None:
    engine = LLM(tiny_llama, row="radix", max_model_len=L, num_blocks=64, block_size=4).engine
    expected = LLM(tiny_llama, row="nocache").generate([5, 6, 7], SamplingParams(max_tokens=4))[0].token_ids
    with serving(tiny_llama, engine) as server:
        body = server.post("completions", prompt=[5, 6, 7], max_tokens=4, temperature=0, logprobs=0).json()
        assert body["choices"][0]["logprobs"]["tokens"] == [f"token_id:{token}" for token in expected]
        refused(server.post("completions", prompt="abc"), param="prompt")
        refused(server.post("chat", **fields_of("chat", "abc")), param="messages")
        assert "has none" in refused(server.post("completions", prompt=[5], stop="x"), param="stop")
