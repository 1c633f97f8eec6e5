"""Granite's MoE models with a shared expert (Granite Team, IBM 2024)."""

from collections.abc import Mapping
from typing import Any

from ferrule.archs.config import Config
from ferrule.archs.granitemoe import granitemoe
from ferrule.archs.spec import Dense, ModelSpec
from ferrule.archs.tensors import Fused, fused


def granitemoeshared(config: Config, modules: Mapping[str, str | Fused] | None = None, **switches: Any) -> ModelSpec:
    """There is no shared expert if `shared_intermediate_size` is 0; `modules` and `switches` are those of `decoder`."""
    width = config.integer("shared_intermediate_size", default=0, low=0)
    if not width:
        return granitemoe(config, modules=modules, **switches)
    block = "model.layers.{layer}.shared_mlp"
    return granitemoe(
        config,
        shared=Dense(width, config.activation),
        modules={
            **fused(f"{block}.input_linear", {"ffn.shared.gate": width, "ffn.shared.up": width}),
            "ffn.shared.down": f"{block}.output_linear",
            **(modules or {}),
        },
        **switches,
    )
