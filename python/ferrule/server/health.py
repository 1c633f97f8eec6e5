"""GET /health and /version."""

from __future__ import annotations

from fastapi import APIRouter

from ferrule import __version__
from ferrule.server.context import Context


def router(server: Context) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.head("/health", include_in_schema=False)
    @routes.get("/health")
    async def health() -> dict[str, str]:
        """200 where requests are answered; 503 while models are loaded, while the server drains, or once it is dead."""
        await server.models.check_health()
        return {"status": "ok"}

    @routes.get("/version")
    async def version() -> dict[str, str]:
        """The version of ferrule."""
        return {"version": __version__}

    return routes
