"""OLMo 2 (OLMo Team 2024): Llama with norms after its blocks, and one over all queries and one over all keys."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.spec import HeadNorm, ModelSpec, RmsNorm


def olmo2(config: Config) -> ModelSpec:
    """Nothing is normed before a block."""
    config = config.with_defaults(max_position_embeddings=2048, rms_norm_eps=1e-5)
    bias = config.flag("attention_bias", default=False)
    return decoder(
        config,
        norms="after",
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=HeadNorm(RmsNorm(config.number("rms_norm_eps")), over="heads"),
        modules={
            "attention_post_norm": "model.layers.{layer}.post_attention_layernorm",
            "ffn_post_norm": "model.layers.{layer}.post_feedforward_layernorm",
        },
    )
