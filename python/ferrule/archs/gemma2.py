"""Gemma 2 (Gemma Team 2024): Gemma with norms around both blocks, soft caps, and windows on every other layer."""

from typing import Literal

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder, layer_windows
from ferrule.archs.gemma import gemma_embedding, gemma_norm
from ferrule.archs.spec import Dense, LmHead, ModelSpec

NORMS_AROUND = {
    "attention_post_norm": "model.layers.{layer}.post_attention_layernorm",
    "ffn_norm": "model.layers.{layer}.pre_feedforward_layernorm",
    "ffn_post_norm": "model.layers.{layer}.post_feedforward_layernorm",
}
"""Module names of the norms around the blocks in Gemma's checkpoints."""


def gemma2(config: Config, norms: Literal["before", "around"] = "around") -> ModelSpec:
    """Every other layer has a window, starting with the first. `norms` is that of `decoder`."""
    config = config.with_defaults(head_dim=256, max_position_embeddings=8192).with_absent(
        num_key_value_heads=4, sliding_window=4096, attn_logit_softcapping=50.0, final_logit_softcapping=30.0
    )
    config.require(use_bidirectional_attention=False)
    activation = config.activation_named("hidden_activation", default="gelu_pytorch_tanh")
    bias = config.flag("attention_bias", default=False)
    return decoder(
        config,
        norm=gemma_norm(config),
        norms=norms,
        windows=layer_windows(
            config, sliding=lambda index: index % 2 == 0, window=config.integer_or_none("sliding_window")
        ),
        qkv_bias=bias,
        output_bias=bias,
        scale=config.number("query_pre_attn_scalar", default=256.0) ** -0.5,
        softcap=config.number_or_none("attn_logit_softcapping"),
        ffn=Dense(config.integer("intermediate_size"), activation),
        embedding=gemma_embedding(config),
        lm_head=LmHead(
            tied=config.flag("tie_word_embeddings", default=True),
            softcap=config.number_or_none("final_logit_softcapping"),
        ),
        modules=NORMS_AROUND,
    )
