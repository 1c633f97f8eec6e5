"""Ling 2.0 and Ring 2.0 (inclusionAI 2025): half of each normalized head rotated, and DeepSeek-V3's experts."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.experts import EXPERT_MODULES, corrected_router, experts_after_dense, routed_experts
from ferrule.archs.kimi_linear import experts_spelled
from ferrule.archs.spec import HeadNorm, ModelSpec, RmsNorm
from ferrule.archs.tensors import fused

_LAYER = "model.layers.{layer}"
_ATTENTION = f"{_LAYER}.attention"

MODULES = {
    "embedding": "model.word_embeddings",
    "attention.q_norm": f"{_ATTENTION}.query_layernorm",
    "attention.k_norm": f"{_ATTENTION}.key_layernorm",
    "attention.output": f"{_ATTENTION}.dense",
    "ffn.router.correction_bias": f"{_LAYER}.mlp.gate.expert_bias",
}
"""Module names in which the checkpoints differ from DeepSeek's."""


def bailing_moe_v2(config: Config) -> ModelSpec:
    """Multi-token prediction layers are ignored."""
    config = experts_spelled(config).with_defaults(
        first_k_dense_replace=1,
        max_position_embeddings=32_768,
        moe_intermediate_size=512,
        n_routed_experts=256,
        rms_norm_eps=1e-6,
        rope_theta=600_000.0,
    )
    # The makers' code normalizes the experts' weights and each head, whatever these fields say.
    config.require(norm_head=False, norm_topk_prob=True, score_function="sigmoid", use_qk_norm=True)
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    rows = {"attention.q": queries, "attention.k": keys, "attention.v": keys}
    return decoder(
        config,
        partial_rotary=0.5,
        qkv_bias=config.flag("use_qkv_bias", default=False),
        output_bias=config.flag("use_bias", default=False),
        qk_norm=HeadNorm(RmsNorm(config.number("rms_norm_eps"))),
        ffn=experts_after_dense(config, routed_experts(config, corrected_router(config))),
        modules={**EXPERT_MODULES, **fused(f"{_ATTENTION}.query_key_value", rows), **MODULES},
    )
