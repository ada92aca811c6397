"""The engine on a thread of its own, at the service of many clients.

Since rung 9: nobody calls `step` any more and waits for what it gives. One thread owns the engine and steps
it for as long as there is work. What others want of it (add, abort, finish) waits in a queue until the step
that runs is done. All that a step gave goes to the event loop in one call, and from there to each request's
own receiver. So the engine waits for no client, be it slow or gone.

    event loop                         engine thread
    submit, abort, finish   --- queue --->   carry out all that is queued
                                             step
    receivers take events  <-- one call --   hand over; again

The name is vLLM's. The engine is still the contract of rung 1, so any rung can be served.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Thread
from time import perf_counter
from typing import Protocol, TypeVar

from liteinfer.engines.base import Engine, error_event
from liteinfer.request import Request, TokenEvent

T = TypeVar("T")


class Unavailable(RuntimeError):
    """No request is taken any more: the server is going down, or its engine is broken."""


class QueueFull(RuntimeError):
    """More requests would wait than may."""


class Receiver(Protocol):
    """Where one request's events go. Called on the event loop, so it may not take long."""

    request: Request

    def started(self, at: float) -> None:
        """The first step that ran the request began then, in seconds of perf_counter."""

    def take(self, event: TokenEvent, at: float) -> None:
        """A step that ended then did this for the request."""


