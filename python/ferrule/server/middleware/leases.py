"""Leases of the models that a request uses."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from ferrule.server.leases import request_leases
from ferrule.server.middleware.base import Middleware


class Leases(Middleware):
    """Innermost middleware: the models of a request stay loaded until its response has been sent."""

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on and then ends its leases."""
        async with request_leases():
            await self.app(scope, receive, send)
