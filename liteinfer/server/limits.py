"""Before any route: is the key right, and is the body small enough?"""

from __future__ import annotations

import hmac

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from liteinfer.server.errors import ApiError, error_response

OPEN = ("/health", "/openapi.json", "/")   # say nothing of anybody's requests, so they need no key


def check(api_key: str | None, max_body_bytes: int) -> None:
    """Raises ValueError for limits that no client could keep: Starlette makes its middleware only when it starts."""
    if api_key == "":
        raise ValueError("api_key is empty: leave it out to ask for none")
    if max_body_bytes < 1:
        raise ValueError(f"max_body_bytes must be at least 1, got {max_body_bytes}")


class Limits:
    """ASGI middleware.

    Args:
        app: what it stands before.
        api_key: what clients must send as "Authorization: Bearer ..."; None asks for nothing.
        max_body_bytes: the most bytes of a body; a longer one is answered 413.
    """

    def __init__(self, app: ASGIApp, api_key: str | None, max_body_bytes: int) -> None:
        self.app, self.max_body_bytes = app, max_body_bytes
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = Headers(scope=scope)
        if self._key is not None and scope["path"] not in OPEN and not self._knows(headers.get("authorization", "")):
            refused = ApiError(401, "the API key is missing or wrong: send it as Authorization: Bearer KEY",
                               code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        elif (length := headers.get("content-length", "0")).isdecimal() and int(length) > self.max_body_bytes:
            refused = ApiError(413, self._too_long(f"{int(length):,}"))
        else:
            return await self.app(scope, self._counted(receive), send)
        await error_response(refused)(scope, receive, send)

    def _knows(self, authorization: str) -> bool:
        scheme, _, key = authorization.partition(" ")
        assert self._key is not None
        # In a time that does not depend on how much of the key is right.
        return hmac.compare_digest(key.strip().encode(), self._key) and scheme.lower() == "bearer"

    def _counted(self, receive: Receive) -> Receive:
        """A body that comes in chunks has no length in its head."""
        so_far = 0

        async def counted() -> Message:
            nonlocal so_far
            message = await receive()
            so_far += len(message.get("body", b""))
            if so_far > self.max_body_bytes:
                raise HTTPException(413, self._too_long(f"at least {so_far:,}"))
            return message

        return counted

    def _too_long(self, size: str) -> str:
        return f"the body has {size} bytes, and max_body_bytes is {self.max_body_bytes:,}"
