"""The engine on its own thread: submit, abort, finish, fail, drain; without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from liteinfer.request import Request, SamplingParams, TokenEvent
from liteinfer.server.async_engine import AsyncEngine, QueueFull, Unavailable
from tests.scripted import expected, request, script_engine
from tests.served import nothing_left

pytestmark = pytest.mark.ch10


class Ear:
    """A receiver that keeps all it hears."""

    def __init__(self, request: Request) -> None:
        self.request, self.events, self.began = request, list[tuple[TokenEvent, float]](), list[float]()
        self.over = asyncio.Event()

    def started(self, at: float) -> None:
        self.began.append(at)

    def take(self, event: TokenEvent, at: float) -> None:
        self.events.append((event, at))
        if event.finish_reason:
            self.over.set()

    @property
    def tokens(self) -> list[int]:
        return [token for event, _ in self.events for token in event.token_ids]

    @property
    def reason(self) -> str | None:
        return self.events[-1][0].finish_reason if self.events else None


def run(scenario: Callable[[AsyncEngine], Awaitable[None]], max_num_waiting: int = 256, **settings: Any) -> None:
    """The scenario on a started engine of 8 at a time; then the invariants, and the end of the thread."""
    async def all_of_it() -> None:
        engine = AsyncEngine(script_engine(**settings), 8, max_num_waiting)
        engine.start()
        try:
            await asyncio.wait_for(scenario(engine), 20)
        finally:
            engine.stop()
        assert not engine._thread.is_alive()

    asyncio.run(all_of_it())


def ears(requests: Sequence[Request]) -> list[Ear]:
    return [Ear(each) for each in requests]


async def over(*each: Ear) -> None:
    await asyncio.gather(*(ear.over.wait() for ear in each))


async def settled(engine: AsyncEngine) -> None:
    """Nobody is in flight and no block is held, within two seconds."""
    for _ in range(200):
        if await engine.ask(nothing_left):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("something is left of the requests")


def test_twenty_requests_get_their_own_tokens_in_order() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        all_of_them = ears([request(f"r{i}", 3 + i, 5 + i % 7) for i in range(20)])
        for ear in all_of_them:
            engine.submit([ear])
        await over(*all_of_them)
        for ear in all_of_them:
            assert ear.tokens == expected(ear.request) and ear.reason == "length"
            times = [at for _, at in ear.events]
            assert len(ear.began) == 1 and times == sorted(times) and ear.began[0] <= times[0]
        assert not engine.receivers
        await settled(engine)

    run(scenario)


def test_requests_that_come_meanwhile_are_batched_with_those_that_run() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        first, second = ears([request("a", 4, 60), request("b", 4, 30)])
        engine.submit([first])
        while not first.events:
            await asyncio.sleep(0)
        engine.submit([second])
        await over(first, second)
        passes = await engine.ask(lambda engine: engine.counters.forward_passes)
        assert passes < 60 + 30, "one after the other"
        assert first.tokens == expected(first.request) and second.tokens == expected(second.request)

    run(scenario)


def test_a_request_that_could_never_run_is_refused_and_nothing_of_its_company_runs() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        good, bad = ears([request("good", 4, 4), Request("bad", [64], SamplingParams(max_tokens=1))])
        with pytest.raises(ValueError, match="token id 64"):
            engine.submit([good, bad])
        await settled(engine)
        assert not engine.receivers and await engine.ask(lambda engine: engine.counters.forward_passes) == 0
        assert good.events == bad.events == []

    run(scenario)


def test_the_queue_is_bounded() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        fits = ears([request(f"r{i}", 4, 20) for i in range(10)])
        late, later = ears([request("late", 4, 2), request("later", 4, 2)])
        engine.submit(fits)
        with pytest.raises(QueueFull, match=r"10 requests are in flight and 1 more .* 8 run and 2 wait"):
            engine.submit([late])
        await over(*fits)
        engine.submit([late, later])
        await over(late, later)
        assert late.tokens == expected(late.request)

    run(scenario, max_num_waiting=2)


def test_s9_aborted_in_every_state_and_twice() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        running, *waiting = ears([request(f"r{i}", 6, 200) for i in range(12)])
        neighbour = Ear(request("neighbour", 6, 20))
        engine.submit([running, neighbour, *waiting])
        while not running.events:
            await asyncio.sleep(0)
        engine.abort("r0")
        heard = len(running.events)
        for ear in waiting:
            engine.abort(ear.request.request_id)
        for unknown in ("r0", "r3", "never heard of"):
            engine.abort(unknown)
        await over(neighbour)
        assert neighbour.tokens == expected(neighbour.request)
        await settled(engine)
        assert len(running.events) == heard and running.reason is None, "an aborted request heard something"
        engine.abort("neighbour")
        await settled(engine)

    run(scenario)


def test_a_request_that_ends_above_the_engine_frees_its_blocks() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        ear, again = ears([request("a", 6, 300), request("a", 6, 3)])
        engine.submit([ear])
        while len(ear.events) < 3:
            await asyncio.sleep(0)
        engine.finish("a", 2)
        await settled(engine)
        engine.submit([again])             # even its id is free again
        await over(again)
        assert again.tokens == expected(again.request)

    run(scenario)


def test_h9_a_pass_that_fails_ends_those_in_it_and_no_others() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        core, failing = engine.engine, True

        def fail_once(chunks: object) -> None:
            nonlocal failing
            if failing and core.counters.forward_passes >= 3:
                failing = False
                raise RuntimeError("no such kernel")

        core.runner.before = fail_once
        hit, waiting = ears([request(f"hit{i}", 6, 50) for i in range(8)]), Ear(request("waits", 6, 9))
        engine.submit([*hit, waiting])
        await asyncio.wait_for(over(*hit), 2)
        assert all(ear.events[-1][0].error == "RuntimeError: no such kernel" for ear in hit)
        await over(waiting)
        assert waiting.tokens == expected(waiting.request)
        assert engine.why_not is None
        await settled(engine)

    run(scenario)


def test_h9_a_step_that_raises_ends_all_in_flight_and_the_next_request_works() -> None:
    """Not the pass fails but the scheduler: the engine cannot say for whom."""
    async def scenario(engine: AsyncEngine) -> None:
        scheduler = engine.engine.scheduler
        schedule, failing = scheduler.schedule, True

        def fail_once(*args: object) -> object:
            nonlocal failing
            if failing and scheduler.running:
                failing = False
                raise ZeroDivisionError("of the scheduler")
            return schedule(*args)

        scheduler.schedule = fail_once
        hit = ears([request(f"hit{i}", 6, 50) for i in range(10)])
        engine.submit(hit)
        await asyncio.wait_for(over(*hit), 2)
        assert {ear.events[-1][0].error for ear in hit} == {"ZeroDivisionError: of the scheduler"}
        await settled(engine)
        fine = Ear(request("fine", 6, 9))
        engine.submit([fine])
        await over(fine)
        assert fine.tokens == expected(fine.request) and engine.why_not is None

    run(scenario)


def test_h9_an_engine_that_cannot_let_go_is_broken_and_says_so() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        def broken(*_: object) -> object:
            raise MemoryError("nothing left")

        engine.engine.scheduler.schedule = engine.engine.scheduler.remove = broken
        first, second = ears([request("a", 6, 50), request("b", 6, 50)])
        engine.submit([first, second])
        await asyncio.wait_for(over(first, second), 2)
        assert first.reason == second.reason == "error"
        assert engine.why_not == "the engine is broken: MemoryError: nothing left"
        with pytest.raises(Unavailable, match="broken"):
            engine.submit([Ear(request("c", 6, 5))])
        assert await engine.ask(lambda engine: len(engine.scheduler.waiting)) >= 0, "it still answers questions"

    run(scenario)


def test_an_order_that_was_under_way_when_the_engine_broke_is_answered() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        engine.broken = "the engine is broken: as the test says"
        engine._loop.call_soon(lambda: None)
        ear = Ear(request("late", 6, 5))
        engine.receivers["late"] = ear
        engine._orders.put(lambda: engine._add(ear.request))
        await asyncio.wait_for(over(ear), 2)
        assert ear.reason == "error" and "as the test says" in str(ear.events[0][0].error)

    run(scenario)


def test_drain_lets_those_in_flight_end_and_takes_no_more() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        ear = Ear(request("a", 6, 40))
        engine.submit([ear])
        draining = asyncio.create_task(engine.drain(20))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="shutting down"):
            engine.submit([Ear(request("b", 6, 4))])
        await draining
        assert ear.tokens == expected(ear.request) and ear.reason == "length"

    run(scenario)


def test_drain_aborts_what_is_left_and_says_why() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        ear = Ear(request("a", 6, 400))
        engine.submit([ear])
        await engine.drain(0)
        event, _ = ear.events[-1]
        assert (event.finish_reason, event.error) == ("abort", "the server is shutting down")
        await settled(engine)
        assert len([1 for event, _ in ear.events if event.finish_reason]) == 1

    run(scenario)


def test_before_the_start_and_after_the_end_it_refuses() -> None:
    async def scenario() -> None:
        engine = AsyncEngine(script_engine(), 8)
        with pytest.raises(Unavailable, match="not been started"):
            engine.submit([Ear(request("a", 6, 4))])
        with pytest.raises(Unavailable):
            await engine.ask(lambda engine: None)
        engine.start()
        engine.stop()
        with pytest.raises(Unavailable, match="stopped"):
            engine.submit([Ear(request("a", 6, 4))])
        with pytest.raises(Unavailable):
            await engine.ask(lambda engine: None)

    asyncio.run(scenario())
    with pytest.raises(ValueError, match="max_num_waiting must be at least 0, got -1"):
        AsyncEngine(script_engine(), 8, -1)


def test_a_question_that_raises_hurts_nobody_else() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        ear = Ear(request("a", 6, 30))
        engine.submit([ear])
        with pytest.raises(ZeroDivisionError):
            await engine.ask(lambda engine: 1 // 0)
        await over(ear)
        assert ear.tokens == expected(ear.request)

    run(scenario)


def test_nobody_is_slowed_by_a_loop_that_is_busy() -> None:
    """The event loop stands still; the engine goes on, and the loop finds all of it later."""
    async def scenario(engine: AsyncEngine) -> None:
        ear = Ear(request("a", 6, 50))
        engine.submit([ear])
        core = engine.engine
        while core.counters.forward_passes < 50:     # no await: nothing of the loop runs meanwhile
            pass
        assert ear.events == []
        await over(ear)
        assert ear.tokens == expected(ear.request)

    run(scenario)
