"""Jais 2 (Inception, MBZUAI, Cerebras 2025): layer norms, biases, and a squared ReLU without a gate."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.spec import Dense, LayerNorm, ModelSpec


def jais2(config: Config) -> ModelSpec:
    """Biases are on by default."""
    config = config.with_defaults(hidden_act="relu2", max_position_embeddings=8192)
    bias = config.flag("attention_bias", default=True)
    mlp_bias = config.flag("mlp_bias", default=True)
    return decoder(
        config,
        norm=LayerNorm(config.number("layer_norm_eps", default=1e-5)),
        qkv_bias=bias,
        output_bias=bias,
        ffn=Dense(config.integer("intermediate_size"), config.activation, gated=False, bias=mlp_bias),
    )
