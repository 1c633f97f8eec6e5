"""Llama (Touvron et al. 2023) and the many models published in its form."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.spec import ModelSpec


def llama(config: Config) -> ModelSpec:
    """Grouped-query attention; biases are set by the file."""
    bias = config.flag("attention_bias", default=False)
    return decoder(
        config.with_defaults(max_position_embeddings=2048),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias", default=False),
    )
