"""LFM3 (Liquid AI 2026): short convolutions, full and sliding attention in some layers, and norms around blocks."""

from ferrule.archs.config import Config
from ferrule.archs.decoder import LAYER_TYPES
from ferrule.archs.lfm2 import lfm2_decoder
from ferrule.archs.spec import Dense, ModelSpec

_LAYER = "model.layers.{layer}"

ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
}
"""Default rotary embeddings."""

MODULES = {
    "attention.output": f"{_LAYER}.self_attn.o_proj",
    "attention.q_norm": f"{_LAYER}.self_attn.q_norm",
    "attention.k_norm": f"{_LAYER}.self_attn.k_norm",
    "attention.gate": f"{_LAYER}.self_attn.gate_proj",
    **{f"{block}_post_norm": f"{_LAYER}.post_operator_norm" for block in ("attention", "short_convolution")},
    "ffn_post_norm": f"{_LAYER}.post_ffn_norm",
}
"""Module names in which LFM3's checkpoints differ from LFM2's."""


def lfm3(config: Config) -> ModelSpec:
    """The output of each head of attention has a gate."""
    config = (
        config.spelled(norm_eps="rms_norm_eps")
        .without("tie_embedding")
        .with_defaults(conv_L_cache=7, head_dim=128, intermediate_size=7680, rope_parameters=ROPES)
        .with_absent(num_key_value_heads=4, sliding_window=256)
    )
    kinds = _kinds(config)
    window = config.integer_or_none("sliding_window")
    if window is None and "sliding_attention" in kinds:
        raise config.error("sliding_window", "an integer, because the model has sliding layers")
    bias = config.flag("attention_bias", default=False)
    return lfm2_decoder(
        config,
        convolutions=[index for index, kind in enumerate(kinds) if kind == "conv"],
        windows=[window if kind == "sliding_attention" else None for kind in kinds],
        rotated=[kind != "conv" for kind in kinds],
        qkv_bias=bias,
        output_bias=bias,
        norms="around" if config.flag("use_sandwich_norm", default=True) else "before",
        output_gate="heads" if config.flag("use_attention_gate", default=True) else None,
        ffn=Dense(config.integer("intermediate_size")),
        modules=MODULES,
        alternatives={"attention.gate": f"{_LAYER}.self_attn.g_proj"},
    )


def _kinds(config: Config) -> list[str]:
    """Returns the kind of each layer: a period of four layers with two convolutions by default."""
    period = ("sliding_attention", "conv", "full_attention", "conv")
    usual = [period[index % 4] if index else "conv" for index in range(config.layers)]
    return config.layer_kinds("layer_types", "conv", *LAYER_TYPES) or usual
