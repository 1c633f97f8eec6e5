"""Server-sent events: what a stream's response is made of."""

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
LAST_WORDS = 5.0
"""Seconds beyond a request's time in which its client may read that it is over."""


def event(body: BaseModel, exclude: set[str] | None = None) -> bytes:
    """A body as an event without a name, as OpenAI's API has them."""
    return b"data: " + body.model_dump_json(exclude=exclude).encode() + b"\n\n"


def named_event(name: str, body: object) -> bytes:
    """A body as an event with a name."""
    return f"event: {name}\n".encode() + b"data: " + encoded(body) + b"\n\n"


def line(body: object) -> bytes:
    """A body as a line of JSON."""
    return encoded(body) + b"\n"


def error_event(error: ApiError) -> bytes:
    """An error within a stream."""
    return b"data: " + json.dumps(error.body()).encode() + b"\n\n"


def _note(code: str) -> None:
    record = current_record.get()
    if record is not None:
        record.error = code


class EventStream(Response):
    """A response that is written as its events come.

    `begin` waits for the first event, so that what goes wrong before it has its own status. What goes wrong later is an
    event, and the last one. A client that reads slowly is waited for: nothing is gathered for it.

    An API that has its own way to say that something went wrong gives `fail`, and one that has its own way to say
    nothing gives `comment`.
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
        """Waits for the first event, but no longer than proxies would.

        Raises what came instead.
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
            # Its client reads nothing: there is no way to say so.
            _note("deadline_exceeded")
            return
        finally:
            if comments is not None:
                comments.cancel()
            await self._close()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write_in_time(self, send: Send) -> None:
        record = current_record.get()
        left = None if record is None else record.remaining
        async with asyncio.timeout(None if left is None else left + LAST_WORDS):
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
        _note(error.code)
        await self._send(send, self._error_event(error))

    async def _send(self, send: Send, body: bytes) -> None:
        self._sent = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": body, "more_body": True})

    async def _comment(self, send: Send) -> None:
        """Comments in long silences, which readers skip and proxies count as life."""
        while True:
            quiet = asyncio.get_running_loop().time() - self._sent
            if quiet >= self._keep_alive:
                await self._send(send, self._comment_bytes)
            await asyncio.sleep(max(self._keep_alive - quiet, 0.1))

    async def _close(self) -> None:
        if self._first is not None:
            self._first.cancel()
            await asyncio.wait([self._first])
            # What came instead of an event nobody waits for any more; asyncio would log it with all that it says.
            if not self._first.cancelled():
                self._first.exception()
        await self._events.aclose()


class LineStream(EventStream):
    """The same, of lines of JSON."""

    media_type = "application/x-ndjson"
