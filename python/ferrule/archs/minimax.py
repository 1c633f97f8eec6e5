"""MiniMax-01 (MiniMax 2025): lightning attention in most layers, softmax attention in some, and experts."""

import math
from dataclasses import replace

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.qwen3_next import attending_layers
from ferrule.archs.spec import Block, Dense, Experts, Layer, LightningAttention, ModelSpec, RmsNorm, Router
from ferrule.archs.tensors import fused

_LAYER = "model.layers.{layer}"
_EXPERTS = f"{_LAYER}.block_sparse_moe"
_OUTPUT_EPS = 1e-6
"""Epsilon of the norm of lightning attention's output, which config.json does not hold."""
FACTORS = {"attention": "full_attn", "lightning_attention": "linear_attn", "ffn": "mlp"}
"""Beginnings of the names of each block's factors."""


def minimax(config: Config) -> ModelSpec:
    """A block adds its output to its normed input, each with a factor."""
    config = config.spelled(num_local_experts="num_experts").with_absent(num_key_value_heads=8)
    config = config.with_defaults(max_position_embeddings=131_072, rms_norm_eps=1e-5, rope_theta=1e6)
    attending = set(attending_layers(config, interval=2) if "layer_types" in config else range(0, config.layers, 2))
    width = config.head_dim
    experts = Experts(
        experts=config.experts("num_local_experts", default=8),
        experts_per_token=config.integer("num_experts_per_tok", default=2),
        expert=Dense(config.integer("intermediate_size"), config.activation),
        router=Router(normalize=True),
    )
    at = f"{_LAYER}.self_attn"
    spec = decoder(
        config,
        windows=[
            config.integer_or_none("sliding_window") if layer in attending else None for layer in range(config.layers)
        ],
        rotated=[layer in attending for layer in range(config.layers)],
        residual_after_norm=True,
        mixers={layer: _lightning(config, layer) for layer in range(config.layers) if layer not in attending},
        ffn=experts,
        modules={
            "lightning_attention_norm": f"{_LAYER}.input_layernorm",
            **fused(f"{at}.qkv_proj", {f"lightning_attention.{role}": width for role in ("q", "k", "v")}),
            "lightning_attention.gate": f"{at}.output_gate",
            "lightning_attention.norm": f"{at}.norm",
            "lightning_attention.output": f"{at}.out_proj",
            "ffn.router": f"{_EXPERTS}.gate",
            "ffn.experts.gate": f"{_EXPERTS}.experts.{{expert}}.w1",
            "ffn.experts.up": f"{_EXPERTS}.experts.{{expert}}.w3",
            "ffn.experts.down": f"{_EXPERTS}.experts.{{expert}}.w2",
        },
    )
    return replace(
        spec, layers=[Layer(tuple(_scaled(config, block) for block in layer.blocks)) for layer in spec.layers]
    )


def _lightning(config: Config, layer: int) -> LightningAttention:
    """Returns the lightning attention of a layer: heads decay faster in the first layers, and the first heads do."""
    heads = config.heads
    of_layer = 1 - layer / (config.layers - 1 + 1e-5) + 1e-5
    return LightningAttention(
        head_dim=config.head_dim,
        decays=tuple(math.exp(-(2.0 ** (-8 * (head + 1) / heads)) * of_layer) for head in range(heads)),
        norm=RmsNorm(_OUTPUT_EPS),
        activation=config.activation,
    )


def _scaled(config: Config, block: Block) -> Block:
    """Returns a block with its factors."""
    name = FACTORS[block.name]
    stream, output = (
        config.number(f"{name}_{factor}_factor", default=1.0, low=-math.inf) for factor in ("alpha", "beta")
    )
    return replace(block, stream_scale=stream, residual_scale=output)
