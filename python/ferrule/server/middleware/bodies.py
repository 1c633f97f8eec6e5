"""Limits of the size and the duration of request bodies."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Receive, Scope, Send

from ferrule.server.batches import UPLOAD_PATHS
from ferrule.server.errors import ApiError
from ferrule.server.middleware.base import Middleware, header, route_path


class Bodies(Middleware):
    """Answers 413 as soon as a body is known to be too large, and 408 for a body that takes too long."""

    def check(self, scope: Scope) -> None:
        """Raises ApiError for a Content-Length above the limit."""
        length = header(scope, "content-length")
        if length is None or not length.isdecimal() or self._is_upload(scope):
            return
        if _number(length) > self.settings.max_body_bytes:
            raise self._too_large(f"got {_number(length)}")

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on; receiving its body raises ApiError at a limit."""
        loop = asyncio.get_running_loop()
        upload = self._is_upload(scope)
        begin = loop.time()
        read = 0
        whole = False

        async def read_bounded() -> Message:
            nonlocal read, whole
            if whole:
                return await receive()
            # A file has the time for each MiB: it may take long, but not be sent byte by byte.
            seconds = self.settings.body_timeout * (1 + (read >> 20 if upload else 0))
            try:
                async with asyncio.timeout_at(begin + seconds):
                    message = await receive()
            except TimeoutError:
                message = f"request body must be complete within {seconds:g} s, got {read} bytes"
                raise ApiError(408, message, code="body_timeout") from None
            read += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if read > self.settings.max_body_bytes and not upload:
                raise self._too_large("got more")
            return message

        await self.app(scope, read_bounded, send)

    def _is_upload(self, scope: Scope) -> bool:
        """Returns whether the body is a file, whose route limits its size."""
        enabled = self.settings.files_dir is not None and scope["method"] == "POST"
        return enabled and route_path(scope) in UPLOAD_PATHS

    def _too_large(self, found: str) -> ApiError:
        limit = self.settings.max_body_bytes
        message = f"request body must have at most {limit} bytes (max_body_bytes), {found}"
        return ApiError(413, message, code="body_too_large")


def _number(digits: str) -> int:
    return int(digits) if len(digits) <= 20 else 1 << 64
