"""DeepSeek-V2 (DeepSeek-AI 2024): keys and values out of one latent vector, and small experts beside shared ones."""

import math
from collections.abc import Sequence
from typing import Any

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.rope import rope_parameters, yarn_mscale
from ferrule.spec import Dense, Experts, Ffn, LatentProjections, ModelSpec, RmsNorm, Router

MIXTURE_MODULES = {
    "ffn.router.correction_bias": "model.layers.{layer}.mlp.gate.e_score_correction_bias",
    "ffn.shared.gate": "model.layers.{layer}.mlp.shared_experts.gate_proj",
    "ffn.shared.up": "model.layers.{layer}.mlp.shared_experts.up_proj",
    "ffn.shared.down": "model.layers.{layer}.mlp.shared_experts.down_proj",
}
"""Where the checkpoints keep what other families' mixtures lack."""
LATENT_EPS = 1e-6
"""Of the latents' norms; it is not in the file."""


def deepseek_v2(config: Config) -> ModelSpec:
    """Weights of experts are their softmax scores, times a factor."""
    config = config.spelled(n_routed_experts="num_experts").with_absent(q_lora_rank=1536)
    config = config.with_defaults(
        max_position_embeddings=2048,
        first_k_dense_replace=0,
        moe_intermediate_size=1407,
        n_routed_experts=64,
        n_shared_experts=2,
    )
    # With these DeepSeek's own code and transformers' differ.
    config.require(norm_topk_prob=False)
    config.require(scoring_func="softmax")
    method = config.text("topk_method", default="greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise config.unsupported("topk_method", "greedy or group_limited_greedy")
    limited = method == "group_limited_greedy"
    router = Router(
        scale=config.number("routed_scaling_factor", default=1.0),
        groups=config.whole("n_group") if limited else 1,
        groups_chosen=config.whole("topk_group") if limited else 1,
        group_score="max",
    )
    return latent_decoder(config, mixtures_after_dense(config, mixture(config, router)), interleaved=True)


def latent_decoder(config: Config, ffn: Ffn | Sequence[Ffn], *, interleaved: bool, **switches: Any) -> ModelSpec:
    """What families with latent attention have in common; `ffn` and `switches` as `decoder` takes them."""
    config.require(mlp_bias=False)
    projections = LatentProjections(
        query_rank=config.whole_or_none("q_lora_rank"),
        kv_rank=config.whole("kv_lora_rank", default=512),
        nope_dim=config.whole("qk_nope_head_dim", default=128),
        rope_dim=config.whole("qk_rope_head_dim", default=64),
        value_dim=config.whole("v_head_dim", default=128),
        norm=RmsNorm(LATENT_EPS),
        bias=config.flag("attention_bias", default=False),
    )
    return decoder(
        config,
        interleaved=interleaved,
        projections=projections,
        output_bias=projections.bias,
        scale=(projections.nope_dim + projections.rope_dim) ** -0.5 * _sharpening(config),
        ffn=ffn,
        **switches,
        modules={
            "attention.q_a": "model.layers.{layer}.self_attn.q_a_proj",
            "attention.q_a_norm": "model.layers.{layer}.self_attn.q_a_layernorm",
            "attention.q_b": "model.layers.{layer}.self_attn.q_b_proj",
            "attention.kv_a": "model.layers.{layer}.self_attn.kv_a_proj_with_mqa",
            "attention.kv_a_norm": "model.layers.{layer}.self_attn.kv_a_layernorm",
            "attention.kv_b": "model.layers.{layer}.self_attn.kv_b_proj",
            **MIXTURE_MODULES,
        },
    )


def mixture(config: Config, router: Router) -> Experts:
    """Experts of `moe_intermediate_size`, and for all tokens one network as wide as the shared ones together."""
    width = config.whole("moe_intermediate_size")
    return Experts(
        experts=config.whole("n_routed_experts"),
        experts_per_token=config.whole("num_experts_per_tok"),
        expert=Dense(width, config.activation),
        router=router,
        shared=Dense(width * config.whole("n_shared_experts"), config.activation),
    )


def mixtures_after_dense(config: Config, experts: Experts) -> list[Ffn]:
    """The network of each layer: dense in the first `first_k_dense_replace`."""
    config.require(moe_layer_freq=1)
    dense = min(config.whole("first_k_dense_replace", low=0), config.layers)
    first = [Dense(config.whole("intermediate_size"), config.activation)] * dense
    return [*first, *[experts] * (config.layers - dense)]


def listed_mixtures(config: Config, experts: Experts) -> list[Ffn]:
    """The network of each layer, as `mlp_layer_types` says; empty where it is missing."""
    types = config.texts("mlp_layer_types")
    if types and (len(types) != config.layers or any(kind not in ("dense", "sparse") for kind in types)):
        raise config.error("mlp_layer_types", f"a list of {config.layers}, each one dense or sparse")
    if all(kind == "sparse" for kind in types):
        return [experts] * len(types)
    dense = Dense(config.whole("intermediate_size"), config.activation)
    return [experts if kind == "sparse" else dense for kind in types]


def _sharpening(config: Config) -> float:
    """What a scaled rotation does to the scores beyond `attention_factor`, which is for the rotated elements alone."""
    parameters = rope_parameters(config)
    kind = parameters.values.get("rope_type", parameters.values.get("type", "default"))
    all_dim = parameters.number("mscale_all_dim", default=0.0, low=0.0)
    if kind == "default" or not all_dim:
        return 1.0
    mscale = yarn_mscale(parameters.number("factor"), all_dim)
    if math.isinf(mscale * mscale):
        raise parameters.error("mscale_all_dim", "small enough for scores to be finite")
    return mscale * mscale
