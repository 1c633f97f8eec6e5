"""Qwen1.5-MoE and Qwen2-MoE (Yang et al. 2024): Qwen2 with many small experts and a shared expert."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder, layer_windows
from ferrule.archs.experts import sparse_layers
from ferrule.archs.spec import Dense, Experts, ModelSpec, Router


def qwen2_moe(config: Config) -> ModelSpec:
    """With windows enabled, every other layer below `max_window_layers` has one."""
    config = config.with_defaults(max_position_embeddings=32_768).with_absent(
        num_key_value_heads=16, sliding_window=4096
    )
    switched = config.flag("use_sliding_window", default=False)
    window = config.integer_or_none("sliding_window") if switched else None
    end = config.integer("max_window_layers", default=28, low=0)
    experts = Experts(
        experts=config.experts("num_experts", default=60),
        experts_per_token=config.integer("num_experts_per_tok", default=4),
        expert=Dense(config.integer("moe_intermediate_size", default=1408), config.activation),
        router=Router(normalize=config.flag("norm_topk_prob", default=False)),
        shared=Dense(config.integer("shared_expert_intermediate_size", default=5632), config.activation),
        shared_gate=True,
    )
    return decoder(
        config,
        windows=layer_windows(config, sliding=lambda index: switched and index % 2 == 0 and index < end, window=window),
        qkv_bias=config.flag("qkv_bias", default=True),
        ffn=sparse_layers(config, experts),
        modules={
            "ffn.shared.gate": "model.layers.{layer}.mlp.shared_expert.gate_proj",
            "ffn.shared.up": "model.layers.{layer}.mlp.shared_expert.up_proj",
            "ffn.shared.down": "model.layers.{layer}.mlp.shared_expert.down_proj",
            "ffn.shared_gate": "model.layers.{layer}.mlp.shared_expert_gate",
        },
    )
