"""Granite's MoE models with a shared expert (Granite Team, IBM 2024)."""

from ferrule.archs.config import Config
from ferrule.archs.granitemoe import granitemoe
from ferrule.archs.spec import Dense, ModelSpec
from ferrule.archs.tensors import fused


def granitemoeshared(config: Config) -> ModelSpec:
    """There is no shared expert if `shared_intermediate_size` is 0."""
    width = config.integer("shared_intermediate_size", default=0, low=0)
    if not width:
        return granitemoe(config)
    block = "model.layers.{layer}.shared_mlp"
    return granitemoe(
        config,
        shared=Dense(width, config.activation),
        modules={
            **fused(f"{block}.input_linear", {"ffn.shared.gate": width, "ffn.shared.up": width}),
            "ffn.shared.down": f"{block}.output_linear",
        },
    )
