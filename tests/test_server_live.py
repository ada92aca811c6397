"""What the server shows of itself: /metrics, and the snapshot that the live page draws."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from liteinfer import LLM
from liteinfer.loading import tiny_model
from liteinfer.request import SamplingParams
from liteinfer.server import snapshot as snapshots
from liteinfer.server.metrics import Metrics
from liteinfer.server.snapshot import CACHED, FREE, SHARED, snapshot
from liteinfer.trace import StepTrace
from tests.scripted import request, script_engine
from tests.served import Running, events, nothing_left, parrot, path, serving

pytestmark = pytest.mark.ch10


def metrics(server: Running) -> dict[tuple[str, str], float]:
    """(name, finish reason or bucket or nothing) -> value, as Prometheus itself reads them."""
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    return {(sample.name, "".join(sample.labels.values())): sample.value
            for family in families for sample in family.samples}


def test_metrics_count_what_happened() -> None:
    engine = parrot(num_blocks=64)
    with serving(engine.model, engine) as server:
        before = metrics(server)
        assert {value for (name, _), value in before.items()
                if "blocks" not in name and not name.endswith("_created")} == {0.0}
        assert before["liteinfer_kv_blocks_total", ""] == before["liteinfer_kv_blocks_free", ""] == 64
        server.ask("chat", False, "abcdefgh", max_tokens=20)                # 9 tokens out, 8 of them letters
        server.ask("completions", True, "abcdefgh", max_tokens=3)
        server.post("completions", prompt="ab", n=2, temperature=0, stop="b")
        server.until(nothing_left)
        found = metrics(server)
        assert found["liteinfer_requests_finished_total", "stop"] == 3
        assert found["liteinfer_requests_finished_total", "length"] == 1
        assert found["liteinfer_generation_tokens_total", ""] == 9 + 3 + 2 * 2
        assert found["liteinfer_time_to_first_token_seconds_count", ""] == 4
        assert found["liteinfer_inter_token_latency_seconds_count", ""] == 8 + 2 + 2 * 1
        assert found["liteinfer_time_to_first_token_seconds_sum", ""] > 0
        assert found["liteinfer_prompt_tokens_total", ""] == 9 + 9 + 3 + 3
        assert found["liteinfer_prefix_hit_tokens_total", ""] == 8
        assert found["liteinfer_kv_blocks_cached", ""] > 0 == found["liteinfer_kv_blocks_used", ""]
        assert found["liteinfer_kv_blocks_free", ""] + found["liteinfer_kv_blocks_cached", ""] == 64
        assert found["liteinfer_forward_passes_total", ""] == engine.counters.forward_passes


def test_metrics_of_two_servers_in_one_process_are_apart() -> None:
    one, other = (Metrics(script_engine()) for _ in range(2))
    one.tokens(3, 0.1, first=True)
    assert b"liteinfer_generation_tokens_total 3.0" in one.text()
    assert b"liteinfer_generation_tokens_total 0.0" in other.text()


def test_metrics_of_drafts_and_preemptions() -> None:
    llm = LLM(tiny_model("llama"), row="ngram", num_blocks=9, block_size=4, max_num_seqs=4)
    llm.generate([[1, 2, 3] * 3, [4, 5] * 4], SamplingParams(max_tokens=12))
    text = Metrics(llm.engine).text().decode()
    counters = llm.engine.counters
    assert counters.drafted_tokens and counters.preemptions
    for name in ("drafted_tokens", "accepted_tokens", "preemptions"):
        assert f"liteinfer_{name}_total {float(getattr(counters, name))}" in text


def test_a_snapshot_by_hand() -> None:
    """Blocks of 4: A computed 6 of 6, B 4 of 5 (of a budget of 10), C waits."""
    from liteinfer.radix_manager import RadixManager

    engine = script_engine(max_num_seqs=3, max_num_batched_tokens=10, num_blocks=8, block_size=4, trace=StepTrace(),
                           kv_manager=RadixManager)
    for name, prompt in (("A", 6), ("B", 5), ("C", 3)):
        engine.add(request(name, prompt, 8))
    engine.step()
    state = snapshot(engine)
    assert [(r["id"], r["prompt"], r["computed"], r["output"], r["blocks"]) for r in state["running"]] == [
        ("A", 6, 6, 1, 2), ("B", 5, 4, 0, 1)]
    assert [r["id"] for r in state["waiting"]] == ["C"]
    pool = state["pool"]
    assert (pool["total"], pool["used"], pool["cached"], pool["free"]) == (8, 3, 0, 5)
    assert pool["owners"] == ["A", "B"]
    tables = engine.cache.tables
    assert [pool["map"][block] for block in tables["A"] + tables["B"]] == [0, 0, 1] and pool["map"].count(FREE) == 5
    (step,) = state["steps"]
    assert [(part["id"], part["what"], part["tokens"], part["new"]) for part in step["parts"]] == [
        ("A", "prefill", 6, 1), ("B", "prefill", 4, 0)]
    assert step["running"] == 2 and step["waiting"] == 1 and step["began"] <= step["ended"] <= state["at"]
    assert sorted((node["tokens"], node["locks"], node["children"]) for node in state["tree"]["children"]) == [
        (4, 1, []), (4, 1, [])]
    assert (state["tree"]["nodes"], state["tree"]["left_out"]) == (2, 0)
    while engine.has_unfinished():
        engine.step()
    engine.add(request("A", 6, 8))
    engine.add(request("A2", 6, 8))
    engine.scheduler.waiting[1].prompt_token_ids[:] = engine.scheduler.waiting[0].prompt_token_ids
    engine.step()
    later = snapshot(engine)
    assert later["pool"]["map"].count(SHARED) == 1 and later["pool"]["map"].count(CACHED) == later["pool"]["cached"] > 0
    assert later["pool"]["used"] + later["pool"]["cached"] + later["pool"]["free"] == 8
    assert later["running"][0]["cached"] == 4


def test_a_large_tree_is_cut_at_its_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "NODES", 3)
    engine = parrot()
    for i in range(5):
        blocks = engine.cache.pool.allocate(2)
        engine.scheduler.kv.tree.insert([9, 9, 9, 9, i, i, i, i], blocks)
        engine.cache.pool.free(blocks)
    tree = snapshot(engine)["tree"]
    (root,) = tree["children"]
    assert (root["tokens"], len(root["children"]), tree["nodes"], tree["left_out"]) == (4, 2, 3, 3)


def test_live_state_while_requests_run() -> None:
    engine = parrot(pause=0.01)
    with serving(engine.model, engine) as server:
        assert server.http.get("/live/state").json()["steps"] == [], "recording begins with the first look"
        body = server.body("chat", "a" * 40, max_tokens=60, ignore_eos=True, stream=True)
        with server.http.stream("POST", path("chat"), json=body) as answer:
            server.until(lambda engine: engine.counters.forward_passes > 20)
            state = httpx.get(server.base + "/live/state").json()
            assert (state["row"], state["model"], state["in_flight"], state["why_not"]) == (
                "liteinfer-radix", "letters", 1, None)
            (running,) = state["running"]
            assert running["prompt"] == 41 and running["output"] > 0 and running["max_tokens"] == 60
            assert running["blocks"] == state["pool"]["used"] > 10
            assert any(part["id"] == running["id"] for step in state["steps"] for part in step["parts"])
            assert "aaa" not in str(state), "what was said is nobody's business"
            assert events(answer.read().decode())[-1] == "[DONE]"


def test_looking_often_does_not_look_more_often_into_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[object] = []

    def noted(engine: Any) -> dict[str, Any]:
        looks.append(engine)
        return snapshot(engine)

    monkeypatch.setattr(snapshots, "snapshot", noted)
    monkeypatch.setattr(snapshots, "EVERY", 1000.0)
    engine = parrot()
    with serving(engine.model, engine) as server:
        first = server.http.get("/live/state").json()
        assert [server.http.get("/live/state").json() for _ in range(20)] == [first] * 20
    assert len(looks) == 1


def test_a_server_that_nobody_looks_at_records_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "FORGET", 0.05)
    engine = parrot()
    with serving(engine.model, engine) as server:
        assert engine.trace is None
        server.http.get("/live/state")
        assert engine.trace is not None
        server.until(lambda engine: engine.trace is None, 5)


def test_an_engine_that_records_already_keeps_its_own_trace() -> None:
    own = StepTrace()
    engine = parrot(trace=own)
    with serving(engine.model, engine) as server:
        server.ask("chat", False, "abc")
        assert len(server.http.get("/live/state").json()["steps"]) == len(own.steps) > 0
        assert engine.trace is own


def test_no_live_leaves_it_out() -> None:
    engine = parrot()
    with serving(engine.model, engine, live=False) as server:
        assert server.http.get("/live/state").status_code == server.http.get("/").status_code == 404
        assert "/live/state" not in server.http.get("/openapi.json").json()["paths"]
