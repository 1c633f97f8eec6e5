"""Descriptions of models for Ollama's clients."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections.abc import Mapping
from typing import Any

from ferrule.server.models import ModelName, ServedModel
from ferrule.server.ollama.protocol import ModelDetails, ModelTag, RunningModel, ShowResponse, timestamp
from ferrule.server.settings import ServerSettings

FOREVER = 2**63 / 1e9
"""Seconds that a model stays loaded: the maximum that Ollama can express."""
_ANY_TOOL = {"type": "function", "function": {"name": "f"}}
IDENTITY = ("directory", "file", "architecture", "parameters", "quantization")
"""Facts of `info` that identify a model."""
UNKNOWN: Mapping[str, Any] = {
    "file": None,
    "architecture": "",
    "parameters": 0,
    "quantization": "",
    "weight_bytes": 0,
    "max_model_len": 0,
}
"""Facts about a model that was never loaded."""


def tag(model: ModelName, created: float) -> ModelTag:
    """Describes a model for /api/tags; `created` is the time of its creation, in seconds since 1970."""
    return ModelTag(modified_at=timestamp(created), **_common(model))


def running(model: ModelName, created: float) -> RunningModel:
    """Describes a loaded model for /api/ps; `created` is the time of its creation, in seconds since 1970."""
    entry = model.entry
    # The keep-alive time of a model in use begins when its last request ends.
    left = entry.keep_alive if entry.expires_at is None else entry.expires_at - asyncio.get_running_loop().time()
    return RunningModel(
        modified_at=timestamp(created),
        expires_at=timestamp(created + FOREVER if left == math.inf else time.time() + left),
        context_length=_info(model)["max_model_len"],
        **_common(model),
    )


def show(served: ServedModel, settings: ServerSettings, created: float) -> ShowResponse:
    """Describes a model for /api/show; `created` is the time of loading, in seconds since 1970."""
    info = served.info
    templates = _templates(served, settings)
    family = info["architecture"]
    defaults = served.llm.generation_config.given()
    return ShowResponse(
        parameters="\n".join(f"{name} {json.dumps(value)}" for name, value in defaults.items()),
        template=templates.get("default", ""),
        modified_at=timestamp(created),
        details=_details(info, served.adapter),
        model_info={
            "general.architecture": family,
            "general.basename": served.name,
            "general.parameter_count": info["parameters"],
            f"{family}.block_count": info["layers"],
            f"{family}.context_length": info["max_model_len"],
            f"{family}.embedding_length": info["hidden_size"],
            f"{family}.vocab_size": info["vocab_size"],
        },
        capabilities=_capabilities(served, settings),
    )


def _common(model: ModelName) -> dict[str, Any]:
    return {
        "name": model.name,
        "model": model.name,
        "size": _info(model)["weight_bytes"],
        "digest": _digest(model),
        "details": _details(_info(model), model.adapter),
    }


def _info(model: ModelName) -> Mapping[str, Any]:
    """Returns facts about a model; those of one that was never loaded are not known."""
    return {**UNKNOWN, "model": model.entry.source} if model.entry.info is None else model.entry.info


def _digest(model: ModelName) -> str:
    entry, paths = model.entry, list[str]()
    if model.adapter is not None and entry.llm is not None:
        paths = [each.path for each in entry.llm.lora_adapters() if each.name == model.adapter]
    # A model that is loaded on demand has the same digest before and after.
    info = _info(model)
    identity = [info[name] for name in IDENTITY] if entry.on_demand is None else entry.on_demand.source
    return hashlib.sha256(json.dumps([identity, paths]).encode()).hexdigest()


def _details(info: Mapping[str, Any], adapter: str | None) -> ModelDetails:
    return ModelDetails(
        parent_model="" if adapter is None else info["model"],
        format="safetensors" if info["file"] is None else "gguf",
        family=info["architecture"],
        families=[info["architecture"]],
        parameter_size=_size(info["parameters"]),
        quantization_level=info["quantization"],
    )


def _templates(served: ServedModel, settings: ServerSettings) -> dict[str, str]:
    """Returns the chat templates that requests use."""
    own = served.llm.chat_templates
    chosen = settings.chat_template
    return own if chosen is None else {"default": own.get(chosen, chosen)}


def _capabilities(served: ServedModel, settings: ServerSettings) -> list[str]:
    if not served.llm.generates:
        return ["embedding"]
    chosen = settings.chat_template
    tools = served.llm.message_format(settings.tool_call_parser, None, tools=[_ANY_TOOL], chat_template=chosen)
    thinking = served.llm.message_format(None, settings.reasoning_parser, chat_template=chosen)
    return ["completion", *(kind for kind, form in (("tools", tools), ("thinking", thinking)) if form is not None)]


def _size(parameters: int) -> str:
    unit, name = next((each for each in ((1e9, "B"), (1e6, "M")) if parameters >= each[0]), (1e3, "K"))
    return f"{parameters / unit:.1f}{name}"
