"""Decoders with multi-head latent attention (MLA; DeepSeek-V2, 2024)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ferrule.archs.config import Config
from ferrule.archs.decoder import LAYER_TYPES, decoder
from ferrule.archs.experts import EXPERT_MODULES
from ferrule.archs.rope import read_rope, rope_parameters, yarn_mscale
from ferrule.archs.spec import Ffn, LatentProjections, ModelSpec, NoScaling, RmsNorm, Rope, YarnScaling
from ferrule.archs.tensors import Fused

LATENT_EPS = 1e-6
"""Epsilon of the latents' norms, which config.json does not hold."""


def latent_decoder(
    config: Config,
    ffn: Ffn | Sequence[Ffn],
    *,
    interleaved: bool = False,
    rotated: bool = True,
    modules: Mapping[str, str | Fused] | None = None,
    **switches: Any,
) -> ModelSpec:
    """Returns the spec of a decoder with latent attention; `modules` and `switches` are those of `decoder`.

    Without rotation the elements that all heads share are used as they are projected.
    """
    config.require(mlp_bias=False)
    projections = LatentProjections(
        query_rank=config.integer_or_none("q_lora_rank"),
        kv_rank=config.integer("kv_lora_rank", default=512),
        nope_dim=config.integer("qk_nope_head_dim", default=128),
        rope_dim=config.integer("qk_rope_head_dim", default=64),
        value_dim=config.integer("v_head_dim", default=128),
        norm=RmsNorm(LATENT_EPS),
        bias=config.flag("attention_bias", default=False),
    )
    scale = (projections.nope_dim + projections.rope_dim) ** -0.5
    if rotated:
        rope = read_rope(config, projections.rope_dim, LAYER_TYPES[0], interleaved=interleaved)
        switches["layer_ropes"] = [rope] * config.layers
        scale *= _score_factor(config, rope)
    return decoder(
        config,
        rotated=rotated,
        projections=projections,
        output_bias=projections.bias,
        scale=scale,
        ffn=ffn,
        **switches,
        modules={
            "attention.q_a": "model.layers.{layer}.self_attn.q_a_proj",
            "attention.q_a_norm": "model.layers.{layer}.self_attn.q_a_layernorm",
            "attention.q_b": "model.layers.{layer}.self_attn.q_b_proj",
            "attention.kv_a": "model.layers.{layer}.self_attn.kv_a_proj_with_mqa",
            "attention.kv_a_norm": "model.layers.{layer}.self_attn.kv_a_layernorm",
            "attention.kv_b": "model.layers.{layer}.self_attn.kv_b_proj",
            **EXPERT_MODULES,
            **(modules or {}),
        },
    )


def _score_factor(config: Config, rope: Rope) -> float:
    """Returns YaRN's factor on all scores; `attention_factor` applies to the rotated elements only."""
    parameters = rope_parameters(config, LAYER_TYPES[0])
    all_dim = parameters.number("mscale_all_dim", default=0.0, low=0.0)
    if isinstance(rope.scaling, NoScaling) or not all_dim:
        return 1.0
    factor = rope.scaling.factor if isinstance(rope.scaling, YarnScaling) else parameters.number("factor")
    mscale = yarn_mscale(factor, all_dim)
    if math.isinf(mscale * mscale):
        raise parameters.error("mscale_all_dim", "small enough for scores to be finite")
    return mscale * mscale
