"""Mistral 4 (Mistral AI 2026): DeepSeek's latent attention with Ministral 3's queries, and softmax-scored experts."""

from ferrule.archs.config import Config
from ferrule.archs.experts import experts_after_dense, routed_experts
from ferrule.archs.latent import latent_decoder
from ferrule.archs.ministral3 import with_yarn
from ferrule.archs.rope import query_growth
from ferrule.archs.spec import ModelSpec, Router
from ferrule.archs.tensors import fused


def mistral4(config: Config) -> ModelSpec:
    """All layers have experts unless `first_k_dense_replace` is given."""
    config = config.with_defaults(
        max_position_embeddings=1_048_576,
        n_routed_experts=128,
        n_shared_experts=1,
        num_experts_per_tok=4,
        moe_intermediate_size=2048,
        kv_lora_rank=256,
        qk_nope_head_dim=64,
        first_k_dense_replace=0,
        n_group=1,
        topk_group=1,
    ).with_absent(q_lora_rank=1024)
    # The rotated share of a head follows from qk_rope_head_dim.
    config = with_yarn(config, rope_theta=10_000.0, factor=128.0, original=8192)
    parameters = config.inner("rope_parameters").without("partial_rotary_factor")
    config = config.with_values(rope_parameters=parameters.values)
    router = Router(
        normalize=config.flag("norm_topk_prob", default=True),
        scale=config.number("routed_scaling_factor", default=1.0),
        groups=config.integer("n_group"),
        groups_chosen=config.integer("topk_group"),
    )
    experts = routed_experts(config, router)
    width = experts.expert.intermediate_size
    block = "model.layers.{layer}.mlp.experts"
    gate_up = {"ffn.experts.gate.weight": width, "ffn.experts.up.weight": width}
    return latent_decoder(
        config,
        experts_after_dense(config, experts),
        interleaved=config.flag("rope_interleave", default=True),
        query_growth=query_growth(config),
        modules={
            **fused(f"{block}.gate_up_proj", gate_up, stack=experts.experts),
            **fused(f"{block}.down_proj", "ffn.experts.down.weight", stack=experts.experts),
        },
    )
