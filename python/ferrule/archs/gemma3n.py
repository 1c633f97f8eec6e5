"""Gemma 3n (Google DeepMind 2025): Gemma 3 with several residual streams and per-layer embeddings.

The streams have alternating updates (AltUp). A learned augmented residual (LAuReL) is parallel to attention, the gates
of the first layers are sparse, and the last layers read the keys and values of earlier ones.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist
from typing import cast

from ferrule.archs.config import MAX_SIZE, Config
from ferrule.archs.decoder import MODULES, decoder, layer_windows
from ferrule.archs.gemma import gemma_embedding
from ferrule.archs.gemma2 import NORMS_AROUND
from ferrule.archs.per_layer import PER_LAYER_MODULES, per_layer_block, per_layer_projections, per_layer_table
from ferrule.archs.rope import read_rope
from ferrule.archs.shared_kv import kv_layers, reading
from ferrule.archs.spec import (
    Activation,
    Alternating,
    Attention,
    Block,
    Dense,
    HeadNorm,
    HeadProjections,
    Laurel,
    Layer,
    LmHead,
    ModelSpec,
    ProjectedEnds,
    RmsNorm,
    Rope,
    Side,
    Span,
    Streams,
)
from ferrule.archs.tensors import tensors_named

_BLOCK = "model.layers.{layer}"

_MODULES = {
    **MODULES,
    **NORMS_AROUND,
    **PER_LAYER_MODULES,
    "laurel.left": f"{_BLOCK}.laurel.linear_left",
    "laurel.right": f"{_BLOCK}.laurel.linear_right",
    "laurel.norm": f"{_BLOCK}.laurel.post_laurel_norm",
    "altup.router": f"{_BLOCK}.altup.modality_router",
    "altup.router_norm": f"{_BLOCK}.altup.router_norm",
    "altup.prediction": f"{_BLOCK}.altup.prediction_coefs",
    "altup.correction": f"{_BLOCK}.altup.correction_coefs",
    "side.scale.weight": f"{_BLOCK}.altup.correct_output_scale",
}

MAX_STREAMS = 16
"""Most residual streams; the native module has the same limit."""

MIN_SQUARE = 1e-5
"""Smallest mean square of a projected stream that is scaled; a constant of the reference."""


def gemma3n(config: Config) -> ModelSpec:
    """Four of five layers have a window."""
    config = config.with_defaults(
        head_dim=256,
        max_position_embeddings=32_768,
        sliding_window=512,
        vocab_size_per_layer_input=262_144,
        hidden_size_per_layer_input=256,
    ).with_absent(num_key_value_heads=2, num_kv_shared_layers=15, final_logit_softcapping=30.0, altup_coef_clip=120.0)
    norm = RmsNorm(config.number("rms_norm_eps", default=1e-6))
    windows = layer_windows(config, sliding=lambda index: (index + 1) % 5 != 0, window=config.integer("sliding_window"))
    read = kv_layers(config, windows)
    bias = config.flag("attention_bias", default=False)
    activation = config.activation_named("hidden_activation", default="gelu_pytorch_tanh")
    v_norm = RmsNorm(norm.eps, weight=False)
    spec = decoder(
        config,
        norm=norm,
        norms="around",
        windows=windows,
        rope_of=lambda layer_type: _rope(config, layer_type),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=HeadNorm(norm),
        scale=1.0,
        attention_of=lambda index, attention: _attention(attention, v_norm, read[index]),
        ffn=_networks(config, activation),
        embedding=gemma_embedding(config),
        lm_head=LmHead(
            tied=config.flag("tie_word_embeddings", default=True),
            softcap=config.number_or_none("final_logit_softcapping"),
        ),
        modules=_MODULES,
    )
    count = config.integer("altup_num_inputs", default=4, low=2, high=MAX_STREAMS)
    laurel = Laurel(config.integer("laurel_rank", default=64), norm)
    layers = [
        _layer(config, layer, norm, laurel, per_layer_block(config, index, norm, activation))
        for index, layer in enumerate(spec.layers)
    ]
    spec = replace(
        spec, layers=layers, tables=[per_layer_table(config)], streams=Streams(count, ProjectedEnds(MIN_SQUARE))
    )
    ends = {
        f"streams.{end}.{stream}": f"model.altup_{name}.{stream - 1}"
        for end, name in (("begin", "projections"), ("end", "unembed_projections"))
        for stream in range(1, count)
    }
    return replace(spec, tensors=tensors_named(spec, {**_MODULES, **ends}, per_layer_projections(config)))


def _rope(config: Config, layer_type: str) -> Rope:
    """Old files give layers with a window a separate base, and scale only the others."""
    if "rope_parameters" not in config and layer_type == "sliding_attention":
        config = config.without("rope_theta", "rope_scaling").spelled(rope_theta="rope_local_base_freq")
    theta = 10_000.0 if layer_type == "sliding_attention" else 1e6
    return read_rope(config.with_defaults(rope_theta=theta), config.head_dim, layer_type)


def _attention(attention: Attention, v_norm: RmsNorm, read: int | None) -> Attention:
    """Returns an attention with normed values, or with the keys and values of another layer."""
    if read is not None:
        return reading(attention, read)
    projections = cast("HeadProjections", attention.projections)
    return replace(attention, projections=replace(projections, v_norm=v_norm))


def _networks(config: Config, activation: Activation) -> list[Dense]:
    """Returns the network of each layer: its width, and the share of its gates that are 0."""
    layers = config.layers
    if isinstance(config.values.get("intermediate_size"), list):
        widths = config.integers("intermediate_size", low=1, high=MAX_SIZE)
    else:
        widths = [config.integer("intermediate_size", default=16_384)] * layers
    if len(widths) != layers:
        raise config.error("intermediate_size", f"an integer, or a list of {layers} integers")
    sparse = 10 if layers > 10 else 0
    shares = [0.95] * sparse + [0.0] * (layers - sparse)
    if "activation_sparsity_pattern" in config:
        shares = _shares(config)
    return [
        Dense(width, activation, gate_cutoff=NormalDist().inv_cdf(share) if share > 0 else None)
        for width, share in zip(widths, shares, strict=True)
    ]


def _shares(config: Config) -> list[float]:
    """The share of gates of each layer that are 0 if they are normally distributed."""
    found: object = config.values["activation_sparsity_pattern"]
    shares = cast("list[object]", found) if isinstance(found, list) else [found] * config.layers
    real = [share for share in shares if isinstance(share, int | float) and not isinstance(share, bool)]
    numbers = [float(share) for share in real if 0 <= share < 1]
    if len(numbers) != len(shares) or len(numbers) != config.layers:
        limit = f"a number from 0 to below 1, or a list of {config.layers} such numbers"
        raise config.error("activation_sparsity_pattern", limit)
    return numbers


def _layer(config: Config, layer: Layer, norm: RmsNorm, laurel: Laurel, per_layer: Block) -> Layer:
    """Returns a layer with its spans: the usual blocks on one stream, and the per-layer embedding for the others."""
    attention, ffn = layer.blocks
    count = config.integer("altup_num_inputs", default=4, low=2, high=MAX_STREAMS)
    active = config.integer("altup_active_idx", default=0, low=0, high=count - 1)
    clip = config.number_or_none("altup_coef_clip")
    half = 2**-0.5  # of the sum of attention and its augmented residual
    return Layer(
        (
            replace(attention, residual_scale=half, stream_scale=half),
            Block("laurel", laurel, parallel=True, residual_scale=half),
            ffn,
            replace(per_layer, stream_scale=0.0),
        ),
        spans=(
            Span("altup", 3, Alternating(active, norm, clip)),
            Span("side", 1, Side(active, config.flag("altup_correct_scale", default=True))),
        ),
    )
