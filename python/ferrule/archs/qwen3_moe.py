"""Qwen3's MoE models (Yang et al. 2025): Qwen3 with many small experts and no shared expert."""

from collections.abc import Mapping

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.experts import sparse_layers
from ferrule.archs.spec import Dense, Experts, HeadNorm, ModelSpec, RmsNorm, Router
from ferrule.archs.tensors import Fused


def qwen3_moe(config: Config, modules: Mapping[str, str | Fused] | None = None) -> ModelSpec:
    """All layers share one window if it is enabled. `modules` is that of `decoder`."""
    config = config.spelled(num_experts="num_local_experts").with_defaults(max_position_embeddings=32_768)
    config = config.with_absent(num_key_value_heads=4, sliding_window=4096)
    switched = config.flag("use_sliding_window", default=False)
    window = config.integer_or_none("sliding_window") if switched else None
    bias = config.flag("attention_bias", default=False)
    experts = Experts(
        experts=config.experts("num_experts", default=128),
        experts_per_token=config.integer("num_experts_per_tok", default=8),
        expert=Dense(config.integer("moe_intermediate_size", default=768), config.activation),
        router=Router(normalize=config.flag("norm_topk_prob", default=False)),
    )
    return decoder(
        config,
        windows=[window] * config.layers,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=HeadNorm(RmsNorm(config.number("rms_norm_eps", default=1e-6))),
        ffn=sparse_layers(config, experts),
        modules=modules,
    )
