"""Seed-OSS (ByteDance Seed 2025): Llama with biases on queries, keys and values."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.spec import ModelSpec


def seed_oss(config: Config) -> ModelSpec:
    """The bias of the output projection has a separate switch."""
    config = config.with_defaults(head_dim=128, max_position_embeddings=524_288).with_absent(num_key_value_heads=8)
    return decoder(
        config,
        qkv_bias=config.flag("attention_bias", default=True),
        output_bias=config.flag("attention_out_bias", default=False),
        mlp_bias=config.flag("mlp_bias", default=False),
    )
