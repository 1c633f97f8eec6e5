"""Who comes in: nobody once the server drains, and no more than the engines run and let wait."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ferrule.server.context import Context
from ferrule.server.errors import UNAVAILABLE, ApiError
from ferrule.server.middleware.base import Middleware

MAX_UPLOADS = 256
"""Requests whose bodies may be on their way at once."""


class Admission(Middleware):
    """Refuses by the request's first line and headers alone where it can, before its body is there.

    The engines refuse too, by sequences, of which a request may have several. Here requests are counted: those whose
    bodies are still coming by themselves, so that whoever does not finish one takes no place from whoever has.
    """

    def __init__(self, app: ASGIApp, *, server: Context) -> None:
        super().__init__(app, server=server)
        self._uploading = 0
        self._inside = 0

    def check(self, scope: Scope) -> None:
        """Raises ApiError."""
        if scope["method"] != "POST":
            return
        if self.server.models.draining:
            raise ApiError(UNAVAILABLE, "the server is draining; it takes no new requests", code="draining")
        self._check_room()
        if self._uploading >= MAX_UPLOADS:
            raise ApiError(
                UNAVAILABLE,
                f"the server is full: the bodies of {self._uploading} requests are coming; the limit is {MAX_UPLOADS}",
                code="queue_full",
            )

    def _check_room(self) -> None:
        most = self.settings.max_concurrent_requests or self.server.models.places
        # Before models are there it is they who say so.
        if most and self._inside >= most:
            raise ApiError(
                UNAVAILABLE,
                f"the server is full: {self._inside} requests are inside; the limit is {most}",
                code="queue_full",
            )

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Counts it while its body comes, and then while it is inside."""
        if scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        whole = inside = False

        async def receive_counted() -> Message:
            nonlocal whole, inside
            message = await receive()
            if not whole and message["type"] == "http.request" and not message.get("more_body", False):
                whole = True
                self._uploading -= 1
                self._check_room()
                inside = True
                self._inside += 1
            return message

        self._uploading += 1
        try:
            await self.app(scope, receive_counted, send)
        finally:
            if not whole:
                self._uploading -= 1
            if inside:
                self._inside -= 1
