"""XGLM (Lin et al. 2022): sinusoidal positions that start at 2."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.spec import Dense, Embedding, LayerNorm, ModelSpec, SinusoidalPositions

OFFSET = 2
MAX_POSITIONS = 1 << 16
"""Largest number of positions; each needs a row in memory, and no tensor of the file bounds them."""


def xglm(config: Config) -> ModelSpec:
    """Embeddings are scaled by the square root of the hidden size."""
    config = config.spelled(
        hidden_size="d_model",
        num_hidden_layers="num_layers",
        num_attention_heads="attention_heads",
        intermediate_size="ffn_dim",
        hidden_act="activation_function",
    ).with_defaults(hidden_act="gelu", max_position_embeddings=2048)
    config.require(add_cross_attention=False)
    # The padding token's position row is zero, so padding must precede the first position.
    if config.integer("pad_token_id", default=1, low=0) >= OFFSET:
        raise config.unsupported("pad_token_id", f"below {OFFSET}")
    config.integer("max_position_embeddings", high=MAX_POSITIONS)
    scaled = config.flag("scale_embedding", default=True)
    block = "model.layers.{layer}"
    return decoder(
        config,
        norm=LayerNorm(1e-5),
        rotated=False,
        qkv_bias=True,
        output_bias=True,
        ffn=Dense(config.integer("intermediate_size"), config.activation, gated=False, bias=True),
        embedding=Embedding(
            scale=config.integer("hidden_size") ** 0.5 if scaled else 1.0, positions=SinusoidalPositions(OFFSET)
        ),
        tied=True,
        modules={
            "attention_norm": f"{block}.self_attn_layer_norm",
            "attention.output": f"{block}.self_attn.out_proj",
            "ffn_norm": f"{block}.final_layer_norm",
            "ffn.up": f"{block}.fc1",
            "ffn.down": f"{block}.fc2",
            "final_norm": "model.layer_norm",
        },
    )
