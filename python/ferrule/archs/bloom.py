"""BLOOM (Le Scao et al. 2022): ALiBi in place of position embeddings, and a norm over the embeddings."""

from ferrule.archs.alibi import alibi_slopes
from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.spec import Dense, Embedding, LayerNorm, ModelSpec
from ferrule.archs.tensors import fused


def bloom(config: Config) -> ModelSpec:
    """The residual may be the normed input. The context is the training length; the model has no other limit."""
    config = config.spelled(
        hidden_size="n_embed",
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        max_position_embeddings="seq_length",
    ).with_defaults(max_position_embeddings=2048)
    norm = LayerNorm(config.number("layer_norm_epsilon", default=1e-5))
    width = config.head_dim
    block = "transformer.h.{layer}"
    return decoder(
        config,
        norm=norm,
        rotated=False,
        qkv_bias=True,
        output_bias=True,
        alibi_slopes=alibi_slopes(config.heads),
        ffn=Dense(4 * config.integer("hidden_size"), "gelu_tanh", gated=False, bias=True),
        residual_after_norm=config.flag("apply_residual_connection_post_layernorm", default=False),
        embedding=Embedding(norm=norm),
        tied=True,
        modules={
            "embedding": "transformer.word_embeddings",
            "embedding_norm": "transformer.word_embeddings_layernorm",
            "attention_norm": f"{block}.input_layernorm",
            **fused(
                f"{block}.self_attention.query_key_value",
                {"attention.q": width, "attention.k": width, "attention.v": width},
            ),
            "attention.output": f"{block}.self_attention.dense",
            "ffn_norm": f"{block}.post_attention_layernorm",
            "ffn.up": f"{block}.mlp.dense_h_to_4h",
            "ffn.down": f"{block}.mlp.dense_4h_to_h",
            "final_norm": "transformer.ln_f",
        },
    )
