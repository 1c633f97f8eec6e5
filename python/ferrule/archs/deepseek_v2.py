"""DeepSeek-V2 (DeepSeek-AI 2024): multi-head latent attention, and small experts beside shared experts."""

from ferrule.archs.config import Config
from ferrule.archs.experts import experts_after_dense, routed_experts
from ferrule.archs.latent import latent_decoder
from ferrule.archs.spec import ModelSpec, Router


def deepseek_v2(config: Config) -> ModelSpec:
    """Expert weights are softmax scores times a factor."""
    config = config.spelled(n_routed_experts="num_experts").with_absent(q_lora_rank=1536)
    config = config.with_defaults(
        max_position_embeddings=2048,
        first_k_dense_replace=0,
        moe_intermediate_size=1407,
        n_routed_experts=64,
        n_shared_experts=2,
    )
    # For these values DeepSeek's code and transformers' differ.
    config.require(norm_topk_prob=False)
    config.require(scoring_func="softmax")
    method = config.text("topk_method", default="greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise config.unsupported("topk_method", "greedy or group_limited_greedy")
    limited = method == "group_limited_greedy"
    router = Router(
        scale=config.number("routed_scaling_factor", default=1.0),
        groups=config.integer("n_group") if limited else 1,
        groups_chosen=config.integer("topk_group") if limited else 1,
        group_score="max",
    )
    return latent_decoder(config, experts_after_dense(config, routed_experts(config, router)), interleaved=True)
