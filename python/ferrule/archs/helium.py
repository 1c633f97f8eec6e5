"""Helium (Kyutai 2025): Llama with an interleaved rotary embedding."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.spec import ModelSpec


def helium(config: Config) -> ModelSpec:
    """The output projection has no bias."""
    config = config.with_defaults(head_dim=128, max_position_embeddings=4096, rms_norm_eps=1e-8, rope_theta=100_000.0)
    return decoder(
        config.with_absent(num_key_value_heads=20),
        interleaved=True,
        qkv_bias=config.flag("attention_bias", default=False),
        mlp_bias=config.flag("mlp_bias", default=False),
    )
