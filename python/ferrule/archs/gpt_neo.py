"""GPT-Neo (Black et al. 2021): learned positions, unscaled scores, and windows on every other layer."""

from typing import cast

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.spec import Dense, Embedding, LayerNorm, LearnedPositions, ModelSpec

TYPES = ("global", "local")


def gpt_neo(config: Config) -> ModelSpec:
    """`attention_types` lists the layers with a window, run by run."""
    config = config.spelled(
        num_hidden_layers="num_layers", num_attention_heads="num_heads", hidden_act="activation_function"
    ).with_defaults(hidden_act="gelu_new", max_position_embeddings=2048)
    hidden, window = config.integer("hidden_size"), config.integer("window_size", default=256)
    block = "transformer.h.{layer}"
    return decoder(
        config.without("num_key_value_heads"),
        norm=LayerNorm(config.number("layer_norm_epsilon", default=1e-5)),
        windows=[window if kind == "local" else None for kind in _types(config)],
        rotated=False,
        output_bias=True,
        scale=1.0,
        ffn=Dense(config.integer("intermediate_size", default=4 * hidden), config.activation, gated=False, bias=True),
        embedding=Embedding(positions=LearnedPositions(config.integer("max_position_embeddings"))),
        tied=True,
        modules={
            "embedding": "transformer.wte",
            "positions": "transformer.wpe",
            "attention_norm": f"{block}.ln_1",
            "attention.q": f"{block}.attn.attention.q_proj",
            "attention.k": f"{block}.attn.attention.k_proj",
            "attention.v": f"{block}.attn.attention.v_proj",
            "attention.output": f"{block}.attn.attention.out_proj",
            "ffn_norm": f"{block}.ln_2",
            "ffn.up": f"{block}.mlp.c_fc",
            "ffn.down": f"{block}.mlp.c_proj",
            "final_norm": "transformer.ln_f",
        },
    )


def _types(config: Config) -> list[str]:
    """Returns the type of each layer: `[[["global", "local"], 12]]` repeats the two types twelve times."""
    layers = config.layers
    value: object = config.values.get("attention_types") or [[list(TYPES), 12]]
    types: list[str] = []
    for run in cast("list[object]", value) if isinstance(value, list) else []:
        match run:
            case [list(), int(times)] if 0 < times <= layers:
                types += cast("list[str]", run[0]) * times
            case _:
                types.append("")
    if len(types) != layers or any(kind not in TYPES for kind in types):
        raise config.error(
            "attention_types", f"lists of {' and '.join(TYPES)} with their repeats, for {layers} layers in all"
        )
    return types
