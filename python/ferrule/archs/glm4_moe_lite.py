"""GLM-4.7-Flash (GLM Team 2026): DeepSeek-V3 with other defaults."""

from ferrule.archs.config import Config
from ferrule.archs.experts import corrected_router, experts_after_dense, experts_by_layer_type, routed_experts
from ferrule.archs.latent import latent_decoder
from ferrule.archs.spec import ModelSpec


def glm4_moe_lite(config: Config) -> ModelSpec:
    """The first layer is dense by default; `mlp_layer_types` overrides."""
    config = config.spelled(n_routed_experts="num_local_experts").with_absent(q_lora_rank=768, num_key_value_heads=20)
    config = config.with_defaults(
        max_position_embeddings=202_752,
        rms_norm_eps=1e-5,
        moe_intermediate_size=1536,
        n_routed_experts=64,
        n_shared_experts=1,
        num_experts_per_tok=4,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.8,
        v_head_dim=256,
        qk_nope_head_dim=192,
    ).with_values(first_k_dense_replace=1)
    experts = routed_experts(config, corrected_router(config))
    return latent_decoder(
        config,
        experts_by_layer_type(config, experts) or experts_after_dense(config, experts),
        interleaved=config.flag("rope_interleave", default=True),
    )
