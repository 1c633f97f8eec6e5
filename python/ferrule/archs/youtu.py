"""Youtu-LLM (Tencent 2025): DeepSeek-V3's latent attention in a dense model."""

from ferrule.archs.config import Config
from ferrule.archs.latent import latent_decoder
from ferrule.archs.spec import Dense, ModelSpec


def youtu(config: Config) -> ModelSpec:
    """All layers are dense."""
    config = config.with_defaults(max_position_embeddings=131_072, tie_word_embeddings=True).with_absent(
        q_lora_rank=1536, num_key_value_heads=16
    )
    dense = Dense(config.integer("intermediate_size"), config.activation)
    return latent_decoder(config, dense, interleaved=config.flag("rope_interleave", default=True))
