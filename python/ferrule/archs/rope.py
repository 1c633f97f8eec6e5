"""Rotary embeddings in their old and new config spellings; one function for each scaling.

Old files have `rope_theta` and `rope_scaling` beside the sizes; new ones have `rope_parameters`, which may hold one
object for each type of layer. Defaults and priorities are those of transformers' modeling_rope_utils.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ferrule.archs.config import MAX_SIZE, Config
from ferrule.archs.spec import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NoScaling,
    ProportionalScaling,
    QueryGrowth,
    Rope,
    Scaling,
    YarnScaling,
)

DEFAULT_THETA = 10_000.0
ORIGINAL_LENGTH = "original_max_position_embeddings"


def read_rope(
    config: Config,
    head_dim: int,
    layer_type: str | None = None,
    *,
    partial: float | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
) -> Rope:
    """Reads the rotary embedding of a layer type.

    `partial` is the default of `partial_rotary_factor`; without it the architecture rotates whole heads, or
    `rotary_dim` elements.

    Raises ConfigError, UnsupportedModelError.
    """
    parameters = rope_parameters(config, layer_type)
    if layer_type in rope_parameters(config).values:
        config = config.without(ORIGINAL_LENGTH)  # each layer type has its own
    source = parameters if "partial_rotary_factor" in parameters else config
    factor = source.number("partial_rotary_factor", default=1.0 if partial is None else partial)
    if parameters.values.get("rope_type") == "proportional" and factor <= 1:
        scaling = ProportionalScaling(int(factor * head_dim // 2), parameters.number("factor", default=1.0))
        return Rope(rope_theta(config, parameters), head_dim, interleaved, scaling)
    if factor > 1 or (partial is None and factor != 1):
        limit = "at most 1" if partial is not None else "1 in this architecture, which rotates whole heads"
        raise source.error("partial_rotary_factor", limit)
    field, rotary_dim = ("head_dim", int(head_dim * factor)) if rotary_dim is None else ("rotary_dim", rotary_dim)
    if rotary_dim % 2 or not rotary_dim:
        raise config.error(field, f"such that an even number of elements is rotated (not {rotary_dim})")
    return Rope(
        theta=rope_theta(config, parameters),
        rotary_dim=rotary_dim,
        interleaved=interleaved,
        scaling=_read_scaling(config, parameters, rotary_dim),
    )


def rope_parameters(config: Config, layer_type: str | None = None) -> Config:
    """Returns the object that describes the rotary embedding: `rope_scaling` or `rope_parameters`."""
    parameters = config.inner("rope_scaling" if "rope_scaling" in config else "rope_parameters")
    by_layer_type = any(isinstance(value, dict) for value in parameters.values.values())
    if not by_layer_type or layer_type is None:
        return parameters
    if layer_type not in parameters:
        raise parameters.error(layer_type, "an object, because the model has layers of this type")
    return parameters.inner(layer_type)


def rope_theta(config: Config, parameters: Config) -> float:
    """Returns the base of the rotary embedding."""
    source = parameters if "rope_theta" in parameters else config
    return source.number("rope_theta", default=DEFAULT_THETA, above=1.0)


def context_length(config: Config, rope: Rope) -> int:
    """Longest context in tokens: max_position_embeddings, extended by the scaling.

    max_position_embeddings is the extended length for linear and llama3 scaling, the original one for dynamic scaling,
    and either for YaRN.
    """
    positions = config.integer("max_position_embeddings")
    # The product is capped: a factor may be so large that it is infinite.
    match rope.scaling:
        case DynamicScaling(factor=factor):
            return max(positions, int(min(positions * factor, MAX_SIZE)))
        case YarnScaling(factor=factor, original_max_position_embeddings=original):
            return max(positions, int(min(original * factor, MAX_SIZE)))
        case _:
            return positions


def _read_scaling(config: Config, parameters: Config, rotary_dim: int) -> Scaling:
    field = "rope_type" if "rope_type" in parameters else "type"
    kind = parameters.text(field, default="default")
    if kind not in _SCALINGS:
        raise parameters.unsupported(field, f"one of {', '.join(_SCALINGS)}")
    scaling = _SCALINGS[kind](config, parameters)
    if isinstance(scaling, LongRopeScaling):
        for field, factors in (("short_factor", scaling.short_factor), ("long_factor", scaling.long_factor)):
            if len(factors) != rotary_dim // 2:
                raise parameters.error(field, f"a list of {rotary_dim // 2} numbers, one for each rotated pair")
    return scaling


def _none(config: Config, parameters: Config) -> Scaling:
    return NoScaling()


def _linear(config: Config, parameters: Config) -> Scaling:
    return LinearScaling(factor=parameters.number("factor"))


def _dynamic(config: Config, parameters: Config) -> Scaling:
    # Only this scaling takes the original length from max_position_embeddings.
    return DynamicScaling(
        factor=parameters.number("factor", low=1.0),
        original_max_position_embeddings=config.integer("max_position_embeddings"),
    )


def _yarn(config: Config, parameters: Config) -> Scaling:
    original = _original_length(config, parameters)
    # DeepSeek omits the factor; the default is the ratio of the lengths.
    factor = parameters.number("factor", default=config.integer("max_position_embeddings") / original)
    if "attention_factor" in parameters:
        attention = parameters.number("attention_factor")
    elif _given_number(parameters, "mscale") and _given_number(parameters, "mscale_all_dim"):
        attention = yarn_mscale(factor, parameters.number("mscale")) / yarn_mscale(
            factor, parameters.number("mscale_all_dim")
        )
        if not (math.isfinite(attention) and attention > 0):
            raise parameters.error(
                "mscale", f"such that the attention factor is finite and above 0 (not {attention:g})"
            )
    else:
        attention = yarn_mscale(factor, 1.0)
    # transformers reads 0 as missing.
    slow = parameters.number("beta_slow", default=1.0, low=0.0) or 1.0
    fast = parameters.number("beta_fast", default=32.0, low=0.0) or 32.0
    if fast < slow:
        raise parameters.error("beta_fast", f"at least beta_slow ({slow:g})")
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=attention,
        truncate=parameters.flag("truncate", default=True),
    )


def query_growth(config: Config) -> QueryGrowth | None:
    """Returns the growth of Mistral's queries, with `llama_4_scaling_beta` of the rotary embedding; None without it."""
    parameters = rope_parameters(config)
    if "llama_4_scaling_beta" not in parameters:
        return None
    beta = parameters.number("llama_4_scaling_beta", low=0.0)
    return QueryGrowth(beta, length=_original_length(config, parameters))


