"""Apertus (Swiss AI 2025): xIELU in place of a gate, and a norm for each query and key head."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.spec import Dense, HeadNorm, ModelSpec, RmsNorm, Xielu

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Default scaling of the rotary embedding."""


def apertus(config: Config) -> ModelSpec:
    """The parameters of xIELU that training does not change have their published values."""
    config.require(hidden_act="xielu", mlp_bias=False)
    config = config.with_defaults(
        max_position_embeddings=65_536, rms_norm_eps=1e-5, rope_theta=12e6, rope_parameters=LLAMA3
    )
    bias = config.flag("attention_bias", default=False)
    block = "model.layers.{layer}"
    return decoder(
        config,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=HeadNorm(RmsNorm(config.number("rms_norm_eps"))),
        ffn=Dense(config.integer("intermediate_size"), gated=False, xielu=Xielu()),
        modules={
            "attention_norm": f"{block}.attention_layernorm",
            "ffn_norm": f"{block}.feedforward_layernorm",
            "ffn.xielu": f"{block}.mlp.act_fn",
        },
    )
