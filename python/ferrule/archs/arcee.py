"""Arcee's AFM (Arcee AI 2025): Llama with a squared ReLU in place of the gate."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.spec import Dense, ModelSpec


def arcee(config: Config) -> ModelSpec:
    """Biases are set by the file."""
    config = config.with_defaults(hidden_act="relu2", max_position_embeddings=4096, rms_norm_eps=1e-5)
    bias = config.flag("attention_bias", default=False)
    mlp_bias = config.flag("mlp_bias", default=False)
    return decoder(
        config,
        qkv_bias=bias,
        output_bias=bias,
        ffn=Dense(config.integer("intermediate_size"), config.activation, gated=False, bias=mlp_bias),
    )
