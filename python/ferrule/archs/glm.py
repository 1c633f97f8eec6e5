"""GLM-4 of 2024 (GLM Team 2024): Llama with half of each head rotated, interleaved, and a fused gate."""

from collections.abc import Mapping
from typing import Literal

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.spec import ModelSpec
from ferrule.archs.tensors import fused


def glm(
    config: Config, norms: Literal["before", "around"] = "before", modules: Mapping[str, str] | None = None
) -> ModelSpec:
    """`norms` and `modules` are those of `decoder`."""
    config = config.with_defaults(head_dim=128, max_position_embeddings=131_072, rms_norm_eps=1.5625e-7)
    config = config.with_absent(num_key_value_heads=2)
    intermediate = config.integer("intermediate_size")
    gate_up = {"ffn.gate": intermediate, "ffn.up": intermediate}
    return decoder(
        config,
        norms=norms,
        partial_rotary=0.5,
        interleaved=True,
        qkv_bias=config.flag("attention_bias", default=True),
        modules={**fused("model.layers.{layer}.mlp.gate_up_proj", gate_up), **(modules or {})},
    )
