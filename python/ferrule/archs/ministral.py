"""Ministral (Mistral AI 2024): Mistral with windows on some layers."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder, layer_windows
from ferrule.archs.spec import ModelSpec


def ministral(config: Config) -> ModelSpec:
    """All layers have the window if `layer_types` is missing."""
    config = config.with_defaults(max_position_embeddings=131_072)
    config = config.with_absent(num_key_value_heads=8, sliding_window=4096)
    window = config.integer_or_none("sliding_window")
    return decoder(config, windows=layer_windows(config, sliding=lambda _: window is not None, window=window))
