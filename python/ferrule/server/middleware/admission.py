"""Admission control: no requests while the server drains, and at most as many as the engines run and queue."""

from __future__ import annotations

from starlette.types import Message, Receive, Scope, Send

from ferrule.server.errors import UNAVAILABLE, ApiError
from ferrule.server.middleware.base import Middleware

MAX_UPLOADS = 256
"""Maximum number of requests whose bodies are being received."""


class Admission(Middleware):
    """Rejects requests, before their bodies are received where possible.

    The engines limit sequences, of which a request may have several; this limits requests. Requests whose bodies are
    being received are counted separately, so that slow uploads do not block complete requests.
    """

    def check(self, scope: Scope) -> None:
        """Raises ApiError."""
        if scope["method"] != "POST":
            return
        if self.server.models.draining:
            raise ApiError(UNAVAILABLE, "the server is shutting down and accepts no new requests", code="draining")
        self._check_room()
        uploading = self.server.load.uploading
        if uploading >= MAX_UPLOADS:
            raise ApiError(
                UNAVAILABLE,
                f"the server is full: {uploading} request bodies are being received (limit {MAX_UPLOADS})",
                code="too_many_uploads",
            )

    def _check_room(self) -> None:
        limit = self.settings.max_concurrent_requests or self.server.models.capacity
        # The limit is 0 before the models are loaded; the route then answers 503.
        if limit and self.server.load.running >= limit:
            raise ApiError(
                UNAVAILABLE,
                f"the request queue is full ({self.server.load.running} requests, limit {limit})",
                code="queue_full",
            )

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Counts a request while its body is received and while it runs."""
        if scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        received = running = False

        async def receive_counted() -> Message:
            nonlocal received, running
            message = await receive()
            if not received and message["type"] == "http.request" and not message.get("more_body", False):
                received = True
                self.server.load.uploading -= 1
                self._check_room()
                running = True
                self.server.load.running += 1
            return message

        self.server.load.uploading += 1
        try:
            await self.app(scope, receive_counted, send)
        finally:
            if not received:
                self.server.load.uploading -= 1
            if running:
                self.server.load.running -= 1
