"""`Fallback`: another server with OpenAI's API, which answers requests that this one cannot serve.

A request is sent there once, as the client has sent it, except for the fields that only this server reads. Its response
is passed through piece by piece. Servers may name each other: a request that comes from a fallback has a header, and is
not sent on.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import TYPE_CHECKING, Any, cast

from starlette.types import Message, Receive, Send

from ferrule.server.errors import UNAVAILABLE, ApiError
from ferrule.server.request_record import current_record
from ferrule.server.settings import ServerSettings

if TYPE_CHECKING:
    import httpx

LOGGER = logging.getLogger("ferrule.server")
SERVED_BY = b"x-ferrule-served-by"
"""Header of a response from the fallback, with the value `fallback`."""
SENT_ON = "x-ferrule-fallback"
"""Header of a request to the fallback."""
ALLOW = "allow_fallback"
"""Field of a request; false keeps it on this server."""
STORED = ("previous_response_id", "background")
"""Fields of a request that needs the store of this server."""
PASSED_HEADERS = frozenset({b"content-type", b"cache-control", b"retry-after", b"retry-after-ms", b"x-should-retry"})
"""Headers of a response that reach the client."""
CONNECT_TIMEOUT, READ_TIMEOUT = 10.0, 600.0
"""Seconds to connect, and between two pieces of a response."""
MAX_CONNECTIONS = 1024
"""Maximum number of requests at once."""
EVENT_STREAM = "text/event-stream"


class Fallback:
    """Client of the fallback server."""

    def __init__(self, settings: ServerSettings) -> None:
        """Creates the client, which connects at the first request but reads the certificates of authorities now."""
        import httpx

        self._url = (settings.fallback_url or "").rstrip("/")
        self._model = settings.fallback_model
        headers = {SENT_ON: "1", "Content-Type": "application/json", "Accept-Encoding": "identity"}
        if settings.fallback_key is not None:
            headers["Authorization"] = f"Bearer {settings.fallback_key}"
        timeout = httpx.Timeout(READ_TIMEOUT, connect=CONNECT_TIMEOUT, pool=CONNECT_TIMEOUT)
        limits = httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=20)
        # A cookie of one user's response must not be sent with the request of another.
        cookies = CookieJar(DefaultCookiePolicy(allowed_domains=()))
        self._client = httpx.AsyncClient(timeout=timeout, limits=limits, headers=headers, cookies=cookies)
        self._running: set[asyncio.Task[None]] = set()

    def request_body(self, received: bytes) -> bytes | None:
        """Returns the body to send for a request; None for one that must not be sent."""
        try:
            body: object = json.loads(received)
        except (ValueError, RecursionError):
            return None
        if not isinstance(body, dict):
            return None
        fields = cast("dict[str, Any]", body)
        if fields.pop(ALLOW, None) not in (None, True) or any(fields.get(name) for name in STORED):
            return None
        if self._model is not None:
            fields["model"] = self._model
        return json.dumps(fields).encode()

    async def answer(self, path: str, body: bytes, receive: Receive, send: Send) -> None:
        """Sends a request to the fallback and its response to the client, until the client disconnects.

        `path` is relative to the URL of the API.

        Raises ApiError where the fallback fails before the response has begun.
        """
        relay = asyncio.create_task(self._relay(path, body, send))
        self._running.add(relay)
        relay.add_done_callback(self._running.discard)
        gone = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait([relay, gone], return_when=asyncio.FIRST_COMPLETED)
            if relay.done():
                relay.result()
            else:
                _record_error("client_disconnected")
        finally:
            for task in (relay, gone):
                task.cancel()
            await asyncio.gather(relay, gone, return_exceptions=True)

    async def drain(self, timeout: float) -> None:
        """Waits at most `timeout` seconds for the end of all requests."""
        if self._running:
            await asyncio.wait(self._running, timeout=timeout)

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._client.aclose()

    async def _relay(self, path: str, body: bytes, send: Send) -> None:
        import httpx

        record = current_record.get()
        started: httpx.Response | None = None
        try:
            async with (
                asyncio.timeout(None if record is None else record.remaining),
                self._client.stream("POST", self._url + path, content=body) as response,
            ):
                await send(_start(response.status_code, response.headers.raw))
                started = response
                async for part in response.aiter_bytes():
                    await send({"type": "http.response.body", "body": part, "more_body": True})
        except (httpx.HTTPError, TimeoutError) as error:
            failure = _failure(error)
            if started is None:
                LOGGER.warning("fallback failed", extra={"fields": {"reason": type(error).__name__}})
                raise failure from error
            _record_error(failure.code)
            if not started.headers.get("content-type", "").startswith(EVENT_STREAM):
                raise  # the client receives an incomplete response
            event = b"data: " + json.dumps(failure.body()).encode() + b"\n\n"
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _start(status: int, headers: Sequence[tuple[bytes, bytes]]) -> Message:
    passed = [(name.lower(), value) for name, value in headers if name.lower() in PASSED_HEADERS]
    return {"type": "http.response.start", "status": status, "headers": [*passed, (SERVED_BY, b"fallback")]}


def _failure(error: Exception) -> ApiError:
    if isinstance(error, TimeoutError):
        return ApiError(UNAVAILABLE, "the request exceeded its timeout", code="deadline_exceeded")
    message = f"the fallback server cannot be reached: {type(error).__name__}"
    return ApiError(502, message, code="fallback_unreachable")


async def _disconnect(receive: Receive) -> None:
    """Waits until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _record_error(code: str) -> None:
    record = current_record.get()
    if record is not None:
        record.error = code
