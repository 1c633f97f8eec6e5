"""BioGPT (Luo et al. 2022): learned positions that start at row 2, and scaled embeddings."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.opt import OFFSET
from ferrule.archs.spec import Dense, Embedding, LayerNorm, LearnedPositions, ModelSpec


def biogpt(config: Config) -> ModelSpec:
    """The epsilon of the norms is a constant; the file's value is ignored."""
    config = config.with_defaults(hidden_act="gelu", max_position_embeddings=1024)
    scaled = config.flag("scale_embedding", default=True)
    block = "biogpt.layers.{layer}"
    return decoder(
        config.without("num_key_value_heads"),
        norm=LayerNorm(1e-5),
        rotated=False,
        qkv_bias=True,
        output_bias=True,
        ffn=Dense(config.integer("intermediate_size"), config.activation, gated=False, bias=True),
        embedding=Embedding(
            scale=config.integer("hidden_size") ** 0.5 if scaled else 1.0,
            positions=LearnedPositions(config.integer("max_position_embeddings") + OFFSET, OFFSET),
        ),
        tied=True,
        modules={
            "embedding": "biogpt.embed_tokens",
            "positions": "biogpt.embed_positions",
            "attention_norm": f"{block}.self_attn_layer_norm",
            "attention.q": f"{block}.self_attn.q_proj",
            "attention.k": f"{block}.self_attn.k_proj",
            "attention.v": f"{block}.self_attn.v_proj",
            "attention.output": f"{block}.self_attn.out_proj",
            "ffn_norm": f"{block}.final_layer_norm",
            "ffn.up": f"{block}.fc1",
            "ffn.down": f"{block}.fc2",
            "final_norm": "biogpt.layer_norm",
            "lm_head": "output_projection",
        },
    )
