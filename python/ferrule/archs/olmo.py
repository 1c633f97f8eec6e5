"""OLMo (Groeneveld et al. 2024): Llama with norms without weights, and clipped queries, keys and values."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.spec import LayerNorm, ModelSpec


def olmo(config: Config) -> ModelSpec:
    """The epsilon of the norms is a constant."""
    bias = config.flag("attention_bias", default=False)
    return decoder(
        config.with_defaults(max_position_embeddings=2048),
        norm=LayerNorm(eps=1e-5, weight=False, bias=False),
        qkv_bias=bias,
        output_bias=bias,
        clip=config.number_or_none("clip_qkv"),
    )
