"""Falcon (Almazrouei et al. 2023) in three variants: 1B and 7B, 40B and 180B, 11B."""

from ferrule.archs.alibi import alibi_slopes
from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.spec import Dense, LayerNorm, ModelSpec
from ferrule.archs.tensors import fused


def falcon(config: Config) -> ModelSpec:
    """The new form has grouped queries and parallel blocks with two norms; the old form has a switch for each.

    ALiBi is exact here. transformers rounds slopes and biases to bf16, which is exact up to 8 heads and 256 tokens.
    """
    config = config.spelled(
        hidden_size="n_embed",
        num_key_value_heads="num_kv_heads",
        intermediate_size="ffn_hidden_size",
        hidden_act="activation",
    ).with_defaults(hidden_act="gelu", max_position_embeddings=2048)
    hidden, width = config.integer("hidden_size"), config.head_dim
    bias = config.flag("bias", default=False)
    grouped = config.flag("new_decoder_architecture", default=False)
    if not grouped:
        single = config.flag("multi_query", default=True)
        config = config.with_values(num_key_value_heads=1 if single else config.heads)
    norms = config.integer("num_ln_in_parallel_attn", default=2, high=2) if grouped else 1
    parallel = "one_norm" if norms == 1 else "two_norms"
    alibi = config.flag("alibi", default=False)
    block = "transformer.h.{layer}"
    return decoder(
        config,
        norm=LayerNorm(config.number("layer_norm_epsilon", default=1e-5)),
        parallel=parallel if grouped or config.flag("parallel_attn", default=True) else None,
        rotated=not alibi,
        qkv_bias=bias,
        output_bias=bias,
        # ALiBi biases are scaled like the scores.
        alibi_slopes=[slope * width**-0.5 for slope in alibi_slopes(config.heads)] if alibi else None,
        ffn=Dense(config.integer("intermediate_size", default=4 * hidden), config.activation, gated=False, bias=bias),
        tied=True,
        modules={
            "embedding": "transformer.word_embeddings",
            "attention_norm": f"{block}.ln_attn" if norms == 2 else f"{block}.input_layernorm",
            **fused(
                f"{block}.self_attention.query_key_value",
                {"attention.q": config.heads // config.kv_heads * width, "attention.k": width, "attention.v": width},
            ),
            "attention.output": f"{block}.self_attention.dense",
            "ffn_norm": f"{block}.ln_mlp" if norms == 2 else f"{block}.post_attention_layernorm",
            "ffn.up": f"{block}.mlp.dense_h_to_4h",
            "ffn.down": f"{block}.mlp.dense_4h_to_h",
            "final_norm": "transformer.ln_f",
        },
    )
