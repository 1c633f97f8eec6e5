"""What the guards have in common."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ferrule.server.context import Context
from ferrule.server.error_responses import error_response
from ferrule.server.errors import ApiError


class Middleware:
    """A layer around an application; what it raises as ApiError before the application has begun is its answer."""

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
        """Raises ApiError for a request that goes no further."""

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on."""
        await self.app(scope, receive, send)


def header(scope: Scope, name: str) -> str | None:
    """A header's value; where it comes twice, the first."""
    return Headers(scope=scope).get(name)


def route_path(scope: Scope) -> str:
    """The path below the place where the application is mounted."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(f"{root}/") else path
