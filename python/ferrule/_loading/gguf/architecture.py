"""Description of a GGUF architecture, and what several of them read in the same way."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from ferrule._loading.gguf.file import GgufFile
from ferrule.archs.config import MAX_SIZE, Config

Derive = Callable[[GgufFile, Config], dict[str, Any]]


def nothing(file: GgufFile, config: Config) -> dict[str, Any]:
    """Returns no additional fields."""
    return {}


@dataclass(frozen=True)
class GgufArchitecture:
    """Translation of a GGUF's metadata to the fields of config.json."""

    name: str
    """Value of `general.architecture` in the metadata."""
    model_type: str
    """`model_type` of config.json; `derive` may return another."""
    fields: Mapping[str, str] = field(default_factory=dict[str, str])
    """Additional fields, with their metadata keys without the architecture prefix."""
    defaults: Mapping[str, object] = field(default_factory=dict[str, object])
    """Values of fields that have no key or whose key is missing."""
    derive: Derive = nothing
    """Function that computes fields which depend on several keys."""
    interleaved: bool | None = False
    """Whether converters reorder rows so that adjacent elements are rotated together; None if the order is
    unchanged."""
    rotates: bool = True
    """Whether the architecture has a rotary embedding."""
    scaling: Mapping[str, object] = field(default_factory=dict[str, object])
    """Fields of `rope_scaling` that have no key."""
    heads: bool = True
    """Whether `attention.key_length` is the width of keys and values."""
    varying: tuple[str, ...] = ()
    """Fields of the numbers of heads and widths that may differ between layers, which `derive` reads."""
    alternating: bool = False
    """Whether converters reorder the value heads of delta nets so that head h reads key head `h % key_heads`."""


def layers_with(file: GgufFile, config: Config, *tensors: str) -> list[int]:
    """Returns the layers that have one of these tensors."""
    return [index for index in range(config.layers) if any(f"blk.{index}.{name}" in file for name in tensors)]


def by_layer(file: GgufFile, config: Config, name: str) -> list[int]:
    """Returns the integer of each layer under a key, which may hold one for all layers.

    Raises ConfigError if a layer has none.
    """
    metadata, key = file.metadata, file.key(name)
    if not isinstance(metadata.values.get(key), list):
        return [metadata.integer(key, low=0)] * config.layers
    numbers = metadata.integers(key, low=0, high=MAX_SIZE)
    if len(numbers) < config.layers:
        raise metadata.error(key, f"an integer, or a list of one for each of {config.layers} layers")
    return numbers[: config.layers]


def layer_flags(file: GgufFile, config: Config, name: str) -> list[bool]:
    """Returns the flag of each layer under a key that holds a list; empty if it does not.

    Raises ConfigError if a layer has none.
    """
    key = file.key(name)
    value: object = file.metadata.values.get(key)
    if not isinstance(value, list):
        return []
    items = cast("list[object]", value)
    if len(items) < config.layers or any(not isinstance(each, (bool, int)) for each in items):
        raise file.metadata.error(key, f"a list of {config.layers} items that are true or false")
    return [bool(each) for each in items[: config.layers]]


def fraction(part: int, whole: int) -> float:
    """Returns `part / whole`, rounded up so that its product with `whole` is at least `part`."""
    quotient = part / whole
    return quotient if int(whole * quotient) == part else math.nextafter(quotient, math.inf)


def has_biases(file: GgufFile) -> dict[str, Any]:
    """Returns whether queries, keys and values have biases."""
    return {"attention_bias": bool({"attn_q.bias", "attn_qkv.bias"} & file.in_layers)}


def sliding(file: GgufFile, config: Config, every: int, *, first: bool = False) -> dict[str, Any]:
    """Returns the attention window, and the layers that have it by the file's pattern or by `every`.

    The last layer in each group of `every` layers has full attention, or with `first` the first layer of the group. If
    `every` is 0, all layers have the window.
    """
    metadata, key = file.metadata, file.key("attention.sliding_window_pattern")
    window = metadata.integer(file.key("attention.sliding_window"), default=0, low=0)
    layers = config.layers
    has = layer_flags(file, config, "attention.sliding_window_pattern")
    if not has:
        every = metadata.integer(key, default=every, low=0)
        has = [every == 0 or (index % every != 0 if first else index % every < every - 1) for index in range(layers)]
    kinds = ["sliding_attention" if each and window else "full_attention" for each in has]
    return {"sliding_window": window or None, "layer_types": kinds}


def same_base(file: GgufFile) -> None:
    """Refuses a separate rotary base for sliding layers."""
    for name in ("rope.freq_base", "rope.dimension_count"):
        own = file.metadata.values.get(file.key(f"{name}_swa"))
        if own is not None and own != file.metadata.values.get(file.key(name)):
            raise file.metadata.unsupported(file.key(f"{name}_swa"), f"equal to {name}, the value of the other layers")


GATING = {0: None, 1: "softmax", 2: "sigmoid"}
"""Score functions of the router by `expert_gating_func`."""


def gating(file: GgufFile, default: str) -> str:
    """Returns the router's score function."""
    key = file.key("expert_gating_func")
    number = file.metadata.integer(key, default=0, low=0)
    if number not in GATING:
        raise file.metadata.unsupported(key, "1 (softmax) or 2 (sigmoid)")
    return GATING[number] or default


def require_gating(file: GgufFile, only: str) -> None:
    """Refuses other score functions of the router than `only`, which is also the default."""
    if gating(file, only) != only:
        (number,) = (number for number, name in GATING.items() if name == only)
        raise file.metadata.unsupported(file.key("expert_gating_func"), f"{number} ({only}) in this architecture")


def latent(file: GgufFile, config: Config) -> dict[str, Any]:
    """Returns the fields of latent attention and its experts.

    In newer files, the keys that held the widths of the heads hold the widths of the latent.
    """
    metadata = file.metadata
    rope_dim = metadata.integer(file.key("rope.dimension_count"))
    width_key = file.key("attention.key_length_mla")
    width_key = width_key if width_key in metadata else file.key("attention.key_length")
    values = file.key("attention.value_length_mla")
    values = values if values in metadata else file.key("attention.value_length")
    if metadata.integer(width_key) <= rope_dim:
        raise metadata.error(width_key, f"above rope.dimension_count ({rope_dim})")
    fields: dict[str, Any] = {
        "q_lora_rank": metadata.integer_or_none(file.key("attention.q_lora_rank")),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": metadata.integer(width_key) - rope_dim,
        "v_head_dim": metadata.integer(values),
        "norm_topk_prob": metadata.flag(file.key("expert_weights_norm"), default=False),
    }
    # The file stores a tenth of the value in config.json, and one value for both factors.
    mscale = metadata.number(file.key("rope.scaling.yarn_log_multiplier"), default=0.0, low=0.0) * 10
    if mscale:
        fields["rope_scaling"] = {**config.values["rope_scaling"], "mscale": mscale, "mscale_all_dim": mscale}
    return fields


def shared_experts(file: GgufFile, config: Config) -> int:
    """Returns the width of the shared expert as a number of experts.

    Raises ConfigError if it is not a whole number.
    """
    metadata, key = file.metadata, file.key("expert_shared_feed_forward_length")
    width = config.integer("moe_intermediate_size")
    shared = metadata.integer(key, default=width * metadata.integer(file.key("expert_shared_count"), default=1))
    if shared % width:
        raise metadata.error(key, f"a multiple of expert_feed_forward_length ({width})")
    return shared // width
