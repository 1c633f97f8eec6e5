"""Phi-1, Phi-1.5 and Phi-2 (Gunasekar et al. 2023): parallel blocks with one norm; half of each head is rotated."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.spec import Dense, HeadNorm, LayerNorm, LmHead, ModelSpec


def phi(config: Config) -> ModelSpec:
    """All projections have biases, the lm_head included."""
    config = config.with_defaults(hidden_act="gelu_new", max_position_embeddings=2048)
    norm = LayerNorm(config.number("layer_norm_eps", default=1e-5))
    block = "model.layers.{layer}"
    return decoder(
        config,
        norm=norm,
        parallel="one_norm",
        partial_rotary=0.5,
        qkv_bias=True,
        output_bias=True,
        qk_norm=HeadNorm(norm) if config.flag("qk_layernorm", default=False) else None,
        ffn=Dense(config.integer("intermediate_size"), config.activation, gated=False, bias=True),
        lm_head=LmHead(tied=config.flag("tie_word_embeddings", default=False), bias=True),
        modules={
            "attention.output": f"{block}.self_attn.dense",
            "attention.q_norm": f"{block}.self_attn.q_layernorm",
            "attention.k_norm": f"{block}.self_attn.k_layernorm",
            "ffn.up": f"{block}.mlp.fc1",
            "ffn.down": f"{block}.mlp.fc2",
            "final_norm": "model.final_layernorm",
        },
    )
