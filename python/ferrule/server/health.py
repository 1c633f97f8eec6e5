"""GET /health, /load and /version."""

from __future__ import annotations

from fastapi import APIRouter

from ferrule import __version__
from ferrule.server.context import Context


def router(server: Context) -> APIRouter:
    """Creates the routes."""
    routes = APIRouter()

    @routes.head("/v1/health", include_in_schema=False)
    @routes.get("/v1/health", include_in_schema=False)
    @routes.head("/health", include_in_schema=False)
    @routes.get("/health")
    async def health() -> dict[str, str]:
        """Answers 200 where requests are served; 503 while models load, while the server drains, or after a failure."""
        await server.models.check_health()
        return {"status": "ok"}

    @routes.get("/load")
    async def load() -> dict[str, int]:
        """Returns the number of requests that are being served, as vLLM does."""
        return {"server_load": server.load.running}

    @routes.get("/version")
    async def version() -> dict[str, str]:
        """Returns the version of ferrule."""
        return {"version": __version__}

    return routes
