"""Granite with sinks, and with a window and a rotary base for each layer (Granite Team, IBM 2026)."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from ferrule.archs.config import Config
from ferrule.archs.decoder import layer_windows
from ferrule.archs.granite import granite
from ferrule.archs.rope import read_rope
from ferrule.archs.spec import ModelSpec, Rope

SINKS = {"attention.sinks.weight": "model.layers.{layer}.self_attn.sinks"}


def granite_swa(config: Config) -> ModelSpec:
    """Every layer has sinks."""
    config = config.with_defaults(
        max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True
    ).with_absent(num_key_value_heads=4, sliding_window=128)
    return granite(config, windows=windows(config), layer_ropes=ropes(config), sinks=True, modules=SINKS)


def windows(config: Config) -> list[int | None]:
    """Returns the window of each layer; None for layers with full attention, by default every fourth from the first."""
    return layer_windows(config, sliding=lambda index: index % 4 != 0, window=config.integer_or_none("sliding_window"))


def ropes(config: Config) -> list[Rope | None]:
    """Returns the rotary embedding of each layer by `layer_rope_theta`; layers with a base of 0 have none."""
    rope = read_rope(config, config.head_dim)
    field = "layer_rope_theta"
    if field not in config:
        return [rope] * config.layers
    thetas: object = config.values[field]
    items = cast("list[object]", thetas) if isinstance(thetas, list) else []
    if len(items) != config.layers:
        raise config.error(field, f"a list of {config.layers} numbers, one for each layer")
    bases = [config.with_values(layer_rope_theta=item).number(field, low=0.0) for item in items]
    if any(0 < base <= 1 for base in bases):
        raise config.error(field, "a list of numbers, each one 0 or above 1")
    return [replace(rope, theta=base) if base else None for base in bases]
