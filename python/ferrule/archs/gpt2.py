"""GPT-2 (Radford et al. 2019): learned positions; matrices stored as [inputs, outputs]."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.spec import Dense, Embedding, LayerNorm, LearnedPositions, ModelSpec
from ferrule.archs.tensors import fused

SPELLINGS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
}
"""GPT-2's names for the common fields, which later families share."""


def gpt2(config: Config) -> ModelSpec:
    """Scores may also be divided by the layer number, or not scaled."""
    config = config.spelled(**SPELLINGS).with_defaults(hidden_act="gelu_new", max_position_embeddings=1024)
    config.require(add_cross_attention=False)
    hidden, layers = config.integer("hidden_size"), config.layers
    scale = config.head_dim**-0.5 if config.flag("scale_attn_weights", default=True) else 1.0
    by_layer = config.flag("scale_attn_by_inverse_layer_idx", default=False)
    block = "transformer.h.{layer}"
    return decoder(
        config,
        norm=LayerNorm(config.number("layer_norm_epsilon", default=1e-5)),
        rotated=False,
        qkv_bias=True,
        output_bias=True,
        scale=[scale / (index + 1) if by_layer else scale for index in range(layers)],
        ffn=Dense(config.integer("intermediate_size", default=4 * hidden), config.activation, gated=False, bias=True),
        embedding=Embedding(positions=LearnedPositions(config.integer("max_position_embeddings"))),
        tied=True,
        modules={
            "embedding": "transformer.wte",
            "positions": "transformer.wpe",
            "attention_norm": f"{block}.ln_1",
            **fused(
                f"{block}.attn.c_attn",
                {"attention.q": hidden, "attention.k": hidden, "attention.v": hidden},
                transposed=True,
            ),
            **fused(f"{block}.attn.c_proj", "attention.output", transposed=True),
            "ffn_norm": f"{block}.ln_2",
            **fused(f"{block}.mlp.c_fc", "ffn.up", transposed=True),
            **fused(f"{block}.mlp.c_proj", "ffn.down", transposed=True),
            "final_norm": "transformer.ln_f",
        },
    )
