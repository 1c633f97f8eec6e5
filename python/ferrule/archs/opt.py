"""OPT (Zhang et al. 2022): learned positions that start at row 2."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.spec import Dense, Embedding, LayerNorm, LearnedPositions, ModelSpec

OFFSET = 2


def opt(config: Config) -> ModelSpec:
    """The 350M model has post-norms, no final norm, and embeddings narrower than its layers."""
    config = config.spelled(hidden_act="activation_function", intermediate_size="ffn_dim")
    config = config.with_defaults(hidden_act="relu", max_position_embeddings=2048)
    affine = config.flag("layer_norm_elementwise_affine", default=True)
    bias = config.flag("enable_bias", default=True)
    before = config.flag("do_layer_norm_before", default=True)
    width = config.integer("word_embed_proj_dim", default=config.integer("hidden_size"))
    positions = LearnedPositions(config.integer("max_position_embeddings") + OFFSET, OFFSET)
    base, block = "model.decoder", "model.decoder.layers.{layer}"
    return decoder(
        config,
        norm=LayerNorm(1e-5, weight=affine, bias=affine),
        norms="before" if before else "sum",
        rotated=False,
        qkv_bias=bias,
        output_bias=bias,
        ffn=Dense(config.integer("intermediate_size"), config.activation, gated=False, bias=bias),
        embedding=Embedding(width=None if width == config.integer("hidden_size") else width, positions=positions),
        final_norm=before and not config.flag("_remove_final_layer_norm", default=False),
        tied=True,
        modules={
            "embedding": f"{base}.embed_tokens",
            "embedding_projection": f"{base}.project_in",
            "positions": f"{base}.embed_positions",
            "attention_norm": f"{block}.self_attn_layer_norm",
            "attention_sum_norm": f"{block}.self_attn_layer_norm",
            "attention.q": f"{block}.self_attn.q_proj",
            "attention.k": f"{block}.self_attn.k_proj",
            "attention.v": f"{block}.self_attn.v_proj",
            "attention.output": f"{block}.self_attn.out_proj",
            "ffn_norm": f"{block}.final_layer_norm",
            "ffn_sum_norm": f"{block}.final_layer_norm",
            "ffn.up": f"{block}.fc1",
            "ffn.down": f"{block}.fc2",
            "final_norm": f"{base}.final_layer_norm",
            "lm_head_projection": f"{base}.project_out",
        },
    )
