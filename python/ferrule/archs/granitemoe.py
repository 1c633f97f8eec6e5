"""Granite's MoE models (Granite Team, IBM 2024): stacked experts, weighted by the softmax of the chosen logits."""

from collections.abc import Mapping
from typing import Any

from ferrule.archs.config import Config
from ferrule.archs.granite import granite
from ferrule.archs.spec import Dense, Experts, ModelSpec, Router
from ferrule.archs.tensors import Fused, fused


def granitemoe(
    config: Config, shared: Dense | None = None, modules: Mapping[str, str | Fused] | None = None, **switches: Any
) -> ModelSpec:
    """`shared` is the shared expert of the granitemoeshared family, `modules` its module names.

    `switches` are those of `decoder`.
    """
    config.require(mlp_bias=False)
    intermediate, experts = config.integer("intermediate_size"), config.experts("num_local_experts", default=8)
    block = "model.layers.{layer}.block_sparse_moe"
    gate_up = {"ffn.experts.gate.weight": intermediate, "ffn.experts.up.weight": intermediate}
    return granite(
        config,
        ffn=Experts(
            experts=experts,
            experts_per_token=config.integer("num_experts_per_tok", default=2),
            expert=Dense(intermediate, config.activation),
            router=Router(scoring="softmax_of_chosen"),
            shared=shared,
        ),
        modules={
            "ffn.router": f"{block}.router.layer",
            **fused(f"{block}.input_linear.weight", gate_up, stack=experts),
            **fused(f"{block}.output_linear.weight", "ffn.experts.down.weight", stack=experts),
            **(modules or {}),
        },
        **switches,
    )
