"""Translates the metadata of a GGUF file to a spec, by way of the fields of config.json.

ggml's docs/gguf.md and llama.cpp define the keys; missing keys have llama.cpp's defaults.
"""

from __future__ import annotations

import difflib
from dataclasses import replace
from typing import Any, cast

from ferrule._loading.gguf.architecture import GgufArchitecture, fraction
from ferrule._loading.gguf.architectures import REGISTRY
from ferrule._loading.gguf.file import GgufFile
from ferrule._loading.gguf.form import GgufForm
from ferrule._loading.gguf.tensors import gguf_tensors, with_split_latents
from ferrule.archs import model_spec
from ferrule.archs.config import MAX_SIZE, Config
from ferrule.archs.rope import DEFAULT_THETA
from ferrule.archs.spec import ModelSpec
from ferrule.errors import UnsupportedModelError

FIELDS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
}
"""Fields of config.json that all architectures share, with their keys."""
BY_LAYER = ("intermediate_size", "num_attention_heads", "num_key_value_heads")
"""Fields whose keys may hold a list with a number for each layer."""
EMBEDDING, HEAD = "token_embd.weight", "output.weight"


def gguf_spec(file: GgufFile) -> ModelSpec:
    """Returns the spec of a model in a GGUF file.

    Raises ConfigError for an invalid value, UnsupportedModelError for an unsupported architecture or option.
    """
    config, form = gguf_config(file)
    spec = with_split_latents(form.applied(model_spec(config)), file)
    return replace(spec, tensors=gguf_tensors(spec, file))


def gguf_config(file: GgufFile) -> tuple[Config, GgufForm]:
    """Returns the fields of config.json, and the form of the weights.

    Raises the errors of `gguf_spec`.
    """
    architecture = _find(file)
    form = GgufForm(architecture.interleaved, architecture.alternating, file.metadata)
    return _config(file, architecture), form


def _find(file: GgufFile) -> GgufArchitecture:
    for architecture in REGISTRY:
        if architecture.name == file.architecture:
            return architecture
    names = [architecture.name for architecture in REGISTRY]
    nearest = difflib.get_close_matches(file.architecture, names, n=1, cutoff=0)
    names = [*nearest, *(name for name in names if name not in nearest)]
    raise UnsupportedModelError(
        f"{file.path}: unsupported GGUF architecture {file.architecture!r}; supported (nearest first): "
        f"{', '.join(names)}"
    )


def _config(file: GgufFile, architecture: GgufArchitecture) -> Config:
    """Returns the fields of the model's config.json; errors name the GGUF's keys."""
    keys = {field: file.key(name) for field, name in {**FIELDS, **architecture.fields}.items()}
    values = {field: file.metadata.values[key] for field, key in keys.items() if key in file.metadata}
    for field in BY_LAYER:
        if field in architecture.varying:
            values.pop(field, None)
        else:
            values[field] = _same_in_all_layers(file, keys[field], values.get(field))
    fraction = f"{file.key('rope.dimension_count')} / attention.key_length"
    config = Config(values, file.path, spellings={**keys, "partial_rotary_factor": fraction})
    config = config.with_defaults(num_key_value_heads=values.get("num_attention_heads"))
    config = config.with_values(
        num_hidden_layers=_layers(file, config),
        vocab_size=file.rows(EMBEDDING),
        tie_word_embeddings=HEAD not in file,
    )
    if architecture.heads:
        config = _with_heads(file, config)
    if architecture.rotates:
        config = _with_rope(file, config, architecture)
    config = config.with_defaults(model_type=architecture.model_type, **architecture.defaults)
    return config.with_values(**architecture.derive(file, config))


def _same_in_all_layers(file: GgufFile, key: str, value: object) -> object:
    if not isinstance(value, list):
        return value
    # Layers without the mixer have 0.
    numbers = [number for number in cast("list[object]", value) if number != 0] or [0]
    if any(number != numbers[0] for number in numbers):
        raise UnsupportedModelError(f"{file.path}: {key} must be the same in all layers, got different values")
    return numbers[0]


def _layers(file: GgufFile, config: Config) -> int:
    """Returns the number of layers without multi-token prediction layers, which are ignored."""
    layers, key = config.layers, file.key("nextn_predict_layers")
    own = layers - file.metadata.integer(key, default=0, low=0, high=layers - 1)
    is_own = f"blk.{own}.attn_norm.weight" in file and f"blk.{own}.nextn.enorm.weight" not in file
    # Some files of DeepSeek-V4 state prediction layers that they neither have nor count.
    return layers if is_own else own


def _with_heads(file: GgufFile, config: Config) -> Config:
    width = config.head_dim
    if file.metadata.integer(file.key("attention.value_length"), default=width) != width:
        raise file.metadata.unsupported(file.key("attention.value_length"), f"equal to attention.key_length ({width})")
    return config.with_values(head_dim=width)


def _with_rope(file: GgufFile, config: Config, architecture: GgufArchitecture) -> Config:
    """Adds the fields of the rotary embedding: rotated width, base and scaling."""
    metadata = file.metadata
    config = config.with_defaults(rope_theta=DEFAULT_THETA)
    width = config.head_dim if architecture.heads else 0
    key = file.key("rope.dimension_count")
    rotary_dim = metadata.integer(key, default=width or None, low=2, high=width or MAX_SIZE)
    if rotary_dim % 2:
        raise metadata.error(key, "an even number")
    if width:
        config = config.with_values(partial_rotary_factor=fraction(rotary_dim, width))
    return config.with_values(rope_scaling={**_rope_scaling(file, rotary_dim // 2), **architecture.scaling})


def _rope_scaling(file: GgufFile, pairs: int) -> dict[str, Any]:
    """Returns the `rope_scaling` of config.json; empty without scaling."""
    metadata, scaling = file.metadata, file.key("rope.scaling.")
    kind = metadata.text(f"{scaling}type", default="linear")
    old = file.key("rope.scale_linear")
    factor_key = f"{scaling}factor" if f"{scaling}factor" in metadata else old
    # 0 means no scaling.
    factor = metadata.number(factor_key, default=0.0, low=0.0) or 1.0
    if "rope_factors_long.weight" in file:
        return {
            "rope_type": "longrope",
            "short_factor": list(file.factors("rope_factors_short.weight", pairs)),
            "long_factor": list(file.factors("rope_factors_long.weight", pairs)),
            "attention_factor": metadata.number_or_none(f"{scaling}attn_factor"),
        }
    if "rope_freqs.weight" in file:
        # The tensor holds Llama 3's scaling as precomputed divisors, which apply to all lengths.
        if kind == "yarn":
            raise metadata.unsupported(f"{scaling}type", "omitted in a file with a tensor 'rope_freqs.weight'")
        factors = list(file.factors("rope_freqs.weight", pairs))
        return {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
    match kind:
        case "none" | "longrope":
            return {}
        case "linear":
            return {} if factor == 1 else {"rope_type": "linear", "factor": factor}
        case "yarn":
            return {
                "rope_type": "yarn",
                "factor": factor,
                "attention_factor": metadata.number_or_none(f"{scaling}yarn_attn_factor"),
                "beta_fast": metadata.number(f"{scaling}yarn_beta_fast", default=32.0, low=0.0),
                "beta_slow": metadata.number(f"{scaling}yarn_beta_slow", default=1.0, low=0.0),
            }
        case _:
            raise metadata.unsupported(f"{scaling}type", "none, linear, yarn or longrope")
