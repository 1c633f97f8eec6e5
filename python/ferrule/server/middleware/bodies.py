"""How large a body may be, and how long it may take."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Receive, Scope, Send

from ferrule._validation import shown
from ferrule.server.errors import ApiError
from ferrule.server.middleware.base import Middleware, header


class Bodies(Middleware):
    """413 as soon as it is known that a body is too large, and 408 when its time is over: neither is kept."""

    def check(self, scope: Scope) -> None:
        """Raises ApiError for a body that says itself that it is too large."""
        length = header(scope, "content-length")
        if length is not None and length.isdecimal() and _number(length) > self.settings.max_body_bytes:
            raise self._too_large(f"the body has {shown(_number(length))} bytes")

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes it on with a body that raises ApiError."""
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
                raise ApiError(
                    408, f"{read} bytes of the body came in {limit:g} s; all of it must", code="body_timeout"
                ) from None
            read += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if read > self.settings.max_body_bytes:
                raise self._too_large(f"the body has more than {self.settings.max_body_bytes} bytes")
            return message

        await self.app(scope, read_bounded, send)

    def _too_large(self, found: str) -> ApiError:
        limit = self.settings.max_body_bytes
        return ApiError(413, f"{found}; the limit is max_body_bytes, {limit}", code="body_too_large")


def _number(digits: str) -> int:
    return int(digits) if len(digits) <= 20 else 1 << 64
