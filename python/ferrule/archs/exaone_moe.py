"""K-EXAONE (LG AI Research 2025): EXAONE's windows and rotary embedding, pre-norms, DeepSeek-V3's experts."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.exaone4 import exaone_defaults, exaone_rotated, exaone_windows
from ferrule.archs.experts import (
    EXPERT_MODULES,
    corrected_router,
    experts_after_dense,
    experts_by_layer_type,
    routed_experts,
)
from ferrule.archs.spec import HeadNorm, ModelSpec, RmsNorm


def exaone_moe(config: Config) -> ModelSpec:
    """Multi-token prediction layers are ignored."""
    config = exaone_defaults(config.spelled(n_routed_experts="num_experts", n_shared_experts="num_shared_experts"))
    config = config.with_defaults(
        first_k_dense_replace=1,
        moe_intermediate_size=1024,
        n_routed_experts=64,
        n_shared_experts=1,
        num_experts_per_tok=8,
        n_group=1,
        topk_group=1,
    )
    experts = routed_experts(config, corrected_router(config))
    windows = exaone_windows(config)
    return decoder(
        config,
        windows=windows,
        rotated=exaone_rotated(config, windows),
        qk_norm=HeadNorm(RmsNorm(config.number("rms_norm_eps"))),
        ffn=experts_by_layer_type(config, experts) or experts_after_dense(config, experts),
        modules={
            **EXPERT_MODULES,
            "ffn.router.correction_bias": "model.layers.{layer}.mlp.e_score_correction_bias",
        },
    )
