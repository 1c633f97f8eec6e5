"""Limits of the size and the duration of request bodies."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Receive, Scope, Send

from ferrule.server.errors import ApiError
from ferrule.server.middleware.base import Middleware, header


class Bodies(Middleware):
    """Answers 413 as soon as a body is known to be too large, and 408 for a body that takes too long."""

    def check(self, scope: Scope) -> None:
        """Raises ApiError for a Content-Length above the limit."""
        length = header(scope, "content-length")
        if length is not None and length.isdecimal() and _number(length) > self.settings.max_body_bytes:
            raise self._too_large(f"got {_number(length)}")

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on; receiving its body raises ApiError at a limit."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.settings.body_timeout
        read = 0
        whole = False

        async def read_bounded() -> Message:
            nonlocal read, whole
            if whole:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                limit = self.settings.body_timeout
                message = f"request body must be complete within {limit:g} s, got {read} bytes"
                raise ApiError(408, message, code="body_timeout") from None
            read += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if read > self.settings.max_body_bytes:
                raise self._too_large("got more")
            return message

        await self.app(scope, read_bounded, send)

    def _too_large(self, found: str) -> ApiError:
        limit = self.settings.max_body_bytes
        message = f"request body must have at most {limit} bytes (max_body_bytes), {found}"
        return ApiError(413, message, code="body_too_large")


def _number(digits: str) -> int:
    return int(digits) if len(digits) <= 20 else 1 << 64
