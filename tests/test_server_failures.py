"""When things go wrong: clients that leave, engines that fail, queues that are full, servers that go down."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any

import httpx
import pytest
import torch

from liteinfer import cli
from liteinfer.loading import tiny_model
from liteinfer.server.serve import bind
from tests.served import ALPHABET, WAYS, Running, events, nothing_left, parrot, path, serving
from tests.test_loading import save_folder

pytestmark = pytest.mark.ch10
ENDPOINTS = ("chat", "completions")
LONG = "a" * 100   # with ignore_eos and 300 tokens: for as long as a test wants
WITHIN = 2.0       # seconds
Z = ALPHABET.index("Z")


@contextmanager
def in_background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def asked(server: Running, endpoint: str, stream: bool, prompt: str = LONG, **fields: Any) -> dict[str, Any]:
    return server.body(endpoint, prompt, **{"max_tokens": 300, "ignore_eos": True, "stream": stream} | fields)


def post_later(pool: ThreadPoolExecutor, server: Running, endpoint: str, body: dict[str, Any]
               ) -> Future[httpx.Response]:
    """Send from another thread, over a connection of its own."""
    return pool.submit(lambda: httpx.post(server.base + path(endpoint), json=body, timeout=20))


def in_flight(engine: Any, prompt: str) -> list[str]:
    """Ids of the requests that run or wait and have as many tokens as this prompt, with BOS."""
    queue = engine.scheduler
    return [r.request_id for r in (*queue.running, *queue.waiting) if len(r.prompt_token_ids) == len(prompt) + 1]


# --- H5: the client is gone -------------------------------------------------------------------------------------------


def leave_after_two_chunks(server: Running, endpoint: str, **fields: Any) -> None:
    body = asked(server, endpoint, True, **fields)
    with httpx.Client(base_url=server.base) as client, client.stream("POST", path(endpoint), json=body) as answer:
        lines = (line for line in answer.iter_lines() if '"content":"a"' in line or '"text":"a"' in line)
        next(lines), next(lines)


def leave_while_waiting(server: Running, endpoint: str, **fields: Any) -> None:
    with httpx.Client(base_url=server.base) as client, pytest.raises(httpx.ReadTimeout):
        client.post(path(endpoint), json=asked(server, endpoint, False, **fields), timeout=0.15)


def leave_a_silent_stream(server: Running, endpoint: str, **fields: Any) -> None:
    """In the middle of the prompt: a role may have come, but no token."""
    body = asked(server, endpoint, True, **fields)
    with httpx.Client(base_url=server.base) as client, client.stream("POST", path(endpoint), json=body):
        server.until(lambda engine: any(r.num_computed_tokens for r in engine.scheduler.running
                                        if r.request_id in in_flight(engine, fields["prompt"])))


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize(("leave", "fields"), [
    (leave_after_two_chunks, {}), (leave_while_waiting, {}), (leave_a_silent_stream, {"prompt": "b" * 400}),
    (leave_while_waiting, {"prompt": "b" * 400}), (leave_after_two_chunks, {"n": 2}), (leave_while_waiting, {"n": 2}),
], ids=["2 chunks", "whole", "prefill", "prefill, whole", "n=2", "n=2, whole"])
def test_h5_a_client_that_leaves_takes_its_work_along(endpoint: str, leave: Any, fields: dict[str, Any]) -> None:
    engine = parrot(pause=0.01, max_prefill_chunk=8)
    prompt = fields.get("prompt", LONG)
    with serving(engine.model, engine) as server, in_background() as pool:
        other = post_later(pool, server, endpoint, server.body(endpoint, "the other one", max_tokens=200))
        server.until(lambda engine: in_flight(engine, "the other one"))
        leave(server, endpoint, **{"max_tokens": 90} | fields)
        left = monotonic()
        server.until(lambda engine: not in_flight(engine, prompt), WITHIN)
        requests = [r for r in engine.runner.requests.values() if len(r.prompt_token_ids) == len(prompt) + 1]
        assert len(requests) == fields.get("n", 1) and all(len(r.output_token_ids) < 90 for r in requests)
        tables = server.in_engine(lambda engine: set(engine.cache.tables))
        assert tables.isdisjoint(r.request_id for r in requests) and monotonic() - left < WITHIN
        body = other.result().json()
        assert (body["choices"][0].get("text") or body["choices"][0]["message"]["content"]) == "the other one"
        server.until(nothing_left)
        assert server.http.get("/health").json()["in_flight"] == 0
        aborted = f'finish_reason="abort"}} {float(fields.get("n", 1))}'
        assert aborted in server.http.get("/metrics").text


def test_h5_a_client_that_leaves_the_queue_never_runs() -> None:
    engine = parrot(pause=0.01, max_num_seqs=1)
    with serving(engine.model, engine) as server, in_background() as pool:
        first = post_later(pool, server, "chat", asked(server, "chat", False, "the other one", max_tokens=60))
        server.until(lambda engine: in_flight(engine, "the other one"))
        leave_while_waiting(server, "chat")
        server.until(lambda engine: not in_flight(engine, LONG), WITHIN)
        assert first.result().status_code == 200
        assert len(engine.runner.requests) == 1


def test_a_client_that_reads_nothing_slows_nobody() -> None:
    engine = parrot()
    with serving(engine.model, engine) as server:
        body = json.dumps(asked(server, "chat", True)).encode()
        with socket.create_connection(server.base.removeprefix("http://").split(":")) as silent:
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            silent.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                           b"content-length: %d\r\n\r\n%s" % (len(body), body))
            for _ in range(3):
                assert server.ask("chat", True, "the other one", max_tokens=60).text == "the other one"
            server.until(nothing_left, 10)


# --- H9: the engine fails ---------------------------------------------------------------------------------------------


def fail_once(engine: Any, after: int) -> None:
    """The pass after so many raises, once."""
    left = [True]

    def before(chunks: object) -> None:
        if left and engine.counters.forward_passes >= after:
            left.clear()
            raise RuntimeError("the kernel is out of order")

    engine.runner.before = before


def assert_failed(answer: httpx.Response, stream: bool, message: str, code: str = "generation_failed") -> None:
    if stream:
        *_, last = events(answer.text)
        assert answer.status_code == 200 and list(last) == ["error"], "no [DONE] after an error"
        error = last["error"]
    else:
        assert answer.status_code == (500 if code == "generation_failed" else 503)
        error = answer.json()["error"]
    assert (error["message"], error["type"], error["code"]) == (message, "server_error", code)


@pytest.mark.parametrize(("endpoint", "stream"), WAYS)
def test_h9_a_pass_that_raises_is_told_to_those_in_it(endpoint: str, stream: bool) -> None:
    engine = parrot(pause=0.005, max_num_seqs=2)
    with serving(engine.model, engine) as server, in_background() as pool:
        hit = [post_later(pool, server, endpoint, asked(server, endpoint, stream)) for _ in range(2)]
        server.until(lambda engine: len(in_flight(engine, LONG)) == 2)
        waiting = post_later(pool, server, endpoint, server.body(endpoint, "I wait", max_tokens=20))
        server.until(lambda engine: in_flight(engine, "I wait"))
        fail_once(engine, after=0)
        failed_at = monotonic()
        for answer in hit:
            assert_failed(answer.result(WITHIN), stream, "RuntimeError: the kernel is out of order")
        assert monotonic() - failed_at < WITHIN
        body = waiting.result().json()
        assert (body["choices"][0].get("text") or body["choices"][0]["message"]["content"]) == "I wait"
        server.until(nothing_left)
        assert server.http.get("/health").status_code == 200
        assert server.ask(endpoint, stream, "the next", max_tokens=20).text == "the next"


@pytest.mark.parametrize(("endpoint", "stream"), WAYS)
def test_h9_an_engine_that_breaks_tells_everybody_and_turns_unhealthy(endpoint: str, stream: bool) -> None:
    engine = parrot(pause=0.005, max_num_seqs=2)
    with serving(engine.model, engine) as server, in_background() as pool:
        hit = [post_later(pool, server, endpoint, asked(server, endpoint, stream)) for _ in range(3)]
        server.until(lambda engine: len(in_flight(engine, LONG)) == 3)

        def broken(*_: object) -> None:
            raise MemoryError("nothing left")

        scheduler: Any = engine.scheduler
        scheduler.schedule = scheduler.remove = broken
        for answer in hit:
            assert_failed(answer.result(WITHIN), stream, "MemoryError: nothing left")
        health = server.http.get("/health")
        assert health.status_code == 503 and "MemoryError" in health.json()["reason"]
        refused = server.http.post(path(endpoint), json=asked(server, endpoint, stream))
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "unavailable"
        assert server.http.get("/metrics").status_code == 200


def test_one_choice_that_fails_is_the_end_of_its_answer_and_of_nothing_else() -> None:
    engine = parrot(pause=0.002)
    row = engine.runner.row

    def with_nan(request_id: str, position: int) -> torch.Tensor:
        logits = row(request_id, position)
        if engine.runner.requests[request_id].prompt_token_ids[-1] == Z and position > 8:
            logits[5] = torch.nan
        return logits

    engine.runner.row = with_nan
    with serving(engine.model, engine) as server, in_background() as pool:
        other = post_later(pool, server, "chat", server.body("chat", "the other one", max_tokens=20))
        body = server.body("completions", "", max_tokens=200, ignore_eos=True) | {"prompt": ["abcd", "abcdefghZ"]}
        answer = server.http.post(path("completions"), json=body)
        assert_failed(answer, False, "FloatingPointError: 1 of 64 logits are NaN")
        assert other.result().json()["choices"][0]["message"]["content"] == "the other one"
        server.until(nothing_left)


def test_a_tokenizer_that_fails_hurts_only_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = parrot(pause=0.002)
    decode = engine.model.tokenizer.decode

    def decode_no_z(ids: list[int], **settings: Any) -> str:
        if Z in ids:
            raise ValueError("Z")
        return decode(ids, **settings)

    engine.model.tokenizer.decode = decode_no_z
    with serving(engine.model, engine) as server, in_background() as pool:
        other = post_later(pool, server, "chat", server.body("chat", "the other one", max_tokens=20))
        for stream in (False, True):
            answer = server.http.post(path("chat"), json=server.body("chat", "abZab", stream=stream))
            assert_failed(answer, stream, "ValueError: Z")
        assert other.result().json()["choices"][0]["message"]["content"] == "the other one"
        server.until(nothing_left)


# --- overload ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("endpoint", "stream"), WAYS)
def test_a_full_queue_is_a_429_with_retry_after(endpoint: str, stream: bool) -> None:
    engine = parrot(pause=0.01, max_num_seqs=1)
    with serving(engine.model, engine, max_num_waiting=1) as server, in_background() as pool:
        body = server.body(endpoint, "hello", max_tokens=60, ignore_eos=True)
        two = [post_later(pool, server, endpoint, body) for _ in range(2)]
        server.until(lambda engine: len(in_flight(engine, "hello")) == 2)
        refused = server.http.post(path(endpoint), json=body | {"stream": stream})
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        assert "1 run and 1 wait (max_num_waiting)" in error["message"]
        assert server.http.get("/health").status_code == 200
        assert [answer.result().status_code for answer in two] == [200, 200]
        assert server.ask(endpoint, stream, "hello", max_tokens=9).text == "hello"


# --- going down -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("endpoint", "stream"), WAYS)
def test_told_to_stop_it_lets_those_in_flight_end(endpoint: str, stream: bool) -> None:
    engine = parrot(pause=0.01)
    with serving(engine.model, engine, drain_seconds=10) as server, in_background() as pool:
        answer = post_later(pool, server, endpoint, asked(server, endpoint, stream, "hello", max_tokens=60))
        server.until(lambda engine: in_flight(engine, "hello"))
        server.server.should_exit = True
        while server.service.engine.refuses is None:
            sleep(0.01)
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.base + "/health")
        assert answer.result().status_code == 200
        if stream:
            *_, ending, done = events(answer.result().text)
            assert done == "[DONE]" and ending["choices"][0]["finish_reason"] == "length"
        else:
            assert answer.result().json()["usage"]["completion_tokens"] == 60


@pytest.mark.parametrize(("endpoint", "stream"), WAYS)
def test_what_does_not_end_in_time_is_cancelled_and_told(endpoint: str, stream: bool) -> None:
    engine = parrot(pause=0.01)
    with serving(engine.model, engine, drain_seconds=0.2) as server, in_background() as pool:
        answer = post_later(pool, server, endpoint, asked(server, endpoint, stream))
        server.until(lambda engine: in_flight(engine, LONG))
        server.server.should_exit = True
        assert_failed(answer.result(5), stream, "the server is shutting down", "unavailable")
    assert nothing_left(engine)


@pytest.mark.skipif(os.name != "posix", reason="needs SIGTERM")
def test_the_command_serves_and_goes_down_on_sigterm(tmp_path: Path) -> None:
    """The real thing, in a process of its own: the line at the start, an answer, SIGTERM in the middle of another."""
    folder = save_folder(tiny_model("llama", max_position_embeddings=8192), tmp_path / "tiny")
    command = [sys.executable, "-m", "liteinfer", "serve", "--model", str(folder), "--row", "radix", "--port", "0",
               "--device", "cpu", "--num-blocks", "600", "--max-num-seqs", "2", "--served-model-name", "tiny",
               "--drain-seconds", "0.3", "--max-num-waiting", "3"]
    environment = os.environ | {"LITEINFER_API_KEY": "sesame", "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        try:
            line = process.stdout.readline()
            assert "tiny on liteinfer-radix at http://127.0.0.1:" in line and "2 run, 3 wait" in line
            assert "KV pool: 600 blocks of 16 tokens" in line and "(as given)" in line
            base = line.split(" at ")[1].split("/v1")[0]
            client = httpx.Client(base_url=base, headers={"authorization": "Bearer sesame"}, timeout=20)
            body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 3}
            assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 3
            assert httpx.post(base + "/v1/completions", json=body).status_code == 401
            with client.stream("POST", "/v1/completions", json=body | {"max_tokens": 8000, "stream": True,
                                                                       "logprobs": 0}) as answer:
                lines = (line for line in answer.iter_lines() if line)
                assert "token_id" in next(lines)
                process.send_signal(signal.SIGTERM)
                *_, last = lines
            assert json.loads(last[6:])["error"]["message"] == "the server is shutting down"
            assert process.wait(10) == -signal.SIGTERM
            assert process.stdout.read() == process.stderr.read() == ""
        finally:
            process.kill()


@pytest.mark.parametrize(("arguments", "words"), [
    (["--row", "turbo"], "unknown row 'turbo'"),
    (["--host", "no.such.host.invalid"], "cannot listen on host no.such.host.invalid port"),
    (["--port", "70000"], "port must be from 0 to 65535, got 70000"),
    (["--model", "./no-such-folder"], "no-such-folder"),
    (["--row", "eager", "--num-blocks", "10", "--model", "TINY"],
     "row liteinfer-eager does not have the setting num_blocks"),
    (["--max-num-waiting", "-1", "--model", "TINY", "--row", "radix", "--num-blocks", "9"], "max_num_waiting must be"),
    (["--drain-seconds", "-1", "--model", "TINY", "--row", "radix", "--num-blocks", "9"], "drain_seconds must be"),
    (["--max-model-len", "0", "--model", "TINY", "--row", "radix"], "max_model_len must be from 1 to"),
    (["--api-key", "", "--model", "TINY", "--row", "radix", "--num-blocks", "9"], "api_key is empty"),
    (["--max-body-bytes", "0", "--model", "TINY", "--row", "radix", "--num-blocks", "9"], "max_body_bytes must be"),
])
def test_bad_settings_are_one_line(arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                   monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(save_folder(tiny_model("llama"), tmp_path / "tiny"))
    port = [] if "--port" in arguments else ["--port", "0"]
    given = [folder if argument == "TINY" else argument for argument in arguments]
    monkeypatch.setattr("sys.argv", ["liteinfer", "serve", "--device", "cpu", *port, *given])
    with pytest.raises(SystemExit) as exit_code:
        cli.main()
    printed = capsys.readouterr()
    assert exit_code.value.code == 2 and printed.out == ""
    assert words in printed.err and printed.err.strip().count("\n") == 0 and "Traceback" not in printed.err


def test_a_port_that_is_taken_is_said_before_anything_is_loaded(capsys: pytest.CaptureFixture[str],
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        monkeypatch.setattr("sys.argv", ["liteinfer", "serve", "--model", "./no-such-folder", "--port", port])
        with pytest.raises(SystemExit):
            cli.main()
    printed = capsys.readouterr()
    assert f"cannot listen on host 127.0.0.1 port {port}" in printed.err and printed.err.count("\n") == 1


def test_connections_do_not_wait_for_full_packets() -> None:
    """asyncio turns Nagle's algorithm off, but only where the socket says that it is TCP."""
    with bind("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


# --- K10 --------------------------------------------------------------------------------------------------------------


def test_k10_sixty_four_clients_are_in_flight_at_a_time() -> None:
    engine = parrot(pause=0.02)
    with serving(engine.model, engine) as server:
        statuses: list[int] = []
        gate, body = Event(), server.body("chat", "abc")
        engine.runner.before = lambda _: gate.wait(20)                      # no step ends before all are there

        def one() -> None:
            statuses.append(httpx.post(server.base + path("chat"), json=body, timeout=60).status_code)

        clients = [Thread(target=one) for _ in range(64)]
        for client in clients:
            client.start()
        until = monotonic() + 20
        while (seen := server.http.get("/health").json()["in_flight"]) < 64 and monotonic() < until:
            sleep(0.02)
        gate.set()
        for client in clients:
            client.join()
        assert statuses == [200] * 64 and seen == 64