class AsyncEngine:
    """An engine that steps by itself. All methods are for the event loop's thread, `start` and `stop` included.

    Args:
        engine: any rung's; nobody else may touch it from here on.
        max_num_seqs: the most requests that the engine runs at a time.
        max_num_waiting: the most requests besides those; any further one is refused.
    """

    def __init__(self, engine: Engine, max_num_seqs: int, max_num_waiting: int = 256) -> None:
        if max_num_waiting < 0:
            raise ValueError(f"max_num_waiting must be at least 0, got {max_num_waiting}")
        self.engine, self.max_num_seqs, self.max_num_waiting = engine, max_num_seqs, max_num_waiting
        self.refuses: str | None = "the engine has not been started"   # why no request is taken
        self.broken: str | None = None                                  # set once, by the engine thread
        self.receivers: dict[str, Receiver] = {}                        # the event loop's view: who is in flight
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._in_flight: dict[str, Request] = {}                        # the engine thread's view
        self._unstarted: dict[str, Request] = {}                        # those of them that no step has run yet
        self._thread = Thread(target=self._run, name="engine", daemon=True)

    @property
    def capacity(self) -> int:
        """The most requests in flight."""
        return self.max_num_seqs + self.max_num_waiting

    @property
    def why_not(self) -> str | None:
        """Why no request can be served, in a few words; None if all is well."""
        return self.broken or self.refuses

    def start(self) -> None:
        """Begin. Events go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self.refuses = None
        self._thread.start()

    def stop(self, timeout: float = 10.0) -> None:
        """End the thread after the step that runs, waiting at most `timeout` seconds for it."""
        self.refuses = "the engine has been stopped"
        self._orders.put(None)
        self._thread.join(timeout)

    def check_room(self, n: int) -> None:
        """Raises QueueFull or Unavailable if `submit` would refuse n more requests now."""
        if self.why_not is not None:
            raise Unavailable(self.why_not)
        if len(self.receivers) + n > self.capacity:
            raise QueueFull(f"{len(self.receivers)} requests are in flight and {n} more do not fit: at most "
                            f"{self.max_num_seqs} run and {self.max_num_waiting} wait (max_num_waiting)")

    def submit(self, receivers: Sequence[Receiver]) -> None:
        """Run these requests: all of them, or an error and none.

        Raises:
            ValueError: a request that could never run; see Engine.check.
            QueueFull: there is no room for so many.
            Unavailable: none is taken any more.
        """
        for receiver in receivers:
            self.engine.check(receiver.request)   # reads nothing that a step changes
        self.check_room(len(receivers))
        for receiver in receivers:
            self.receivers[receiver.request.request_id] = receiver
            self._orders.put(partial(self._add, receiver.request))

    def abort(self, request_id: str) -> None:
        """Drop a request; its receiver hears nothing more. One that is over, or unknown, does nothing."""
        if self.receivers.pop(request_id, None) is not None:
            self._orders.put(partial(self.engine.abort, request_id))

    def finish(self, request_id: str, n_tokens: int) -> None:
        """A request ended, as its receiver saw, after its first n_tokens (a stop string). It hears nothing more."""
        if self.receivers.pop(request_id, None) is not None:
            self._orders.put(partial(self._finish, request_id, n_tokens))

    async def ask(self, question: Callable[[Engine], T]) -> T:
        """What `question` says of the engine as it is between two steps. It should be quick: no step runs meanwhile.

        Raises what it raises, and Unavailable if the thread has ended.
        """
        if not self._thread.is_alive():
            raise Unavailable(self.why_not)
        answer: Future[T] = Future()

        def order() -> None:
            try:
                answer.set_result(question(self.engine))
            except Exception as error:
                answer.set_exception(error)

        self._orders.put(order)
        return await asyncio.wrap_future(answer)

    async def drain(self, seconds: float) -> None:
        """Take no more requests, let those in flight end, and abort what is left after so many seconds.

        The receivers of those are told: an event "abort" with the reason.
        """
        self.refuses = "the server is shutting down"
        until = perf_counter() + seconds
        while self.receivers and perf_counter() < until:
            await asyncio.sleep(0.02)
        for request_id, receiver in list(self.receivers.items()):
            self.abort(request_id)
            receiver.take(TokenEvent(request_id, finish_reason="abort", error=self.refuses), perf_counter())

    # --- on the engine thread ---

    def _run(self) -> None:
        while True:
            began = perf_counter()
            try:
                if not self._carry_out_orders():
                    return
                began = perf_counter()
                events = self.engine.step() if self._has_work() else []
            except Exception as error:
                events = self._give_up(error)
            self._hand_over(began, events)

    def _has_work(self) -> bool:
        return self.broken is None and self.engine.has_unfinished()

    def _carry_out_orders(self) -> bool:
        """All that are queued; if there is no other work, wait for one first. False if it is the order to end."""
        wait = not self._has_work()
        while wait or not self._orders.empty():
            order, wait = self._orders.get(), False
            if order is None:
                return False
            order()
        return True

    def _add(self, request: Request) -> None:
        try:
            if self.broken is not None:
                raise Unavailable(self.broken)
            self.engine.add(request)
        except Exception as error:      # its own fault, and no other's
            self._hand_over(perf_counter(), [error_event(request, error)])
        else:
            self._in_flight[request.request_id] = self._unstarted[request.request_id] = request

    def _finish(self, request_id: str, n_tokens: int) -> None:
        self.engine.finish(request_id, n_tokens)
        self._in_flight.pop(request_id, None)

    def _give_up(self, error: Exception) -> list[TokenEvent]:
        """The engine itself failed, and nothing says for whom: all in flight end with the error.

        If it can let go of them it goes on with the next; if not, it is broken for good.
        """
        failed = [error_event(request, error) for request in self._in_flight.values()]
        try:
            for request_id in self._in_flight:
                self.engine.abort(request_id)
            while self._has_work():
                self.engine.step()
        except Exception as worse:
            self.broken = f"the engine is broken: {type(worse).__name__}: {worse}"
        return failed

    def _hand_over(self, began: float, events: list[TokenEvent]) -> None:
        started = [name for name, request in self._unstarted.items()
                   if request.num_cached_tokens is not None or request.output_token_ids]
        for event in events:
            if event.finish_reason:
                self._in_flight.pop(event.request_id, None)
        for name in [*started, *(event.request_id for event in events if event.finish_reason)]:
            self._unstarted.pop(name, None)
        if started or events:
            self._loop.call_soon_threadsafe(self._deliver, began, perf_counter(), started, events)

    # --- back on the event loop ---

    def _deliver(self, began: float, ended: float, started: list[str], events: list[TokenEvent]) -> None:
        for name in started:
            if name in self.receivers:
                self.receivers[name].started(began)
        for event in events:
            receiver = self.receivers.get(event.request_id)
            if event.finish_reason:
                self.receivers.pop(event.request_id, None)
            if receiver is not None:
                receiver.take(event, ended)
