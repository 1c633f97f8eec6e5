"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with biases on queries, keys and values."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder, layer_windows
from ferrule.archs.spec import ModelSpec


def qwen2(config: Config) -> ModelSpec:
    """Windows on some layers where `use_sliding_window` says so."""
    config = config.with_defaults(max_position_embeddings=32_768).with_absent(num_key_value_heads=32)
    return decoder(config, windows=qwen_windows(config), qkv_bias=True)


def qwen_windows(config: Config) -> list[int | None]:
    """The window of each layer: `use_sliding_window` switches all; in old files, layers from `max_window_layers` on."""
    switched = config.flag("use_sliding_window", default=False)
    window = config.with_absent(sliding_window=4096).whole_or_none("sliding_window") if switched else None
    first = config.whole("max_window_layers", default=28, low=0)
    return layer_windows(config, sliding=lambda index: window is not None and index >= first, window=window)
