"""Limits of the size and the duration of request bodies."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ferrule.server.batches import UPLOAD_PATHS
from ferrule.server.context import Context
from ferrule.server.errors import ApiError
from ferrule.server.middleware.base import Middleware, header, route_path
from ferrule.server.request_body import LARGE_BODY

# Bytes per second that all large bodies together may bring while there are several.
LARGE_BODIES_RATE = 48 << 20


class Bodies(Middleware):
    """Answers 413 as soon as a body is known to be too large, and 408 for a body that takes too long.

    Large bodies that arrive together share LARGE_BODIES_RATE: receiving them takes the time of the event loop, which
    every other request needs.
    """

    def __init__(self, app: ASGIApp, *, server: Context) -> None:
        super().__init__(app, server=server)
        self._large = 0
        self._next_large = 0.0

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
        waited = 0.0
        read = 0
        whole = False
        large = False

        async def read_bounded() -> Message:
            nonlocal waited, read, whole, large
            if whole:
                return await receive()
            # A file has the time for each MiB: it may take long, but not be sent byte by byte.
            seconds = self.settings.body_timeout * (1 + (read >> 20 if upload else 0))
            try:
                async with asyncio.timeout_at(begin + waited + seconds):
                    message = await receive()
            except TimeoutError:
                message = f"request body must be complete within {seconds:g} s, got {read} bytes"
                raise ApiError(408, message, code="body_timeout") from None
            size = len(message.get("body", b""))
            read += size
            whole = not message.get("more_body", False)
            if read > self.settings.max_body_bytes and not upload:
                raise self._too_large("got more")
            if read >= LARGE_BODY:
                self._large += not large
                large = True
                waited += await self._wait_for_rate(size)
                if whole:  # what follows, such as generation, receives nothing
                    self._large -= 1
                    large = False
            return message

        try:
            await self.app(scope, read_bounded, send)
        finally:
            self._large -= large

    async def _wait_for_rate(self, size: int) -> float:
        """Waits until the rate of large bodies allows `size` bytes more, if there are several; returns the seconds."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._large == 1:  # alone: no limit, and nothing that later bodies would have to wait for
            self._next_large = now
            return 0
        begin = max(now, self._next_large)
        self._next_large = begin + size / LARGE_BODIES_RATE
        await asyncio.sleep(begin - now)
        return loop.time() - now

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
