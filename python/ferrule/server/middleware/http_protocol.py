"""uvicorn's HTTP/1.1 protocol with limits: of headers, connections, and clients that do not read.

uvicorn itself answers oversized and invalid headers with 400 in plain text, waits for headers without a timeout,
continues to read bodies of requests that were rejected, and answers no client that closes only its sending side.
"""

from __future__ import annotations

import asyncio
import json
import re
import resource
import socket
import sys
from collections.abc import Set
from typing import cast
from urllib.parse import unquote_to_bytes

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol, RequestResponseCycle

from ferrule.server.apis import api_of
from ferrule.server.errors import ApiError

HEADER_TIMEOUT = 10.0
"""Seconds to receive the headers of a request."""
STALL_TIMEOUT = 30.0
"""Seconds without progress after which a connection whose client does not read is closed."""
SPARE_FILES = 128
"""File descriptors that are reserved for everything but connections."""
LINGER = 5.0
"""Seconds in which a client may finish sending a rejected request, so that it reads the error."""
PROBE_INTERVAL = 0.05
"""Seconds between two looks at a connection whose client sends no more."""
_PATH = re.compile(rb"\S+ ([^ ?\r\n]*)")
"""Matches the path in a request line."""


def raise_file_limit() -> None:
    """Raises the limit of open files to the maximum of the system: each connection is a file."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def max_connections() -> int:
    """Returns the maximum number of connections, which leaves `SPARE_FILES` descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(soft - SPARE_FILES, soft // 2)


class LimitedH11Protocol(H11Protocol):
    """uvicorn's h11 protocol with limits."""

    _headers_due: asyncio.TimerHandle | None = None
    _linger: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    _half_closed: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accepts a connection; at the limit, an idle connection is closed, or this one."""
        if len(self.connections) >= max_connections():
            known = cast("Set[LimitedH11Protocol]", self.connections)
            idle = next((each for each in known if each.idle), None)
            (transport if idle is None else idle.transport).abort()
            if idle is not None:
                # Its own callback runs in the next iteration of the event loop; until then others must not choose it.
                self.connections.discard(idle)
        super().connection_made(transport)
        self._watch_headers()

    def data_received(self, data: bytes) -> None:
        """Receives bytes."""
        super().data_received(data)
        self._watch_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels all timers."""
        for timer in (self._headers_due, self._linger, self._stalled, self._half_closed):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keeps the connection open for the response if the client closed only its sending side after a request.

        A client that closed both sides looks the same until something is sent: its system then answers with a reset.
        An interim response, which clients skip, brings that about before the first byte of the response.
        """
        cycle = cast("RequestResponseCycle | None", self.cycle)  # None before the first request
        if self.scheme == "https":  # the end of TLS ends both sides
            return False
        if cycle is None or cycle.response_complete or cycle.more_body or self.conn.their_http_version == b"1.0":
            return False
        cycle.keep_alive = False
        if not cycle.response_started:
            interim = h11.InformationalResponse(status_code=100, headers=[], reason=STATUS_PHRASES[100])
            self.transport.write(self.conn.send(interim) or b"")
        self._watch_half_closed()
        return True

    @property
    def idle(self) -> bool:
        """Whether the connection waits for a request."""
        keep_alive: asyncio.TimerHandle | None = self.timeout_keep_alive_task
        return self._headers_due is not None or keep_alive is not None

    def pause_writing(self) -> None:
        """Starts to watch a client that reads more slowly than the server writes."""
        super().pause_writing()
        self._watch_reading(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """Stops watching the client."""
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def on_response_complete(self) -> None:
        """Limits the time for the rest of a request that was answered before its end."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            self._linger = self.loop.call_later(LINGER, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """Answers invalid HTTP with the status that h11 suggests."""
        found = sys.exception()
        hint = found.error_status_hint if isinstance(found, h11.RemoteProtocolError) else 400
        if hint == 431:
            limit = self.config.h11_max_incomplete_event_size
            self._refuse(
                ApiError(
                    431,
                    f"headers must have at most {limit} bytes (max_header_bytes), got more",
                    code="headers_too_large",
                )
            )
        else:
            self._refuse(ApiError(400, "the request is not HTTP/1.1", code="invalid_http"))

    def _watch_headers(self) -> None:
        """Starts and stops the timer of the headers."""
        reading = self.conn.their_state is h11.IDLE
        if self._linger is not None and self.conn.their_state is not h11.SEND_BODY:
            self._linger.cancel()
            self._linger = None
        if reading and self._headers_due is None:
            self._headers_due = self.loop.call_later(HEADER_TIMEOUT, self._headers_overdue)
        elif not reading and self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None

    def _watch_half_closed(self) -> None:
        """Aborts the connection once the system has received a reset, which the event loop no longer reads."""
        connection: socket.socket = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self._half_closed = self.loop.call_later(PROBE_INTERVAL, self._watch_half_closed)

    def _watch_reading(self, waiting: int) -> None:
        self._stalled = self.loop.call_later(STALL_TIMEOUT, self._check_reading, waiting)

    def _check_reading(self, before: int) -> None:
        waiting = self.transport.get_write_buffer_size()
        if waiting < before:
            self._watch_reading(waiting)
        else:
            self.transport.abort()

    def _headers_overdue(self) -> None:
        if self.conn.trailing_data[0]:
            message = f"headers must be complete within {HEADER_TIMEOUT:g} s"
            self._refuse(ApiError(408, message, code="header_timeout"))
        else:  # no byte was received
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        cycle = cast("RequestResponseCycle | None", self.cycle)  # None before the first request
        if cycle is not None and not cycle.response_complete:
            # A response to the request with this invalid body has begun.
            cycle.disconnected = True
            cycle.message_event.set()
            self.transport.abort()
            return
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        # Without a valid request line the API is not known, and the error has OpenAI's form.
        line = _PATH.match(self.conn.trailing_data[0])
        path = "" if line is None else unquote_to_bytes(line[1]).decode(errors="replace")
        body = json.dumps(api_of(path).error_body(error)).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        response = h11.Response(
            status_code=error.status_code, headers=headers, reason=STATUS_PHRASES[error.status_code]
        )
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
