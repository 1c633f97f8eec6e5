"""Qwen3 (Yang et al. 2025): query and key norms for each head, and an independent head width."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.qwen2 import qwen_windows
from ferrule.archs.spec import HeadNorm, ModelSpec, RmsNorm


def qwen3(config: Config) -> ModelSpec:
    """Biases of attention's projections are set by the file."""
    bias = config.flag("attention_bias", default=False)
    config = config.with_defaults(head_dim=128, max_position_embeddings=32_768).with_absent(num_key_value_heads=32)
    return decoder(
        config,
        windows=qwen_windows(config),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=HeadNorm(RmsNorm(config.number("rms_norm_eps", default=1e-6))),
    )
