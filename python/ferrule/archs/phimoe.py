"""Phi-3.5-MoE (Microsoft 2024): layer norms, biases, and experts that are weighted by SparseMixer."""

from dataclasses import replace

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.rope import read_rope, rope_parameters
from ferrule.archs.spec import (
    Dense,
    Experts,
    LayerNorm,
    LmHead,
    LongRopeScaling,
    ModelSpec,
    NoScaling,
    Rope,
    Router,
)


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
        rope_of=lambda _: _rope(config),
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


def _rope(config: Config) -> Rope:
    """Reads LongRoPE with `short_mscale` and `long_mscale`, the factors on cosine and sine by length.

    With them, the short divisors of frequencies apply to all lengths, as in transformers. GGUF files have one factor.
    """
    rope, parameters = read_rope(config, config.head_dim), rope_parameters(config)
    if isinstance(rope.scaling, NoScaling):
        return rope
    if not isinstance(rope.scaling, LongRopeScaling):
        raise parameters.unsupported("rope_type" if "rope_type" in parameters else "type", "default or longrope")
    if not {"short_mscale", "long_mscale"} & parameters.values.keys():
        return rope
    scaling = replace(
        rope.scaling,
        long_factor=rope.scaling.short_factor,
        attention_factor=parameters.number("short_mscale"),
        long_attention_factor=parameters.number("long_mscale"),
    )
    return replace(rope, scaling=scaling)
