"""Requests that this server cannot serve, which another server answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from starlette.types import Message, Receive, Scope, Send

from ferrule.server.errors import BAD_REQUEST, TOO_LONG
from ferrule.server.fallback import SENT_ON, Fallback
from ferrule.server.middleware.base import Middleware, header, route_path
from ferrule.server.request_record import current_record
from ferrule.server.settings import ERROR, LENGTH, MODEL, QUEUE, ServerSettings

GENERATIONS = frozenset({"/chat/completions", "/completions", "/responses"})
PATHS = GENERATIONS | {"/embeddings"}
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
        if fallback is None or scope["method"] != "POST" or path not in PATHS or header(scope, SENT_ON) is not None:
            await self.app(scope, receive, send)
            return
        attempt = _Attempt(fallback, self.settings, receive, send)
        seconds = self.settings.fallback_after if path in GENERATIONS else None
        await attempt.run(self.app(scope, attempt.receive, attempt.send), seconds)
        if attempt.reason is None:
            return
        body = fallback.request_body(await attempt.whole_body())
        if body is None:
            await attempt.send_refusal()
            return
        record = current_record.get()
        if record is not None:
            record.fallback, record.error = attempt.reason, None
        self.server.counters.count_fallback(attempt.reason)
        await fallback.answer(path, body, receive, send)


class _Attempt:
    """A request on this server, whose body and whose error are kept."""

    def __init__(self, fallback: Fallback, settings: ServerSettings, receive: Receive, send: Send) -> None:
        self.reason: str | None = None
        """Reason for which the fallback may answer the request; None where this server has answered it."""
        self._fallback = fallback
        self._settings = settings
        self._receive = receive
        self._send = send
        self._body = bytearray()
        self._is_whole = False
        self._begun = False
        self._refusal: list[Message] = []
        """Error response of this server, which the client has not received."""

    async def run(self, work: Awaitable[None], seconds: float | None) -> None:
        """Runs the request; ends it where it has no first token after `seconds`."""
        task = asyncio.ensure_future(work)
        try:
            if seconds is not None:
                await asyncio.wait([task], timeout=seconds)
                if not task.done() and self._may_end():
                    self.reason = QUEUE
                    return
            await task
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def receive(self) -> Message:
        """Receives a message of the client and keeps its part of the body."""
        message = await self._receive()
        if message["type"] == "http.request" and not self._is_whole:
            self._body += message.get("body", b"")
            self._is_whole = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        """Sends a message to the client, or keeps it if it is of an error for which there is the fallback."""
        if not self._begun and not self._refusal and message["type"] == "http.response.start":
            record = current_record.get()
            reason = REASONS.get((record.error if record is not None else None) or "")
            if message["status"] >= BAD_REQUEST and reason in self._settings.fallback_when:
                self.reason = reason
        if self.reason is not None:
            self._refusal.append(message)
            return
        self._begun = True
        await self._send(message)

    async def whole_body(self) -> bytes:
        """Returns the body, after receiving the rest of it."""
        while not self._is_whole and (await self.receive())["type"] != "http.disconnect":
            pass
        return bytes(self._body)

    async def send_refusal(self) -> None:
        """Sends the error response to the client."""
        for message in self._refusal:
            await self._send(message)

    def _may_end(self) -> bool:
        """Whether the request waits for its first token and may be sent to the fallback."""
        record = current_record.get()
        waits = not self._begun and not (record is not None and record.begun)
        return waits and self._is_whole and self._fallback.request_body(bytes(self._body)) is not None
