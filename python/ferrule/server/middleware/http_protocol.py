"""HTTP/1.1 as bytes: headers that are too large, or too slow, or none at all; clients too many, or not reading.

What uvicorn leaves open: it answers any of these with 400 and in plain text, waits for headers without end, and goes on
to read a body that nobody wants any more.
"""

from __future__ import annotations

import asyncio
import json
import re
import resource
import sys
from collections.abc import Set
from typing import cast
from urllib.parse import unquote_to_bytes

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol, RequestResponseCycle

from ferrule.server.apis import api_of
from ferrule.server.errors import ApiError

HEADER_TIMEOUT = 10.0
"""Seconds until a request's headers must be there."""
STALL_TIMEOUT = 30.0
"""Seconds in which a client must read something of an answer that waits for it."""
SPARE_FILES = 128
"""File descriptors that connections leave to everything else."""
LINGER = 5.0
"""Seconds in which a client may finish sending what was refused, so that it gets to read why."""
_PATH = re.compile(rb"\S+ ([^ ?\r\n]*)")
"""Of a request's first line."""


def raise_file_limit() -> None:
    """Takes as many file descriptors as the system gives: each connection is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def most_connections() -> int:
    """So many that other files can be opened."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(soft - SPARE_FILES, soft // 2)


class LimitedH11Protocol(H11Protocol):
    """uvicorn's protocol, with limits."""

    _headers_due: asyncio.TimerHandle | None = None
    _linger: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client; where there are too many, one of those that ask for nothing makes room."""
        if len(self.connections) >= most_connections():
            known = cast("Set[LimitedH11Protocol]", self.connections)
            idle = next((each for each in known if each.idle), None)
            (transport if idle is None else idle.transport).abort()
            if idle is not None:
                # It is told in the loop's next turn; who comes until then must find another.
                self.connections.discard(idle)
        super().connection_made(transport)
        self._watch_headers()

    def data_received(self, data: bytes) -> None:
        """Bytes of it."""
        super().data_received(data)
        self._watch_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        for timer in (self._headers_due, self._linger, self._stalled):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    @property
    def idle(self) -> bool:
        """Whether no request of it is there: its first is awaited, or its next."""
        keep_alive: asyncio.TimerHandle | None = self.timeout_keep_alive_task
        return self._headers_due is not None or keep_alive is not None

    def pause_writing(self) -> None:
        """The client does not read as fast as it is written to."""
        super().pause_writing()
        self._watch_reading(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """It has read enough."""
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def on_response_complete(self) -> None:
        """An answer is whole, maybe before its request."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            self._linger = self.loop.call_later(LINGER, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """Answers what is no HTTP, by what h11 says of it."""
        found = sys.exception()
        hint = found.error_status_hint if isinstance(found, h11.RemoteProtocolError) else 400
        if hint == 431:
            limit = self.config.h11_max_incomplete_event_size
            self._refuse(
                ApiError(
                    431,
                    f"the headers have more bytes than the limit, max_header_bytes, {limit}",
                    code="headers_too_large",
                )
            )
        else:
            self._refuse(ApiError(400, "the request is not HTTP/1.1", code="invalid_http"))

    def _watch_headers(self) -> None:
        """From the first byte of a request, or of a connection, to the last of its headers."""
        reading = self.conn.their_state is h11.IDLE
        if self._linger is not None and self.conn.their_state is not h11.SEND_BODY:
            self._linger.cancel()
            self._linger = None
        if reading and self._headers_due is None:
            self._headers_due = self.loop.call_later(HEADER_TIMEOUT, self._headers_overdue)
        elif not reading and self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None

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
            self._refuse(ApiError(408, f"the headers took more than {HEADER_TIMEOUT:g} s", code="header_timeout"))
        else:  # nothing came at all
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        cycle = cast("RequestResponseCycle | None", self.cycle)  # None before the first request
        if cycle is not None and not cycle.response_complete:
            # The request whose body is no HTTP is being answered already.
            cycle.disconnected = True
            cycle.message_event.set()
            self.transport.abort()
            return
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        # Where the first line is not there, or was no HTTP, it is nobody's, and OpenAI's form as good as any.
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
