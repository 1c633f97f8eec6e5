"""GLM-4-0414 (GLM Team 2025): GLM-4 with additional norms after both blocks."""

from ferrule.archs.config import Config
from ferrule.archs.glm import glm
from ferrule.archs.spec import ModelSpec


def glm4(config: Config) -> ModelSpec:
    """Missing fields have GLM-4's defaults."""
    return glm(
        config,
        norms="around",
        modules={
            "attention_post_norm": "model.layers.{layer}.post_self_attn_layernorm",
            "ffn_post_norm": "model.layers.{layer}.post_mlp_layernorm",
        },
    )
