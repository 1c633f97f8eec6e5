"""GPT-NeoX and Pythia (Black et al. 2022): parallel blocks; the rows of a head are adjacent."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.spec import Dense, LayerNorm, ModelSpec
from ferrule.archs.tensors import fused


def gpt_neox(config: Config) -> ModelSpec:
    """A quarter of each head is rotated by default."""
    config = config.spelled(rope_theta="rotary_emb_base", partial_rotary_factor="rotary_pct")
    config = config.with_defaults(hidden_act="gelu", max_position_embeddings=2048)
    config = config.with_values(num_key_value_heads=config.heads)  # ignored in some files
    bias = config.flag("attention_bias", default=True)
    width = config.head_dim
    block = "gpt_neox.layers.{layer}"
    return decoder(
        config,
        norm=LayerNorm(config.number("layer_norm_eps", default=1e-5)),
        parallel="two_norms" if config.flag("use_parallel_residual", default=True) else None,
        partial_rotary=0.25,
        qkv_bias=bias,
        output_bias=bias,
        ffn=Dense(config.integer("intermediate_size"), config.activation, gated=False, bias=True),
        modules={
            "embedding": "gpt_neox.embed_in",
            "attention_norm": f"{block}.input_layernorm",
            **fused(
                f"{block}.attention.query_key_value",
                {"attention.q": width, "attention.k": width, "attention.v": width},
            ),
            "attention.output": f"{block}.attention.dense",
            "ffn_norm": f"{block}.post_attention_layernorm",
            "ffn.up": f"{block}.mlp.dense_h_to_4h",
            "ffn.down": f"{block}.mlp.dense_4h_to_h",
            "final_norm": "gpt_neox.final_layer_norm",
            "lm_head": "embed_out",
        },
    )
