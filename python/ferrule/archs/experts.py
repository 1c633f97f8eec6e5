"""Mixture of experts from the usual config keys, and the layers that have one."""

from ferrule.archs.config import MAX_LAYERS, Config
from ferrule.archs.spec import Dense, Experts, Ffn, Router

EXPERT_MODULES = {
    "ffn.router.correction_bias": "model.layers.{layer}.mlp.gate.e_score_correction_bias",
    "ffn.shared.gate": "model.layers.{layer}.mlp.shared_experts.gate_proj",
    "ffn.shared.up": "model.layers.{layer}.mlp.shared_experts.up_proj",
    "ffn.shared.down": "model.layers.{layer}.mlp.shared_experts.down_proj",
}
"""Module names of correction biases and shared experts in DeepSeek's checkpoints."""


def routed_experts(config: Config, router: Router) -> Experts:
    """Returns experts of `moe_intermediate_size`, and one shared expert as wide as `n_shared_experts` of them."""
    width = config.integer("moe_intermediate_size")
    return Experts(
        experts=config.experts("n_routed_experts"),
        experts_per_token=config.integer("num_experts_per_tok"),
        expert=Dense(width, config.activation),
        router=router,
        shared=Dense(width * config.integer("n_shared_experts"), config.activation),
    )


def corrected_router(config: Config) -> Router:
    """Returns DeepSeek-V3's router: sigmoid scores, a correction bias, and groups scored by their best two."""
    return Router(
        scoring="sigmoid",
        normalize=config.flag("norm_topk_prob", default=True),
        scale=config.number("routed_scaling_factor", default=2.5),
        correction_bias=True,
        groups=config.integer("n_group", default=8),
        groups_chosen=config.integer("topk_group", default=4),
        group_score="top2",
    )


def experts_after_dense(config: Config, experts: Experts) -> list[Ffn]:
    """Returns the network of each layer: dense in the first `first_k_dense_replace`, then experts."""
    config.require(moe_layer_freq=1)
    dense = min(config.integer("first_k_dense_replace", low=0), config.layers)
    first = [Dense(config.integer("intermediate_size"), config.activation)] * dense
    return [*first, *[experts] * (config.layers - dense)]


def experts_by_layer_type(config: Config, experts: Experts) -> list[Ffn]:
    """Returns the network of each layer by `mlp_layer_types`; empty if the field is missing."""
    types = config.layer_kinds("mlp_layer_types", "dense", "sparse")
    if all(kind == "sparse" for kind in types):
        return [experts] * len(types)
    dense = Dense(config.integer("intermediate_size"), config.activation)
    return [experts if kind == "sparse" else dense for kind in types]


def sparse_layers(config: Config, experts: Experts) -> list[Ffn]:
    """Returns the network of each layer: experts in every `decoder_sparse_step`-th, except for `mlp_only_layers`."""
    step = config.integer("decoder_sparse_step", default=1)
    dense_layers = set(config.integers("mlp_only_layers", low=0, high=MAX_LAYERS))
    sparse = [(index + 1) % step == 0 and index not in dense_layers for index in range(config.layers)]
    if all(sparse):
        return [experts] * len(sparse)
    dense = Dense(config.integer("intermediate_size"), config.activation)
    return [experts if is_sparse else dense for is_sparse in sparse]
