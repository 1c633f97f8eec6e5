"""Persimmon (Adept 2023): layer norms, a squared ReLU, half of each head rotated; the rows of a head are adjacent."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.spec import Dense, HeadNorm, LayerNorm, ModelSpec
from ferrule.archs.tensors import fused


def persimmon(config: Config) -> ModelSpec:
    """All projections and norms have biases, query and key norms included."""
    config = config.with_defaults(hidden_act="relu2", max_position_embeddings=16_384).without("num_key_value_heads")
    norm = LayerNorm(config.number("layer_norm_eps", default=1e-5))
    width = config.head_dim
    block = "model.layers.{layer}"
    return decoder(
        config,
        norm=norm,
        partial_rotary=0.5,
        qkv_bias=True,
        output_bias=True,
        qk_norm=HeadNorm(norm) if config.flag("qk_layernorm", default=True) else None,
        ffn=Dense(config.integer("intermediate_size"), config.activation, gated=False, bias=True),
        modules={
            **fused(
                f"{block}.self_attn.query_key_value",
                {"attention.q": width, "attention.k": width, "attention.v": width},
            ),
            "attention.output": f"{block}.self_attn.dense",
            "attention.q_norm": f"{block}.self_attn.q_layernorm",
            "attention.k_norm": f"{block}.self_attn.k_layernorm",
            "ffn.up": f"{block}.mlp.dense_h_to_4h",
            "ffn.down": f"{block}.mlp.dense_4h_to_h",
            "final_norm": "model.final_layernorm",
        },
    )
