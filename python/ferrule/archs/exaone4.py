"""EXAONE 4.0 (LG AI Research 2025): norms after the blocks and for each head; only sliding layers are rotated."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder, layer_windows
from ferrule.archs.olmo2 import NORMS_AFTER
from ferrule.archs.spec import HeadNorm, ModelSpec, RmsNorm


def exaone4(config: Config) -> ModelSpec:
    """The 1.2B model has no windows and rotates all layers."""
    config = exaone_defaults(config)
    windows = exaone_windows(config)
    return decoder(
        config,
        norms="after",
        windows=windows,
        rotated=exaone_rotated(config, windows),
        qk_norm=HeadNorm(RmsNorm(config.number("rms_norm_eps"))),
        modules=NORMS_AFTER,
    )


def exaone_defaults(config: Config) -> Config:
    """Defaults are those of transformers' classes."""
    return config.with_defaults(max_position_embeddings=2048, rms_norm_eps=1e-5).with_absent(
        num_key_value_heads=32, sliding_window=4096
    )


def exaone_windows(config: Config) -> list[int | None]:
    """Three of four layers have a window if the model has windows."""
    window = config.integer_or_none("sliding_window")

    def sliding(index: int) -> bool:
        return window is not None and (index + 1) % config.integer("sliding_window_pattern", default=4) != 0

    return layer_windows(config, sliding=sliding, window=window)


def exaone_rotated(config: Config, windows: list[int | None]) -> list[bool]:
    """Full-attention layers of models with windows are not rotated."""
    return [window is not None or "sliding_window" not in config for window in windows]
