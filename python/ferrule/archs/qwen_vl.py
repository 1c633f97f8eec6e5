"""Text models of Qwen2-VL, Qwen2.5-VL and Qwen3-VL (Wang et al. 2024, Bai et al. 2025).

Images have positions on three axes; for text all three are equal, which gives the usual rotary embedding.
"""

from ferrule.archs.config import Config
from ferrule.archs.qwen2 import qwen2
from ferrule.archs.qwen3 import qwen3
from ferrule.archs.qwen3_moe import qwen3_moe
from ferrule.archs.spec import ModelSpec
from ferrule.archs.tensors import fused


def qwen2_vl(config: Config) -> ModelSpec:
    """Qwen2 with other defaults."""
    config = config.with_defaults(max_window_layers=80, rms_norm_eps=1e-5, rope_theta=1e6)
    return qwen2(config.with_absent(num_key_value_heads=8))


def qwen3_vl(config: Config) -> ModelSpec:
    """Qwen3 with other defaults."""
    return qwen3(config.with_defaults(max_position_embeddings=128_000, rope_theta=5e5))


def qwen3_vl_moe(config: Config) -> ModelSpec:
    """Qwen3's MoE model with other defaults and stacked experts."""
    config = config.spelled(num_experts="num_local_experts").with_absent(num_key_value_heads=16)
    config = config.with_defaults(
        max_position_embeddings=128_000,
        moe_intermediate_size=1408,
        norm_topk_prob=True,
        num_experts=60,
        num_experts_per_tok=4,
        rope_theta=5e5,
    )
    config.require(norm_topk_prob=True)
    experts, intermediate = config.experts("num_experts"), config.integer("moe_intermediate_size")
    gate_up = {"ffn.experts.gate.weight": intermediate, "ffn.experts.up.weight": intermediate}
    block = "model.layers.{layer}.mlp.experts"
    return qwen3_moe(
        config,
        modules={
            **fused(f"{block}.gate_up_proj", gate_up, transposed=True, stack=experts),
            **fused(f"{block}.down_proj", "ffn.experts.down.weight", transposed=True, stack=experts),
        },
    )
