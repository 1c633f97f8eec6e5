"""GPT-J (Wang and Komatsuzaki 2021): parallel blocks with one norm; interleaved rotary embedding."""

from collections.abc import Mapping

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.gpt2 import SPELLINGS
from ferrule.archs.spec import Dense, LayerNorm, LmHead, ModelSpec
from ferrule.archs.tensors import Fused


def gptj(config: Config, projections: Mapping[str, Fused] | None = None) -> ModelSpec:
    """`rotary_dim` elements of each head are rotated. `projections` overrides the query, key and value modules."""
    config = config.spelled(**SPELLINGS).with_defaults(hidden_act="gelu_new", max_position_embeddings=2048)
    hidden = config.integer("hidden_size")
    rotary_dim = config.with_defaults(rotary_dim=64).integer("rotary_dim", low=2, high=config.head_dim)
    block = "transformer.h.{layer}"
    return decoder(
        config,
        norm=LayerNorm(config.number("layer_norm_epsilon", default=1e-5)),
        parallel="one_norm",
        rotary_dim=rotary_dim,
        interleaved=True,
        ffn=Dense(config.integer("intermediate_size", default=4 * hidden), config.activation, gated=False, bias=True),
        lm_head=LmHead(tied=config.flag("tie_word_embeddings", default=False), bias=True),
        modules={
            "embedding": "transformer.wte",
            "attention_norm": f"{block}.ln_1",
            "attention.q": f"{block}.attn.q_proj",
            "attention.k": f"{block}.attn.k_proj",
            "attention.v": f"{block}.attn.v_proj",
            **(projections or {}),
            "attention.output": f"{block}.attn.out_proj",
            "ffn.up": f"{block}.mlp.fc_in",
            "ffn.down": f"{block}.mlp.fc_out",
            "final_norm": "transformer.ln_f",
        },
    )
