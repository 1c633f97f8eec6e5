"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with biases on queries, keys and values."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder, layer_windows
from ferrule.spec import ModelSpec


def qwen2(config: Config) -> ModelSpec:
    """Windows on some layers where `use_sliding_window` says so."""
    config = config.with_defaults(max_position_embeddings=32_768)
    return decoder(config, windows=layer_windows(config), qkv_bias=True)
