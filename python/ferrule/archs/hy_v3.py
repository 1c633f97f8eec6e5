"""Hunyuan 3 (Tencent 2026): query and key norms, and DeepSeek-V3's experts without groups."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.experts import corrected_router, experts_after_dense, experts_by_layer_type, routed_experts
from ferrule.archs.spec import HeadNorm, ModelSpec, RmsNorm


def hy_v3(config: Config) -> ModelSpec:
    """Multi-token prediction layers are ignored."""
    config.require(mlp_bias=False, qk_norm=True, route_norm=True)
    config.require(moe_router_use_sigmoid=True, moe_router_enable_expert_bias=True)
    config = config.spelled(
        n_routed_experts="num_experts",
        n_shared_experts="num_shared_experts",
        routed_scaling_factor="router_scaling_factor",
    )
    config = config.with_defaults(
        head_dim=128,
        max_position_embeddings=131_072,
        moe_intermediate_size=1536,
        n_routed_experts=192,
        num_experts_per_tok=8,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        rope_theta=11_158_840.0,
        first_k_dense_replace=1,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=2.826,
    )
    experts = routed_experts(config, corrected_router(config))
    bias = config.flag("attention_bias", default=False)
    block = "model.layers.{layer}.mlp"
    return decoder(
        config,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=HeadNorm(RmsNorm(config.number("rms_norm_eps"))),
        ffn=experts_by_layer_type(config, experts) or experts_after_dense(config, experts),
        modules={
            "ffn.router": f"{block}.router.gate",
            "ffn.router.correction_bias": f"{block}.expert_bias",
            "ffn.shared.gate": f"{block}.shared_mlp.gate_proj",
            "ffn.shared.up": f"{block}.shared_mlp.up_proj",
            "ffn.shared.down": f"{block}.shared_mlp.down_proj",
        },
    )
