"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with biases on queries, keys and values."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder, layer_windows
from ferrule.archs.spec import ModelSpec


def qwen2(config: Config) -> ModelSpec:
    """Some layers have windows if `use_sliding_window` is true."""
    config = config.with_defaults(max_position_embeddings=32_768).with_absent(num_key_value_heads=32)
    return decoder(config, windows=qwen_windows(config), qkv_bias=True)


def qwen_windows(config: Config) -> list[int | None]:
    """Returns the window of each layer; old files have windows from layer `max_window_layers` on."""
    switched = config.flag("use_sliding_window", default=False)
    window = config.with_absent(sliding_window=4096).integer_or_none("sliding_window") if switched else None
    first = config.integer("max_window_layers", default=28, low=0)
    return layer_windows(config, sliding=lambda index: window is not None and index >= first, window=window)
