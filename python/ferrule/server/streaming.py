"""Streaming responses: server-sent events and lines of JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ferrule.errors import FerruleError
from ferrule.server.ascii_json import encoded
from ferrule.server.error_responses import api_error
from ferrule.server.errors import ApiError
from ferrule.server.request_record import current_record

DONE = b"data: [DONE]\n\n"
COMMENT = b": waiting\n\n"
ERROR_GRACE = 5.0
"""Seconds after a request's deadline in which the error can still be sent."""


def event(body: BaseModel, exclude: set[str] | None = None) -> bytes:
    """Formats a body as an event without a name (OpenAI's form).

    The JSON is ASCII: clients such as httpx split lines at U+0085, U+2028 and U+2029 too.
    """
    return b"data: " + body.model_dump_json(exclude=exclude, ensure_ascii=True).encode() + b"\n\n"


def named_event(name: str, body: object) -> bytes:
    """Formats a body as a named event."""
    return f"event: {name}\n".encode() + b"data: " + encoded(body) + b"\n\n"


def line(body: object) -> bytes:
    """Formats a body as a line of JSON."""
    return encoded(body) + b"\n"


def error_event(error: ApiError) -> bytes:
    """Formats an error as an event (OpenAI's form)."""
    return b"data: " + json.dumps(error.body()).encode() + b"\n\n"


def _record_error(code: str) -> None:
    record = current_record.get()
    if record is not None:
        record.error = code


class EventStream(Response):
    """A response that streams events.

    `begin` waits for the first event, so that an error before it has its own HTTP status; a later error is the last
    event. Events are not buffered for a slow client: the stream waits until it has read them.

    `fail` formats the error event of an API, `comment` is the event that keeps a silent connection alive.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        keep_alive: float,
        fail: Callable[[ApiError], bytes] = error_event,
        *,
        comment: bytes = COMMENT,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._keep_alive = keep_alive
        self._error_event = fail
        self._comment_bytes = comment
        self._first: asyncio.Task[bytes] | None = None

    async def begin(self) -> EventStream:
        """Waits for the first event, at most until a keep-alive comment is due.

        Raises the exception of the generation.
        """
        self._first = asyncio.ensure_future(anext(self._events))
        try:
            await asyncio.wait([self._first], timeout=self._keep_alive or None)
        except asyncio.CancelledError:
            await self._close()
            raise
        if self._first.done():
            self._first.result()
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Writes the events (ASGI)."""
        comments: asyncio.Task[None] | None = None
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            self._sent = asyncio.get_running_loop().time()
            comments = asyncio.create_task(self._comment(send)) if self._keep_alive else None
            await self._write_in_time(send)
        except TimeoutError:
            # The client does not read: no error can be sent.
            _record_error("deadline_exceeded")
            return
        finally:
            if comments is not None:
                comments.cancel()
            await self._close()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write_in_time(self, send: Send) -> None:
        record = current_record.get()
        remaining = None if record is None else record.remaining
        async with asyncio.timeout(None if remaining is None else remaining + ERROR_GRACE):
            await self._write(send)

    async def _write(self, send: Send) -> None:
        try:
            if self._first is not None:
                await self._send(send, await self._first)
            async for each in self._events:
                await self._send(send, each)
        except FerruleError as error:
            await self._fail(send, api_error(error))
        except ApiError as error:
            await self._fail(send, error)

    async def _fail(self, send: Send, error: ApiError) -> None:
        _record_error(error.code)
        await self._send(send, self._error_event(error))

    async def _send(self, send: Send, body: bytes) -> None:
        self._sent = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": body, "more_body": True})

    async def _comment(self, send: Send) -> None:
        """Sends comments while there are no events, so that proxies keep the connection open."""
        while True:
            quiet = asyncio.get_running_loop().time() - self._sent
            if quiet >= self._keep_alive:
                await self._send(send, self._comment_bytes)
            await asyncio.sleep(max(self._keep_alive - quiet, 0.1))

    async def _close(self) -> None:
        if self._first is not None:
            self._first.cancel()
            await asyncio.wait([self._first])
            # Retrieves the exception: asyncio would log it with its text.
            if not self._first.cancelled():
                self._first.exception()
        await self._events.aclose()


class LineStream(EventStream):
    """A response that streams lines of JSON."""

    media_type = "application/x-ndjson"
