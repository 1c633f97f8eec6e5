"""Granite's MoE models with sinks, and with a window and a rotary base for each layer (Granite Team, IBM 2026)."""

from ferrule.archs.config import Config
from ferrule.archs.granite_swa import SINKS, ropes, windows
from ferrule.archs.granitemoeshared import granitemoeshared
from ferrule.archs.spec import ModelSpec
from ferrule.archs.tensors import fused


def granitemoe_swa(config: Config) -> ModelSpec:
    """There is no shared expert if `shared_intermediate_size` is 0."""
    config = config.with_absent(sliding_window=128)
    intermediate, experts = config.integer("intermediate_size"), config.experts("num_local_experts", default=8)
    block = "model.layers.{layer}.block_sparse_moe"
    gate_up = {"ffn.experts.gate.weight": intermediate, "ffn.experts.up.weight": intermediate}
    return granitemoeshared(
        config,
        windows=windows(config),
        layer_ropes=ropes(config),
        sinks=True,
        modules={
            **SINKS,
            "ffn.router": f"{block}.router",
            **fused(f"{block}.experts.gate_up_proj", gate_up, stack=experts),
            **fused(f"{block}.experts.down_proj", "ffn.experts.down.weight", stack=experts),
        },
    )
