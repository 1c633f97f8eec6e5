"""The prefix of paths that a proxy in front of the server removes."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from ferrule.server.middleware.base import Middleware


class RootPath(Middleware):
    """Sets the setting `root_path` in the scope: paths are then read with this prefix and without it."""

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on."""
        root = self.settings.root_path
        await self.app({**scope, "root_path": root} if root else scope, receive, send)
