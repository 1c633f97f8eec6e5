"""MPT (MosaicML 2023): ALiBi and no biases."""

from ferrule.archs.alibi import alibi_slopes
from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.spec import Dense, LayerNorm, ModelSpec
from ferrule.archs.tensors import fused


def mpt(config: Config) -> ModelSpec:
    """Only the trainer's switches that published models use are supported."""
    config = config.spelled(
        hidden_size="d_model",
        num_hidden_layers="n_layers",
        num_attention_heads="n_heads",
        max_position_embeddings="max_seq_len",
    ).with_defaults(max_position_embeddings=2048, norm_type="layernorm")
    config.require(no_bias=True, logit_scale=None)
    if config.text("norm_type").removeprefix("low_precision_") != "layernorm":
        raise config.unsupported("norm_type", "layernorm or low_precision_layernorm")
    attention = config.inner("attn_config")
    attention.require(
        attn_type="multihead_attention", alibi=True, rope=False, qk_ln=False, qk_gn=False, prefix_lm=False
    )
    hidden = config.integer("hidden_size")
    block = "transformer.blocks.{layer}"
    return decoder(
        config,
        norm=LayerNorm(config.number("layer_norm_epsilon", default=1e-5), bias=False),
        rotated=False,
        clip=attention.number("clip_qkv", low=0.0, default=0.0) or None,
        scale=attention.number("softmax_scale", default=config.head_dim**-0.5),
        alibi_slopes=alibi_slopes(config.heads, attention.number("alibi_bias_max", default=8.0)),
        # transformers ignores expansion_ratio: the width is always four times the hidden size.
        ffn=Dense(4 * hidden, "gelu", gated=False),
        tied=True,
        modules={
            "embedding": "transformer.wte",
            "attention_norm": f"{block}.norm_1",
            **fused(f"{block}.attn.Wqkv", {"attention.q": hidden, "attention.k": hidden, "attention.v": hidden}),
            "attention.output": f"{block}.attn.out_proj",
            "ffn_norm": f"{block}.norm_2",
            "ffn.up": f"{block}.ffn.up_proj",
            "ffn.down": f"{block}.ffn.down_proj",
            "final_norm": "transformer.norm_f",
        },
    )
