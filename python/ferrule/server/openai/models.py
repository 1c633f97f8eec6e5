"""GET /v1/models, and adapters that come and go while the server runs (vLLM's routes)."""

from __future__ import annotations

from fastapi import APIRouter

from ferrule.server.context import Context
from ferrule.server.models import Served
from ferrule.server.openai.protocol import ModelCard, ModelList


def router(server: Context) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.get("/v1/models")
    async def list_models() -> ModelList:
        """What may stand in a request's `model`: models, and adapters, whose `parent` is their model."""
        await server.models.check_health()
        return ModelList(data=[_card(server, served) for served in server.models.all()])

    @routes.get("/v1/models/{model:path}")
    async def get_model(model: str) -> ModelCard:
        """One of them."""
        return _card(server, server.models.find(model))

    return routes


def _card(server: Context, served: Served) -> ModelCard:
    parent = next(each.name for each in server.models.engines() if each.llm is served.llm)
    return ModelCard(
        id=served.name,
        created=server.models.created,
        root=str(served.info["model"]),
        parent=None if served.adapter is None else parent,
        max_model_len=served.info["max_model_len"],
    )
