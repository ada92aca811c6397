"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}, whatever went wrong and where."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from liteinfer.server.async_engine import QueueFull, Unavailable
from liteinfer.server.generation import GenerationFailed
from liteinfer.server.responses import ErrorBody, ErrorDetail

RETRY_AFTER = {"retry-after": "1"}   # seconds


class ApiError(Exception):
    """An answer that is an error. `param` is the field of the body that is at fault, if one is."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None,
                 headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, dict(headers or {})

    @property
    def kind(self) -> str:
        """OpenAI's `type`."""
        if self.status >= 500:
            return "server_error"
        return {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, "invalid_request_error")


def error_of(error: Exception) -> ApiError:
    """What a client is told of an exception that the engine's side raised."""
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="queue_full", headers=RETRY_AFTER)
    if isinstance(error, Unavailable) or (isinstance(error, GenerationFailed) and error.finish_reason == "abort"):
        return ApiError(503, str(error), code="unavailable", headers=RETRY_AFTER)
    if isinstance(error, GenerationFailed):
        return ApiError(500, str(error), code="generation_failed")
    return ApiError(500, f"an error of the server itself ({type(error).__name__}); its log says more")


def error_body(error: ApiError) -> ErrorBody:
    """The JSON of an error."""
    return ErrorBody(error=ErrorDetail(message=str(error), type=error.kind, param=error.param, code=error.code))


def error_response(error: ApiError) -> Response:
    """The error as an HTTP answer, in ASCII: what it quotes of a body need not be valid Unicode."""
    return Response(json.dumps(error_body(error).model_dump()), error.status, error.headers, "application/json")


def invalid(errors: Any) -> ApiError:
    """Pydantic's findings as one error, about the field that comes first.

    A field of several possible types has a finding for each of them: they become one message.
    """
    field = next((str(place) for place in errors[0]["loc"][1:2]), None)
    if errors[0]["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {errors[0]['ctx']['error']}")
    found = [error for error in errors if field is None or error["loc"][1:2] == errors[0]["loc"][1:2]]
    if field is None:
        return ApiError(400, f"the body must be a JSON object, of content-type application/json: {found[0]['msg']}")
    where = {".".join(str(place) for place in error["loc"][1:]) for error in found}
    name = where.pop() if len(where) == 1 else field
    unknown = found[0]["type"] == "extra_forbidden"
    said = ["unknown, or not supported here"] if unknown else dict.fromkeys(error["msg"] for error in found)
    return ApiError(400, f"{name}: {'; or '.join(said)}", field)


def install(app: FastAPI) -> None:
    """Make every error of the app one of ours."""
    async def api(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error_response(error)

    async def http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_response(ApiError(error.status_code, str(error.detail), headers=error.headers))

    async def validation(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(invalid(error.errors()))

    async def engine(_: Request, error: Exception) -> Response:
        return error_response(error_of(error))

    app.add_exception_handler(ApiError, api)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, validation)
    for kind in (QueueFull, Unavailable, GenerationFailed, Exception):
        app.add_exception_handler(kind, engine)
