"""OLMo 3 (OLMo Team 2025): OLMo 2 with windows on three of four layers, whose rotary embedding is not scaled."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import layer_windows
from ferrule.archs.olmo2 import olmo2
from ferrule.archs.rope import read_rope
from ferrule.archs.spec import ModelSpec, Rope


def olmo3(config: Config) -> ModelSpec:
    """Every fourth layer uses full attention."""
    config = config.with_defaults(max_position_embeddings=2048, rope_theta=5e5).with_absent(sliding_window=4096)
    return olmo2(
        config,
        windows=layer_windows(
            config, sliding=lambda index: (index + 1) % 4 != 0, window=config.integer_or_none("sliding_window")
        ),
        rope_of=lambda layer_type: _rope(config, layer_type),
    )


def _rope(config: Config, layer_type: str) -> Rope:
    """Old files have one scaling, which applies to full-attention layers."""
    if layer_type == "sliding_attention":
        config = config.without("rope_scaling")
    return read_rope(config, config.head_dim, layer_type)
