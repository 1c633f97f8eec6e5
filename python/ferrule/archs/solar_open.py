"""Solar Open (Upstage 2025): grouped-query attention, and DeepSeek-V3's experts in every layer."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.experts import EXPERT_MODULES, corrected_router, routed_experts
from ferrule.archs.spec import ModelSpec


def solar_open(config: Config) -> ModelSpec:
    """The output projection has no bias."""
    config = config.spelled(n_routed_experts="num_local_experts").with_absent(num_key_value_heads=8)
    config = config.with_defaults(
        head_dim=128,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        moe_intermediate_size=1280,
        n_routed_experts=128,
        n_shared_experts=1,
        num_experts_per_tok=8,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
    )
    return decoder(
        config,
        partial_rotary=1.0,
        qkv_bias=config.flag("attention_bias", default=False),
        ffn=routed_experts(config, corrected_router(config)),
        modules=EXPERT_MODULES,
    )