def yarn_mscale(factor: float, mscale: float) -> float:
    """Returns YaRN's factor on attention; `mscale` weights the logarithm (DeepSeek-V2, 2024)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _given_number(parameters: Config, field: str) -> bool:
    """Whether a field is present and not 0; transformers reads 0 as missing."""
    return field in parameters and parameters.number(field, low=-math.inf) != 0


def _llama3(config: Config, parameters: Config) -> Scaling:
    low = parameters.number("low_freq_factor")
    high = parameters.number("high_freq_factor")
    if high <= low:
        raise parameters.error("high_freq_factor", f"above low_freq_factor ({low:g})")
    return Llama3Scaling(
        factor=parameters.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=_original_length(config, parameters),
    )


def _longrope(config: Config, parameters: Config) -> Scaling:
    original = _original_length(config, parameters)
    stretched = config.integer("max_position_embeddings") / original
    factor = parameters.number("factor", default=stretched)
    natural = 1.0 if factor <= 1 or original == 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongRopeScaling(
        short_factor=parameters.numbers("short_factor"),
        long_factor=parameters.numbers("long_factor"),
        original_max_position_embeddings=original,
        attention_factor=parameters.number("attention_factor", default=natural),
    )


def _original_length(config: Config, parameters: Config) -> int:
    if ORIGINAL_LENGTH in config:  # Phi-3 and others keep it beside the sizes
        return config.integer(ORIGINAL_LENGTH)
    return parameters.integer(ORIGINAL_LENGTH, default=config.integer("max_position_embeddings"))


_SCALINGS: dict[str, Callable[[Config, Config], Scaling]] = {
    "default": _none,
    "mrope": _none,  # three axes for images; all equal the position for text
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "su": _longrope,  # as the first Phi-3 files called it
}
