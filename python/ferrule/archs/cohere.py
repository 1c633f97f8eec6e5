"""Command R (Cohere 2024): parallel blocks with one norm; interleaved rotary embedding."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.spec import HeadNorm, LayerNorm, LmHead, ModelSpec


def cohere(config: Config) -> ModelSpec:
    """Command R+ normalizes queries and keys with separate weights for each head."""
    config = config.with_defaults(max_position_embeddings=8192, rope_theta=500_000.0)
    bias = config.flag("attention_bias", default=False)
    norm = cohere_norm(config)
    return decoder(
        config,
        norm=norm,
        parallel="one_norm",
        interleaved=True,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=HeadNorm(norm, over="each_head") if config.flag("use_qk_norm", default=False) else None,
        lm_head=cohere_head(config),
    )


def cohere_norm(config: Config) -> LayerNorm:
    """LayerNorm without a bias."""
    return LayerNorm(config.number("layer_norm_eps", default=1e-5), bias=False)


def cohere_head(config: Config) -> LmHead:
    """Tied lm_head with scaled logits."""
    return LmHead(
        tied=config.flag("tie_word_embeddings", default=True),
        scale=config.number("logit_scale", default=0.0625),
    )
