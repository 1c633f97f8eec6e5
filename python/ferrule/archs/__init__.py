"""Architectures: one file each, which turns config.json into a ModelSpec, and one line in REGISTRY.

Code that a checkpoint brings along (`auto_map`, remote code) is never looked at.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from ferrule.archs.config import Config
from ferrule.archs.llama import llama
from ferrule.archs.mistral import mistral
from ferrule.archs.qwen2 import qwen2
from ferrule.archs.qwen3 import qwen3
from ferrule.errors import UnsupportedModelError
from ferrule.spec import ModelSpec


@dataclass(frozen=True)
class Architecture:
    """What a checkpoint may call itself, and how its configuration is read."""

    class_name: str
    """In config.json's `architectures`."""
    model_type: str
    """In config.json's `model_type`, which decides where `architectures` is missing."""
    read: Callable[[Config], ModelSpec]


REGISTRY = (
    Architecture("LlamaForCausalLM", "llama", llama),
    Architecture("MistralForCausalLM", "mistral", mistral),
    Architecture("Qwen2ForCausalLM", "qwen2", qwen2),
    Architecture("Qwen3ForCausalLM", "qwen3", qwen3),
)


def model_spec(config: Config) -> ModelSpec:
    """The spec of a checkpoint.

    Raises ConfigError for a value outside its limits, UnsupportedModelError for what ferrule does not run.
    """
    architecture = _find(config)
    if "quantization_config" in config:
        method = config.inner("quantization_config").values.get("quant_method")
        raise UnsupportedModelError(
            f"{config.file}: quantization_config.quant_method is {method!r}; "
            "checkpoints must be unquantized: f32, f16 or bf16"
        )
    if "text_config" in config:
        config = config.inner("text_config")
    return architecture.read(config)


def _find(config: Config) -> Architecture:
    classes = config.texts("architectures")
    if classes:
        field, found, known = "architectures", classes[0], {a.class_name: a for a in REGISTRY}
    else:
        field, found, known = "model_type", config.text("model_type"), {a.model_type: a for a in REGISTRY}
    if found in known:
        return known[found]
    nearest = difflib.get_close_matches(found, known, n=1, cutoff=0)
    names = [*nearest, *(name for name in known if name not in nearest)]
    raise UnsupportedModelError(f"{config.file}: {field} is {found!r}; ferrule runs {', '.join(names)} (nearest first)")
