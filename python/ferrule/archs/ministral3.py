"""Ministral 3 (Mistral AI 2025): Mistral with YaRN, and with queries that grow beyond the original context."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.rope import query_growth
from ferrule.archs.spec import ModelSpec


def with_yarn(config: Config, *, rope_theta: float, factor: float, original: int) -> Config:
    """Returns a configuration with the rotary embedding of Mistral's classes, unless it has one."""
    if "rope_scaling" in config:
        return config
    scaling = {"factor": factor, "original_max_position_embeddings": original, "mscale": 1.0, "mscale_all_dim": 1.0}
    return config.with_defaults(
        rope_parameters={"rope_type": "yarn", "rope_theta": rope_theta, "llama_4_scaling_beta": 0.1, **scaling}
    )


def ministral3(config: Config) -> ModelSpec:
    """The text model of most Mistral 3 checkpoints."""
    config = config.with_defaults(head_dim=128, max_position_embeddings=262_144, rms_norm_eps=1e-5)
    config = with_yarn(config.with_absent(num_key_value_heads=8), rope_theta=1e6, factor=16.0, original=16_384)
    return decoder(
        config,
        windows=[config.integer_or_none("sliding_window")] * config.layers,
        query_growth=query_growth(config),
    )
