"""Phi-3 and Phi-4 (Abdin et al. 2024): Llama with fused projections, LongRoPE, and partially rotated heads."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.rope import rope_parameters
from ferrule.archs.spec import ModelSpec
from ferrule.archs.tensors import fused


def phi3(config: Config) -> ModelSpec:
    """All layers share one window, if any."""
    positions = {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096}
    config = config.with_defaults(rms_norm_eps=1e-5, **positions)
    parameters = rope_parameters(config)
    for field in ("rope_type", "type"):
        if parameters.values.get(field) == "yarn":
            raise parameters.unsupported(field, "default or longrope")
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    intermediate = config.integer("intermediate_size")
    return decoder(
        config,
        windows=[config.integer_or_none("sliding_window")] * config.layers,
        partial_rotary=1.0,
        modules={
            **fused(
                "model.layers.{layer}.self_attn.qkv_proj",
                {"attention.q": queries, "attention.k": keys, "attention.v": keys},
            ),
            **fused("model.layers.{layer}.mlp.gate_up_proj", {"ffn.gate": intermediate, "ffn.up": intermediate}),
        },
    )
