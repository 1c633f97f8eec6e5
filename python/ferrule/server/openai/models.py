"""GET /v1/models, and loading and unloading of LoRA adapters (vLLM's routes)."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter

from ferrule._engine.workers import WORKERS
from ferrule._validation import shown
from ferrule.errors import InvalidParameterError
from ferrule.server.context import Context
from ferrule.server.errors import ApiError
from ferrule.server.models import ModelName
from ferrule.server.openai.protocol.models import (
    LoadAdapterRequest,
    ModelCard,
    ModelList,
    ModelStatus,
    UnloadAdapterRequest,
)
from ferrule.server.request_body import BodyRoute


def router(server: Context) -> APIRouter:
    """Creates the routes."""
    routes = APIRouter(route_class=BodyRoute)

    @routes.get("/models", include_in_schema=False)
    @routes.get("/v1/models")
    async def list_models() -> ModelList:
        """Lists models and adapters; the `parent` of an adapter is its model."""
        await server.models.check_health()
        return ModelList(data=[_card(server, each) for each in server.models.all()])

    @routes.get("/models/{model:path}", include_in_schema=False)
    @routes.get("/v1/models/{model:path}")
    async def get_model(model: str) -> ModelCard:
        """Describes a model or an adapter."""
        return _card(server, server.models.find(model))

    @routes.post("/v1/load_lora_adapter")
    async def load_lora_adapter(request: LoadAdapterRequest) -> ModelCard:
        """Loads an adapter from the server's lora_dir; requests then use its name as a model."""
        served = await server.lease(request.model)
        if any(each.name == request.lora_name for each in server.models.all()):
            raise InvalidParameterError("lora_name", request.lora_name, "a name that no model or adapter has")
        path = await WORKERS.run(_allowed, server.settings.lora_dir, request.lora_path)
        await served.llm.load_lora_adapter(request.lora_name, path)
        served.entry.adapters[request.lora_name] = path
        return _card(server, server.models.find(request.lora_name))

    @routes.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(request: UnloadAdapterRequest) -> dict[str, str]:
        """Unloads an adapter; running requests that use it finish."""
        served = await server.lease(request.lora_name)
        if served.adapter is None:
            raise InvalidParameterError("lora_name", request.lora_name, "the name of an adapter")
        await served.llm.unload_lora_adapter(served.adapter)
        served.entry.adapters.pop(served.adapter, None)
        return {"unloaded": served.adapter}

    return routes


def _allowed(lora_dir: str | None, given: str) -> Path:
    """Returns the path of an adapter, which must be in `lora_dir` after links are followed.

    Raises ApiError.
    """
    if lora_dir is None:
        message = "adapters cannot be loaded: start the server with --lora-dir"
        raise ApiError(403, message, code="adapters_closed")
    root = Path(lora_dir).resolve()
    try:
        path = (root / given).resolve()
    except (OSError, ValueError, RuntimeError):  # not a path, or circular links
        path = None
    if path is None or not path.is_relative_to(root):
        message = f"lora_path must be a path in lora_dir, got {shown(given)}"
        raise ApiError(403, message, code="path_not_allowed", param="lora_path")
    return path


def _card(server: Context, model: ModelName) -> ModelCard:
    info = model.entry.info
    return ModelCard(
        id=model.name,
        created=server.models.created,
        root=model.entry.source,
        parent=None if model.adapter is None else model.entry.name,
        max_model_len=None if info is None else info["max_model_len"],
        answer_defaults=model.entry.answer_defaults,
        status=ModelStatus(value=model.entry.state),
    )
