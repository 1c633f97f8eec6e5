"""Qwen3.5 and Qwen3.6 (Qwen Team 2026): Qwen3-Next's layers with flat projections, dense or with experts."""

from ferrule.archs.config import Config
from ferrule.archs.qwen3_next import gated_decoder, read_delta_net, shared_experts
from ferrule.archs.spec import DeltaNet, Dense, ModelSpec
from ferrule.archs.tensors import Fused, fused


def qwen3_5(config: Config) -> ModelSpec:
    """Images have positions on three axes, which are equal for text."""
    config = config.with_defaults(max_position_embeddings=32_768).with_absent(num_key_value_heads=4)
    delta_net = read_delta_net(config)
    ffn = Dense(config.integer("intermediate_size", default=12_288), config.activation)
    interval = config.integer("full_attention_interval", default=4)
    return gated_decoder(config, delta_net, ffn, delta_net_modules(delta_net), interval=interval)


def qwen3_5_moe(config: Config) -> ModelSpec:
    """All layers have experts; the weights of the chosen ones are divided by their sum."""
    config = config.with_defaults(
        max_position_embeddings=32_768,
        moe_intermediate_size=512,
        num_experts=256,
        num_experts_per_tok=8,
        shared_expert_intermediate_size=512,
    ).with_absent(num_key_value_heads=2)
    delta_net = read_delta_net(config)
    ffn = shared_experts(config, normalize=True)
    interval = config.integer("full_attention_interval", default=4)
    return gated_decoder(config, delta_net, ffn, delta_net_modules(delta_net), interval=interval)


def delta_net_modules(delta_net: DeltaNet) -> dict[str, str | Fused]:
    """Returns the module names of delta nets with flat projections."""
    at = "model.layers.{layer}.linear_attn"
    keys, values = delta_net.key_heads * delta_net.key_dim, delta_net.value_heads * delta_net.value_dim
    return {
        **fused(f"{at}.in_proj_qkv", {"delta_net.q": keys, "delta_net.k": keys, "delta_net.v": values}),
        "delta_net.gate": f"{at}.in_proj_z",
        "delta_net.factor": f"{at}.in_proj_b",
        "delta_net.decay": f"{at}.in_proj_a",
    }
