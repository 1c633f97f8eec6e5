"""Requests and responses of the routes for models and adapters."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from ferrule.server.schema.base import RequestModel
from ferrule.server.schema.response_fields import omitted_if_none


class LoadAdapterRequest(RequestModel):
    """Request of POST /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    model: str | None = None


class UnloadAdapterRequest(RequestModel):
    """Request of POST /v1/unload_lora_adapter."""

    lora_name: str


class ModelStatus(BaseModel):
    """State of a model, as llama.cpp's server reports it."""

    value: Literal["unloaded", "loading", "loaded"]


class ModelCard(BaseModel):
    """A model or an adapter of one."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "ferrule"
    root: str
    parent: str | None = omitted_if_none()
    max_model_len: int | None
    """Maximum number of tokens; None for a model that was never loaded."""
    answer_defaults: dict[str, int | float] | None = omitted_if_none()
    """Sampling parameters that the chat page sends unless the user changes them; None for a model of embeddings,
    and for one that was never loaded."""
    status: ModelStatus


class ModelList(BaseModel):
    """Response of GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
