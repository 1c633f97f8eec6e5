"""Granite (Granite Team, IBM 2024): Llama with multipliers on embeddings, scores, residuals and logits."""

from collections.abc import Mapping
from typing import Any

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.spec import Embedding, Ffn, LmHead, ModelSpec
from ferrule.archs.tensors import Fused


def granite(
    config: Config, ffn: Ffn | None = None, modules: Mapping[str, str | Fused] | None = None, **switches: Any
) -> ModelSpec:
    """Missing multipliers are 1, including that of scores. The other arguments are those of `decoder`."""
    bias = config.flag("attention_bias", default=False)
    return decoder(
        config.with_defaults(max_position_embeddings=2048),
        qkv_bias=bias,
        output_bias=bias,
        scale=config.number("attention_multiplier", default=1.0),
        ffn=ffn,
        mlp_bias=config.flag("mlp_bias", default=False),
        residual_scale=config.number("residual_multiplier", default=1.0),
        embedding=Embedding(scale=config.number("embedding_multiplier", default=1.0)),
        lm_head=LmHead(
            tied=config.flag("tie_word_embeddings", default=False),
            scale=1 / config.number("logits_scaling", default=1.0, low=1e-30),
        ),
        modules=modules,
        **switches,
    )
