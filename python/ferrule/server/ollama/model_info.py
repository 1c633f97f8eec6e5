"""Descriptions of models for Ollama's clients."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from ferrule.server.models import ServedModel
from ferrule.server.ollama.protocol import ModelDetails, ModelTag, RunningModel, ShowResponse, timestamp
from ferrule.server.settings import ServerSettings

FOREVER = 2**63 / 1e9
"""Seconds that a model stays loaded: the maximum that Ollama can express."""
_ANY_TOOL = {"type": "function", "function": {"name": "f"}}
IDENTITY = ("directory", "file", "architecture", "parameters", "quantization")
"""Facts of `info` that identify a model."""


def tag(served: ServedModel, created: float) -> ModelTag:
    """Describes a model for /api/tags; `created` is the time of loading, in seconds since 1970."""
    return ModelTag(modified_at=timestamp(created), **_common(served))


def running(served: ServedModel, created: float) -> RunningModel:
    """Describes a model for /api/ps; `created` is the time of loading, in seconds since 1970."""
    return RunningModel(
        modified_at=timestamp(created),
        expires_at=timestamp(created + FOREVER),
        context_length=served.info["max_model_len"],
        **_common(served),
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
        details=_details(served),
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


def _common(served: ServedModel) -> dict[str, Any]:
    return {
        "name": served.name,
        "model": served.name,
        "size": served.info["weight_bytes"],
        "digest": _digest(served),
        "details": _details(served),
    }


def _digest(served: ServedModel) -> str:
    paths = [each.path for each in served.llm.lora_adapters() if each.name == served.adapter]
    identity = [[served.info[name] for name in IDENTITY], paths]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def _details(served: ServedModel) -> ModelDetails:
    info = served.info
    return ModelDetails(
        parent_model="" if served.adapter is None else info["model"],
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
