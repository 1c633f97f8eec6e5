"""Mistral (Jiang et al. 2023): Llama with one sliding window for all layers."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.spec import ModelSpec


def mistral(config: Config) -> ModelSpec:
    """`sliding_window` null means full attention; a missing field means 4096, as in the first release."""
    config = config.with_defaults(max_position_embeddings=131_072).with_absent(
        num_key_value_heads=8, sliding_window=4096
    )
    return decoder(config, windows=[config.integer_or_none("sliding_window")] * config.layers)
