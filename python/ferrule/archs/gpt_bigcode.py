"""GPT-BigCode (StarCoder; Li et al. 2023): GPT-2 with one key-value head for all queries."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.gpt2 import SPELLINGS
from ferrule.archs.spec import Dense, Embedding, LayerNorm, LearnedPositions, ModelSpec
from ferrule.archs.tensors import fused


def gpt_bigcode(config: Config) -> ModelSpec:
    """With `multi_query` false each query head has its key-value head, and the rows of a head are adjacent."""
    config = config.spelled(**SPELLINGS)
    config = config.with_defaults(hidden_act="gelu_pytorch_tanh", max_position_embeddings=1024)
    config.require(add_cross_attention=False)
    hidden, width = config.integer("hidden_size"), config.head_dim
    single = config.flag("multi_query", default=True)
    block = "transformer.h.{layer}"
    return decoder(
        config.with_values(num_key_value_heads=1 if single else config.heads),
        norm=LayerNorm(config.number("layer_norm_epsilon", default=1e-5)),
        rotated=False,
        qkv_bias=True,
        output_bias=True,
        scale=None if config.flag("scale_attn_weights", default=True) else 1.0,
        ffn=Dense(config.integer("intermediate_size", default=4 * hidden), config.activation, gated=False, bias=True),
        embedding=Embedding(positions=LearnedPositions(config.integer("max_position_embeddings"))),
        tied=True,
        modules={
            "embedding": "transformer.wte",
            "positions": "transformer.wpe",
            "attention_norm": f"{block}.ln_1",
            **fused(
                f"{block}.attn.c_attn",
                {"attention.q": hidden if single else width, "attention.k": width, "attention.v": width},
            ),
            "attention.output": f"{block}.attn.c_proj",
            "ffn_norm": f"{block}.ln_2",
            "ffn.up": f"{block}.mlp.c_fc",
            "ffn.down": f"{block}.mlp.c_proj",
            "final_norm": "transformer.ln_f",
        },
    )
