"""Falcon Mamba (TII 2024): Mamba with normed step sizes, keys and queries."""

from ferrule.archs.config import Config
from ferrule.archs.mamba import mamba
from ferrule.archs.spec import ModelSpec, RmsNorm


def falcon_mamba(config: Config) -> ModelSpec:
    """The norms have no weights."""
    return mamba(config, inner_norm=RmsNorm(config.number("mixer_rms_eps", default=1e-6), weight=False))
