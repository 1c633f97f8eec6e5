"""Base class of middleware."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ferrule.server.context import Context
from ferrule.server.error_responses import error_response
from ferrule.server.errors import ApiError


class Middleware:
    """ASGI middleware whose ApiErrors become responses."""

    def __init__(self, app: ASGIApp, *, server: Context) -> None:
        self.app = app
        self.server = server
        self.settings = server.settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request (ASGI)."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            self.check(scope)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        await self.serve(scope, receive, send)

    def check(self, scope: Scope) -> None:
        """Raises ApiError for a request that must be rejected."""

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request to the inner application."""
        await self.app(scope, receive, send)


def header(scope: Scope, name: str) -> str | None:
    """Returns the value of a header, the first where it is repeated."""
    return Headers(scope=scope).get(name)


def route_path(scope: Scope) -> str:
    """Returns the path relative to the mount point of the application."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(f"{root}/") else path
