"""Mamba 2 (Dao and Gu 2024): layers of one mixer each, and what hybrids with Mamba 2 share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from ferrule.archs.config import Config
from ferrule.archs.spec import Block, Layer, LmHead, Mamba2, Mixer, ModelSpec, RmsNorm
from ferrule.archs.tensors import Fused, fused, tensors_named

_MIXER = "backbone.layers.{layer}.mixer"

BACKBONE = {
    "embedding": "backbone.embeddings",
    "final_norm": "backbone.norm_f",
    "lm_head": "lm_head",
}
"""Module names outside of the layers in Mamba's checkpoints."""


def mamba2(config: Config) -> ModelSpec:
    """The state has no limit of tokens; the context is a million by default."""
    config = config.with_defaults(max_position_embeddings=1 << 20)
    norm = RmsNorm(config.number("layer_norm_epsilon", default=1e-5))
    heads, head_dim = config.integer("num_heads", default=128), config.integer("head_dim", default=64)
    inner = int(config.number("expand", default=2.0) * config.integer("hidden_size"))
    if heads * head_dim != inner:
        raise config.error("num_heads", f"such that num_heads * head_dim is expand * hidden_size ({inner})")
    groups = config.integer("n_groups", default=8)
    mixer = Mamba2(
        heads=heads,
        head_dim=head_dim,
        groups=divisor(config, "n_groups", groups, heads),
        state_size=config.integer("state_size", default=128),
        taps=config.integer("conv_kernel", default=4),
        bias=config.flag("use_bias", default=False),
        output_bias=config.flag("use_bias", default=False),
        kernel_bias=config.flag("use_conv_bias", default=True),
        norm=norm,
        norm_groups=groups,
        **step_limits(config),
    )
    return stack(
        config, mixer, norm, {**BACKBONE, "mamba2_norm": "backbone.layers.{layer}.norm", **modules(_MIXER, mixer)}
    )


def stack(
    config: Config, mixer: Mixer, norm: RmsNorm, names: Mapping[str, str | Fused], *, tied: bool = False
) -> ModelSpec:
    """Returns the spec of a model whose layers are one mixer each, with the module names of its roles.

    `tied` is the default of `tie_word_embeddings`.
    """
    config.require(hidden_act="silu")
    spec = ModelSpec(
        architecture=config.text("model_type"),
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        max_position_embeddings=config.integer("max_position_embeddings"),
        layers=[Layer((Block(mixer.type, mixer, norm),))] * config.layers,
        final_norm=norm,
        lm_head=LmHead(tied=config.flag("tie_word_embeddings", default=tied)),
    )
    return replace(spec, tensors=tensors_named(spec, names))


def hybrid_mamba2(config: Config, *, norm: RmsNorm | None) -> Mamba2:
    """Returns the Mamba 2 mixer that the fields `mamba_*` describe."""
    heads = config.integer("mamba_n_heads", default=128)
    inner = int(config.number("mamba_expand", default=2.0) * config.integer("hidden_size"))
    inner = config.integer("mamba_d_ssm", default=inner)
    bias = config.flag("mamba_proj_bias", default=False)
    auto = config.values.get("mamba_d_head", "auto") == "auto"
    head_dim = max(1, inner // heads) if auto else config.integer("mamba_d_head")
    if heads * head_dim != inner:
        raise config.error("mamba_n_heads", f"such that mamba_n_heads * mamba_d_head is {inner}")
    groups = divisor(config, "mamba_n_groups", config.integer("mamba_n_groups", default=1), heads)
    return Mamba2(
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        state_size=config.integer("mamba_d_state", default=256),
        taps=config.integer("mamba_d_conv", default=4),
        bias=bias,
        output_bias=bias,
        kernel_bias=config.flag("mamba_conv_bias", default=True),
        activation=config.activation,
        norm=norm,
        norm_groups=groups,
        **step_limits(config),
    )


def divisor(config: Config, field: str, groups: int, heads: int) -> int:
    """Returns the number of groups of heads.

    Raises ConfigError if it does not divide the number of heads.
    """
    if heads % groups:
        raise config.error(field, f"a divisor of the number of heads ({heads})")
    return groups


def step_limits(config: Config) -> dict[str, Any]:
    """Returns the limits of step sizes from `time_step_limit`, whose numbers may be infinite."""
    found: object = config.values.get("time_step_limit")
    if found is None:
        return {}
    limits = [_number(item) for item in cast("list[object]", found)] if isinstance(found, list | tuple) else []
    match limits:
        case [float(low), float(high)] if 0 <= low < float("inf") and low < high:
            return {"min_step": low, "max_step": None if high == float("inf") else high}
        case _:
            raise config.error("time_step_limit", "a list of two numbers, the smallest and the largest step size")


def _number(item: object) -> float | None:
    """Returns a number of a file; infinity is also written as `{"__float__": "Infinity"}`."""
    if isinstance(item, dict) and cast("dict[str, object]", item).get("__float__") == "Infinity":
        return float("inf")
    return float(item) if isinstance(item, int | float) and not isinstance(item, bool) else None


def modules(at: str, mixer: Mamba2) -> dict[str, str | Fused]:
    """Returns the module names of a Mamba 2 mixer that is the module `at`."""
    inner, keys = mixer.heads * mixer.head_dim, mixer.groups * mixer.state_size
    rows = {
        "mamba2.gate": inner,
        "mamba2.x": inner,
        "mamba2.b": keys,
        "mamba2.c": keys,
        "mamba2.step": mixer.heads,
    }
    return {
        **fused(f"{at}.in_proj", rows),
        "mamba2.kernel": f"{at}.conv1d",
        "mamba2.decay_log.weight": f"{at}.A_log",
        "mamba2.step_bias.weight": f"{at}.dt_bias",
        "mamba2.skip.weight": f"{at}.D",
        "mamba2.norm": f"{at}.norm",
        "mamba2.output": f"{at}.out_proj",
    }
