"""ERNIE 4.5's MoE models (Baidu 2025): softmax scores with a correction bias, and shared experts."""

from ferrule.archs.config import MAX_LAYERS, Config
from ferrule.archs.ernie4_5 import ernie_decoder
from ferrule.archs.experts import EXPERT_MODULES
from ferrule.archs.spec import Dense, Experts, Ffn, LmHead, ModelSpec, Router

SMALLEST_SUM = 1e-6
"""Smallest sum of the chosen experts' weights; a larger `moe_norm_min` would change results."""


def ernie4_5_moe(config: Config) -> ModelSpec:
    """Layers from `moe_layer_start_index` to `moe_layer_end_index` have experts, each one or at intervals."""
    config = config.spelled(num_experts="moe_num_experts", num_experts_per_tok="moe_k")
    config = config.with_absent(num_key_value_heads=4)
    if config.number("moe_norm_min", default=1e-12) > SMALLEST_SUM:
        raise config.unsupported("moe_norm_min", f"at most {SMALLEST_SUM:g}")
    bias = config.flag("use_bias", default=False)
    return ernie_decoder(
        config,
        ffn=_ffns(config, bias=bias),
        lm_head=LmHead(tied=config.flag("tie_word_embeddings", default=True), bias=bias),
        modules={
            **EXPERT_MODULES,
            "ffn.router.correction_bias": "model.layers.{layer}.mlp.moe_statics.e_score_correction_bias",
        },
    )


def _ffns(config: Config, *, bias: bool) -> list[Ffn]:
    width = config.integer("moe_intermediate_size", default=1536)
    shared = config.integer("moe_num_shared_experts", default=2, low=0)
    experts = Experts(
        experts=config.experts("num_experts", default=64),
        experts_per_token=config.integer("num_experts_per_tok", default=6),
        expert=Dense(width, config.activation),
        router=Router(normalize=True, correction_bias=True),
        shared=Dense(width * shared, config.activation, bias=bias) if shared else None,
    )
    dense = Dense(config.integer("intermediate_size"), config.activation, bias=bias)
    first = config.integer("moe_layer_start_index", default=1, low=0, high=MAX_LAYERS)
    last = config.integer("moe_layer_end_index", default=-1, low=-1, high=MAX_LAYERS)
    interval = config.integer("moe_layer_interval", default=1)

    def is_sparse(index: int) -> bool:
        return first <= index and (last == -1 or index <= last) and (index + 1) % interval == 0

    return [experts if is_sparse(index) else dense for index in range(config.layers)]
