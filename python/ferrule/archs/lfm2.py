"""LFM2 (Liquid AI 2025): gated short convolutions, with attention in some layers."""

from collections.abc import Sequence
from typing import Any

from ferrule.archs.config import MAX_LAYERS, Config
from ferrule.archs.decoder import decoder
from ferrule.archs.spec import Dense, Ffn, HeadNorm, LmHead, ModelSpec, RmsNorm, ShortConvolution
from ferrule.archs.tensors import fused

_BLOCK = "model.layers.{layer}"

MODULES = {
    "attention_norm": f"{_BLOCK}.operator_norm",
    "attention.output": f"{_BLOCK}.self_attn.out_proj",
    "attention.q_norm": f"{_BLOCK}.self_attn.q_layernorm",
    "attention.k_norm": f"{_BLOCK}.self_attn.k_layernorm",
    "short_convolution_norm": f"{_BLOCK}.operator_norm",
    "short_convolution.kernel": f"{_BLOCK}.conv.conv",
    "short_convolution.output": f"{_BLOCK}.conv.out_proj",
    "ffn_norm": f"{_BLOCK}.ffn_norm",
    "ffn.gate": f"{_BLOCK}.feed_forward.w1",
    "ffn.up": f"{_BLOCK}.feed_forward.w3",
    "ffn.down": f"{_BLOCK}.feed_forward.w2",
    "final_norm": "model.embedding_norm",
}
"""Module names in which LFM2's checkpoints differ from Llama's."""


def lfm2(config: Config) -> ModelSpec:
    """Reads the width of the feed-forward network, which may be given before its adjustment."""
    config = config.with_defaults(intermediate_size=12_288)
    width = config.integer("block_ff_dim", default=config.integer("intermediate_size"))
    if config.flag("block_auto_adjust_ff_dim", default=True):
        width = int(config.number("block_ffn_dim_multiplier", default=1.0, low=0.0) * int(2 * width / 3))
        multiple = config.integer("block_multiple_of", default=256)
        width = -(-width // multiple) * multiple
    return lfm2_decoder(config, ffn=[Dense(width)] * config.layers)


def lfm2_decoder(
    config: Config,
    *,
    ffn: Ffn | Sequence[Ffn],
    convolutions: list[int] | None = None,
    modules: dict[str, str] | None = None,
    **switches: Any,
) -> ModelSpec:
    """Returns the spec of a family member with these feed-forward networks.

    `convolutions` are the layers with a convolution, by default those that the file of an LFM2 names. `modules` and
    `switches` are those of `decoder`.
    """
    config = config.with_defaults(max_position_embeddings=128_000, rope_theta=1e6).with_absent(num_key_value_heads=8)
    norm = RmsNorm(config.number("norm_eps", default=1e-5))
    hidden = config.integer("hidden_size")
    convolution = ShortConvolution(
        hidden, taps=config.integer("conv_L_cache", default=3), bias=config.flag("conv_bias", default=False)
    )
    tied = config.flag("tie_embedding", default=config.flag("tie_word_embeddings", default=True))
    rows = {"short_convolution.b": hidden, "short_convolution.c": hidden, "short_convolution.x": hidden}
    return decoder(
        config,
        norm=norm,
        qk_norm=HeadNorm(norm),
        mixers=dict.fromkeys(_convolution_layers(config) if convolutions is None else convolutions, convolution),
        ffn=ffn,
        lm_head=LmHead(tied=tied),
        **switches,
        modules={**MODULES, **fused(f"{_BLOCK}.conv.in_proj", rows), **(modules or {})},
    )


def _convolution_layers(config: Config) -> list[int]:
    """Returns the layers with a convolution, from `layer_types` or, in old files, from `full_attn_idxs`."""
    types = config.layer_kinds("layer_types", "conv", "full_attention")
    if not types:
        layers = range(config.layers)
        attending = config.integers("full_attn_idxs", low=0, high=MAX_LAYERS) if "full_attn_idxs" in config else layers
        return [index for index in layers if index not in attending]
    return [index for index, kind in enumerate(types) if kind == "conv"]
