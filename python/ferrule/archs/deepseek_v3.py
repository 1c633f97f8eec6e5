"""DeepSeek-V3 and R1 (DeepSeek-AI 2024): V2 with sigmoid scores and a router correction bias."""

from ferrule.archs.config import Config
from ferrule.archs.experts import corrected_router, experts_after_dense, routed_experts
from ferrule.archs.latent import latent_decoder
from ferrule.archs.spec import ModelSpec


def deepseek_v3(config: Config) -> ModelSpec:
    """Multi-token prediction layers are ignored."""
    config = config.spelled(n_routed_experts="num_local_experts").with_absent(q_lora_rank=1536)
    config = config.with_defaults(
        max_position_embeddings=4096,
        first_k_dense_replace=3,
        moe_intermediate_size=2048,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
    )
    config.require(scoring_func="sigmoid")
    config.require(topk_method="noaux_tc")
    ffns = experts_after_dense(config, routed_experts(config, corrected_router(config)))
    return latent_decoder(config, ffns, interleaved=config.flag("rope_interleave", default=True))
