"""Mistral (Jiang et al. 2023): Llama with one sliding window for all layers."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.spec import ModelSpec


def mistral(config: Config) -> ModelSpec:
    """`sliding_window` null means none; left out, it means the 4096 of the first release."""
    absent = "sliding_window" in config.values and "sliding_window" not in config
    window = None if absent else config.whole("sliding_window", default=4096)
    config = config.with_defaults(max_position_embeddings=131_072)
    return decoder(config, windows=[window] * config.layers)
