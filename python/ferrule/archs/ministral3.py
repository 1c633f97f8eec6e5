"""Ministral 3 (Mistral AI 2025): Mistral with YaRN, and with queries that grow beyond the original context."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.rope import query_growth
from ferrule.archs.spec import ModelSpec


def ministral3(config: Config) -> ModelSpec:
    """The text model of most Mistral 3 checkpoints."""
    config = config.with_defaults(
        head_dim=128, max_position_embeddings=262_144, rms_norm_eps=1e-5, rope_theta=1e6
    ).with_absent(num_key_value_heads=8)
    return decoder(
        config,
        windows=[config.integer_or_none("sliding_window")] * config.layers,
        query_growth=query_growth(config),
    )
