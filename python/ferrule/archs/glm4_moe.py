"""GLM-4.5 to 4.7 (GLM Team 2025): half of each head rotated, and DeepSeek-V3's experts."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.experts import EXPERT_MODULES, corrected_router, experts_after_dense, routed_experts
from ferrule.archs.spec import HeadNorm, ModelSpec, RmsNorm


def glm4_moe(config: Config) -> ModelSpec:
    """Large models normalize each query and key head. Multi-token prediction layers are ignored."""
    config = config.spelled(n_routed_experts="num_local_experts").with_absent(num_key_value_heads=8)
    config = config.with_defaults(
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        first_k_dense_replace=1,
        moe_intermediate_size=1408,
        n_routed_experts=128,
        n_shared_experts=1,
        num_experts_per_tok=8,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
    )
    normed = config.flag("use_qk_norm", default=False)
    return decoder(
        config,
        partial_rotary=0.5,
        qkv_bias=config.flag("attention_bias", default=False),
        qk_norm=HeadNorm(RmsNorm(config.number("rms_norm_eps"))) if normed else None,
        ffn=experts_after_dense(config, routed_experts(config, corrected_router(config))),
        modules=EXPERT_MODULES,
    )
