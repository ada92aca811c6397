"""The routes: OpenAI's endpoints over an engine thread.

Since rung 9: the engine is the same; it has an address now. A client that goes away takes its requests with it,
whatever they are at: `unless_gone` runs every answer beside a watch on the connection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.security import HTTPBearer
from starlette.types import Receive, Scope, Send

from liteinfer.server import errors
from liteinfer.server.answers import Answer, ChatAnswer, TextAnswer, stream, whole
from liteinfer.server.generation import Generation
from liteinfer.server.limits import Limits, check
from liteinfer.server.live import live_routes
from liteinfer.server.protocol import Ask, ChatAsk, CompletionAsk
from liteinfer.server.responses import ChatCompletion, ErrorBody, Health, ModelCard, ModelList, TextCompletion
from liteinfer.server.service import Service

T = TypeVar("T")
ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "a field is unknown, unsupported or out of range; `param` names it"},
    401: {"description": "the API key is missing or wrong"},
    404: {"description": "there is no such model"},
    413: {"description": "the body is too long"},
    429: {"description": "the queue is full; Retry-After says when to try again"},
    500: {"description": "the engine failed"},
    503: {"description": "the server is going down, or its engine is broken"},
}


class EventStream(StreamingResponse):
    """Server-sent events, ended and closed as soon as the client hangs up."""

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream",
                         headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self.stream_response(send))
        finally:
            self._close()


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` returns; None if the client hangs up before, and then the work is cancelled."""
    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def answered(request: Request, ask: Ask, answer: Answer, generation: Generation) -> Response:
    """The generation as the client asked for it. It is over when this, or the stream it returns, is."""
    if ask.stream:
        return EventStream(stream(answer, generation, ask.include_usage), generation.close)
    try:
        body = await unless_gone(request.receive, whole(answer, generation))
    finally:
        generation.close()
    return Response(body and body.model_dump_json(), media_type="application/json")   # to nobody, if there is none


def build_app(service: Service, *, api_key: str | None = None, max_body_bytes: int = 2**21,
              live: bool = True) -> FastAPI:
    """The application. Its lifespan starts the engine thread and ends it.

    Args:
        service: the model and its engine.
        api_key, max_body_bytes: see Limits.
        live: offer the engine's state at /live/state.

    Raises:
        ValueError: an empty api_key, or max_body_bytes below 1.
    """
    check(api_key, max_body_bytes)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        yield
        service.close()

    documented = {status: {"model": ErrorBody} | what for status, what in ERRORS.items()}
    app = FastAPI(title="liteinfer", description="An OpenAI-compatible server.", version="1", lifespan=lifespan,
                  docs_url=None, redoc_url=None,        # they load scripts from elsewhere
                  dependencies=[Depends(HTTPBearer(auto_error=False))] if api_key else [])
    app.add_middleware(Limits, api_key=api_key, max_body_bytes=max_body_bytes)
    errors.install(app)
    card = ModelCard(id=service.model_name, object="model", created=int(time.time()), owned_by="liteinfer",
                     max_model_len=service.context)

    @app.post("/v1/chat/completions", responses=documented | _answers(ChatCompletion))
    async def chat_completions(ask: ChatAsk, request: Request) -> Response:
        """Answer a conversation."""
        generation = await service.chat(ask)
        return await answered(request, ask, ChatAnswer(service.model_name, service.token_text), generation)

    @app.post("/v1/completions", responses=documented | _answers(TextCompletion))
    async def completions(ask: CompletionAsk, request: Request) -> Response:
        """Continue one or several prompts."""
        generation = await service.complete(ask)
        return await answered(request, ask, TextAnswer(service.model_name, service.token_text), generation)

    @app.get("/v1/models", responses={401: documented[401]})
    async def models() -> ModelList:
        """The one model there is."""
        return ModelList(object="list", data=[card])

    @app.get("/v1/models/{name:path}", responses={401: documented[401], 404: documented[404]})
    async def model(name: str) -> ModelCard:
        """The same by its name, which may have slashes."""
        service.know(name)
        return card

    @app.get("/health", response_model=Health, responses={503: {"model": Health}})
    async def health(response: Response) -> Health:
        """200 only while requests are taken."""
        why_not = service.engine.why_not
        response.status_code = 503 if why_not else 200
        return Health(status="unavailable" if why_not else "ok", reason=why_not, engine=service.row,
                      model=service.model_name, in_flight=len(service.engine.receivers),
                      capacity=service.engine.capacity)

    @app.get("/metrics", response_class=Response,
             responses={200: {"content": {"text/plain": {}}}, 401: documented[401]})
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    if live:
        app.include_router(live_routes(service))
    _without_422(app)
    return app


def _answers(kind: type) -> dict[int | str, dict[str, Any]]:
    return {200: {"model": kind, "content": {"text/event-stream": {"schema": {"type": "string"}}}}}


def _without_422(app: FastAPI) -> None:
    """FastAPI documents a 422 wherever there is a body; here that is a 400."""
    schema = app.openapi()
    for path in schema["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    for unused in ("HTTPValidationError", "ValidationError"):
        schema["components"]["schemas"].pop(unused, None)
