"""Requests that this server cannot serve, which another server answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection

from starlette.types import Message, Receive, Scope, Send

from ferrule.server.error_responses import error_response
from ferrule.server.errors import BAD_REQUEST, TOO_LONG, ApiError
from ferrule.server.fallback import SENT_ON, Fallback
from ferrule.server.middleware.base import Middleware, header, route_path
from ferrule.server.request_record import current_record
from ferrule.server.settings import ERROR, LENGTH, MODEL, QUEUE

RESPONSES, EMBEDDINGS = "/responses", "/embeddings"
PATHS = frozenset({"/chat/completions", "/completions", RESPONSES, EMBEDDINGS})
"""Paths of OpenAI's API that the fallback answers, below /v1 or without it."""
REASONS = {
    "queue_full": QUEUE,
    TOO_LONG: LENGTH,
    "model_not_found": MODEL,
    "engine_unavailable": ERROR,
    "insufficient_memory": ERROR,
    "loading": ERROR,
    "model_load_failed": ERROR,
}
"""Reason by the code of the error with which this server would answer."""


class Fallbacks(Middleware):
    """Sends a request to the fallback instead of answering an error, or where its first token takes too long.

    That is possible until the response has begun. The body of the request is kept until then.
    """

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, and to the fallback where that fails."""
        fallback, path = self.server.fallback, route_path(scope).removeprefix("/v1")
        reasons = self._reasons(path) if scope["method"] == "POST" and header(scope, SENT_ON) is None else ()
        if fallback is None or not reasons:
            await self.app(scope, receive, send)
            return
        attempt = _Attempt(fallback, reasons, receive, send)
        seconds = self.settings.fallback_after if QUEUE in reasons else None
        await attempt.run(self.app(scope, attempt.receive, attempt.send), seconds)
        if attempt.reason is None:
            return
        body = fallback.request_body(await attempt.whole_body())
        if body is None:
            await attempt.send_refusal()
            return
        record = current_record.get()
        refusal = None if record is None else record.error
        if record is not None:
            record.fallback, record.error = attempt.reason, None
        reason, counters = attempt.reason, self.server.counters

        async def count_and_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                counters.count_fallback(reason, answered=True)
            await send(message)

        try:
            await fallback.answer(path, body, receive, count_and_send)
        except ApiError as error:
            counters.count_fallback(reason, answered=False)
            if record is not None:
                record.fallback = None
            if not attempt.has_refusal:
                await error_response(error)(scope, receive, send)
                return
            if record is not None:
                record.error = refusal
            await attempt.send_refusal()

    def _reasons(self, path: str) -> Collection[str]:
        """Returns the reasons for which the fallback may answer requests of a path."""
        if path not in PATHS or (path == RESPONSES and self.settings.responses_db is not None):
            return ()  # a response of the fallback would not be stored here
        if path == EMBEDDINGS:  # vectors of another model than that of the index must not be mixed with it
            return {MODEL}.intersection(self.settings.fallback_when)
        return self.settings.fallback_when


class _Attempt:
    """A request on this server, whose body and whose error are kept."""

    def __init__(self, fallback: Fallback, reasons: Collection[str], receive: Receive, send: Send) -> None:
        self.reason: str | None = None
        """Reason for which the fallback may answer the request; None where this server has answered it."""
        self._fallback = fallback
        self._reasons = reasons
        self._receive = receive
        self._send = send
        self._body = bytearray()
        self._whole = asyncio.Event()
        """Set when the whole body has been received."""
        self._begun = False
        self._refusal: list[Message] = []
        """Error response of this server, kept back from the client."""

    async def run(self, work: Awaitable[None], seconds: float | None) -> None:
        """Runs the request; ends it where it has no first token `seconds` after its body."""
        task, whole = asyncio.ensure_future(work), asyncio.create_task(self._whole.wait())
        try:
            if seconds is not None:
                await asyncio.wait([task, whole], return_when=asyncio.FIRST_COMPLETED)
                await asyncio.wait([task], timeout=seconds)
                if not task.done() and self._may_end():
                    self.reason = QUEUE
                    return
            await task
        finally:
            whole.cancel()
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def receive(self) -> Message:
        """Receives a message of the client and keeps its part of the body."""
        message = await self._receive()
        if message["type"] == "http.request" and not self._whole.is_set():
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                self._whole.set()
        return message

    async def send(self, message: Message) -> None:
        """Sends a message to the client, or keeps it if it is of an error for which there is the fallback."""
        if not self._begun and not self._refusal and message["type"] == "http.response.start":
            record = current_record.get()
            reason = REASONS.get((record.error if record is not None else None) or "")
            if message["status"] >= BAD_REQUEST and reason in self._reasons:
                self.reason = reason
        if self.reason is not None:
            self._refusal.append(message)
            return
        self._begun = True
        await self._send(message)

    async def whole_body(self) -> bytes:
        """Returns the body, after receiving the rest of it."""
        while not self._whole.is_set() and (await self.receive())["type"] != "http.disconnect":
            pass
        return bytes(self._body)

    @property
    def has_refusal(self) -> bool:
        """Whether this server has refused the request; False where it has taken too long."""
        return bool(self._refusal)

    async def send_refusal(self) -> None:
        """Sends the error response to the client."""
        for message in self._refusal:
            await self._send(message)

    def _may_end(self) -> bool:
        """Whether the request waits for its first token and may be sent to the fallback."""
        record = current_record.get()
        waits = not self._begun and not (record is not None and record.begun)
        return waits and self._whole.is_set() and self._fallback.request_body(bytes(self._body)) is not None
