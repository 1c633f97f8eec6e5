"""Phi-3.5-MoE (Microsoft 2024): layer norms, biases, and experts that are weighted by SparseMixer."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.spec import Dense, Experts, LayerNorm, LmHead, ModelSpec, Router


def phimoe(config: Config) -> ModelSpec:
    """Jitter of the input is for training only, that of the router counts."""
    config.require(num_experts_per_tok=2)
    config = config.with_defaults(max_position_embeddings=131_072, rope_theta=1e6).with_absent(
        num_key_value_heads=8, sliding_window=None
    )
    bias = config.flag("attention_bias", default=False)
    block = "model.layers.{layer}.block_sparse_moe"
    return decoder(
        config,
        norm=LayerNorm(config.number("rms_norm_eps", default=1e-5)),
        windows=[config.integer_or_none("sliding_window")] * config.layers,
        qkv_bias=bias,
        output_bias=bias,
        ffn=Experts(
            experts=config.experts("num_local_experts", default=16),
            experts_per_token=2,
            expert=Dense(config.integer("intermediate_size"), config.activation),
            router=Router(scoring="sparse_mixer", jitter=config.number("router_jitter_noise", default=0.01, low=0.0)),
        ),
        lm_head=LmHead(
            tied=config.flag("tie_word_embeddings", default=False), bias=config.flag("lm_head_bias", default=False)
        ),
        modules={
            "ffn.router": f"{block}.gate",
            "ffn.experts.gate": f"{block}.experts.{{expert}}.w1",
            "ffn.experts.up": f"{block}.experts.{{expert}}.w3",
            "ffn.experts.down": f"{block}.experts.{{expert}}.w2",
        },
    )
