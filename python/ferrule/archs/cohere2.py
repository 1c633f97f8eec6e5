"""Command R7B and Command A (Cohere 2025): Command R with sliding windows; full-attention layers are not rotated."""

from ferrule.archs.cohere import cohere_head, cohere_norm
from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder, layer_windows
from ferrule.archs.spec import ModelSpec


def cohere2(config: Config) -> ModelSpec:
    """Three of four layers have a window."""
    config = config.with_defaults(max_position_embeddings=8192).with_absent(sliding_window=4096)
    pattern = config.integer("sliding_window_pattern", default=4)
    windows = layer_windows(
        config, sliding=lambda index: (index + 1) % pattern != 0, window=config.integer_or_none("sliding_window")
    )
    bias = config.flag("attention_bias", default=False)
    return decoder(
        config,
        norm=cohere_norm(config),
        parallel="one_norm",
        windows=windows,
        rotated=[window is not None for window in windows],
        interleaved=True,
        qkv_bias=bias,
        output_bias=bias,
        lm_head=cohere_head(config),
    )
