"""Nemotron-3 and 4 (NVIDIA 2024): layer norms whose weights are offsets from 1, and a squared ReLU without a gate."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.spec import Dense, LayerNorm, ModelSpec


def nemotron(config: Config) -> ModelSpec:
    """Half of each head is rotated by default."""
    config = config.with_defaults(hidden_act="relu2", max_position_embeddings=4096)
    bias = config.flag("attention_bias", default=False)
    mlp_bias = config.flag("mlp_bias", default=False)
    return decoder(
        config,
        norm=LayerNorm(config.number("norm_eps", default=1e-5), weight_offset=1.0),
        partial_rotary=0.5,
        qkv_bias=bias,
        output_bias=bias,
        ffn=Dense(config.integer("intermediate_size"), config.activation, gated=False, bias=mlp_bias),
    )
