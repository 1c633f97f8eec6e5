"""Who comes in: nobody once the server drains, and no more than the engines run and let wait."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from ferrule.server.context import Context
from ferrule.server.errors import UNAVAILABLE, ApiError
from ferrule.server.guards.layer import Layer


class Admission(Layer):
    """Refuses by the request's first line and headers alone, before its body is there.

    The engines refuse too, by sequences, of which a request may have several. Here requests are counted.
    """

    def __init__(self, app: ASGIApp, *, server: Context) -> None:
        super().__init__(app, server=server)
        self._inside = 0

    def check(self, scope: Scope) -> None:
        """Raises ApiError."""
        if scope["method"] != "POST":
            return
        if self.server.models.draining:
            raise ApiError(UNAVAILABLE, "the server is draining; it takes no new requests", code="draining")
        most = self.settings.max_concurrent_requests or self.server.models.places
        # Before models are there it is they who say so.
        if most and self._inside >= most:
            raise ApiError(
                UNAVAILABLE,
                f"the server is full: {self._inside} requests are inside; the limit is {most}",
                code="queue_full",
            )

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Counts it while it is inside."""
        if scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        self._inside += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self._inside -= 1
