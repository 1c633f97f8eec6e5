"""HunYuan's dense models (Tencent 2025): Llama with query and key norms after the rotary embedding."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.rope import read_rope, rope_parameters, rope_theta
from ferrule.archs.spec import Ffn, HeadNorm, ModelSpec, RmsNorm, Rope

LEAST_WIDTH = 4
"""Smallest head width whose base can be scaled: a width of 2 has one frequency, which is independent of the base."""
LARGEST_LOG = 80.0
"""Largest base that is finite in f32."""


def hunyuan_v1_dense(config: Config) -> ModelSpec:
    """All switches are shared with the MoE models."""
    return hunyuan_decoder(config)


def hunyuan_decoder(
    config: Config, ffn: Sequence[Ffn] | None = None, modules: Mapping[str, str] | None = None
) -> ModelSpec:
    """Dynamic scaling with `alpha` is a fixed change of the base here. `ffn` and `modules` are those of `decoder`."""
    config = config.with_defaults(max_position_embeddings=2048, rms_norm_eps=1e-5)
    bias = config.flag("attention_bias", default=False)
    return decoder(
        config,
        rope_of=lambda _: _rope(config),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=HeadNorm(RmsNorm(config.number("rms_norm_eps")), after_rope=True),
        ffn=ffn,
        modules={
            "attention.q_norm": "model.layers.{layer}.self_attn.query_layernorm",
            "attention.k_norm": "model.layers.{layer}.self_attn.key_layernorm",
            **(modules or {}),
        },
    )


def _rope(config: Config) -> Rope:
    parameters, width = rope_parameters(config), config.head_dim
    kind = parameters.values.get("rope_type", parameters.values.get("type"))
    alpha = parameters.number("alpha", default=0.0, low=0.0)
    if kind != "dynamic" or not alpha or width < LEAST_WIDTH:
        return read_rope(config, width)
    theta, exponent = rope_theta(config, parameters), width / (width - 2)
    if math.log(theta) + exponent * math.log(alpha) > LARGEST_LOG:
        raise parameters.error("alpha", "small enough for the RoPE base to be finite")
    plain = read_rope(config.with_values(rope_scaling={"rope_theta": theta}), width)
    return replace(plain, theta=theta * alpha**exponent)
