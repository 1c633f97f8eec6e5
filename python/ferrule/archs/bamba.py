"""Bamba (IBM, Princeton, CMU and UIUC 2024): Mamba 2 in most layers, attention in some, a network in all."""

from ferrule.archs.config import MAX_LAYERS, Config
from ferrule.archs.decoder import decoder
from ferrule.archs.mamba2 import hybrid_mamba2, modules
from ferrule.archs.spec import ModelSpec, RmsNorm

_LAYER = "model.layers.{layer}"

MODULES = {
    "mamba2_norm": f"{_LAYER}.input_layernorm",
    "ffn_norm": f"{_LAYER}.pre_ff_layernorm",
    "ffn.gate": f"{_LAYER}.feed_forward.gate_proj",
    "ffn.up": f"{_LAYER}.feed_forward.up_proj",
    "ffn.down": f"{_LAYER}.feed_forward.down_proj",
    "final_norm": "model.final_layernorm",
}
"""Module names in which Bamba's checkpoints differ from Llama's."""


def bamba(config: Config) -> ModelSpec:
    """Half of each head is rotated, whatever the file says."""
    config = config.with_defaults(max_position_embeddings=262_144, rms_norm_eps=1e-5).with_absent(num_key_value_heads=8)
    attending = config.integers("attn_layer_indices", low=0, high=MAX_LAYERS)
    mixer = hybrid_mamba2(config, norm=RmsNorm(config.number("rms_norm_eps")))
    bias = config.flag("attention_bias", default=False)
    return decoder(
        config.without("partial_rotary_factor"),
        partial_rotary=0.5,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias", default=False),
        mixers={index: mixer for index in range(config.layers) if index not in attending},
        modules={**MODULES, **modules(f"{_LAYER}.mamba", mixer)},
    )
