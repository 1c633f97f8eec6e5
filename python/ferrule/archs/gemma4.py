"""Gemma 4 (Google DeepMind 2026): Gemma 3 whose layers of full attention have other heads, with normed values.

Small models have per-layer embeddings, and last layers that read the keys and values of earlier ones. The largest has
experts beside its dense network.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ferrule.archs.config import Config
from ferrule.archs.decoder import LAYER_TYPES, MODULES, check_separate_tensors, decoder, layer_windows
from ferrule.archs.gemma import gemma_embedding
from ferrule.archs.gemma2 import NORMS_AROUND
from ferrule.archs.per_layer import PER_LAYER_MODULES, per_layer_block, per_layer_projections, per_layer_table
from ferrule.archs.rope import read_rope
from ferrule.archs.shared_kv import kv_layers, reading
from ferrule.archs.spec import (
    Activation,
    Attention,
    Block,
    Dense,
    Experts,
    HeadNorm,
    HeadProjections,
    Layer,
    LmHead,
    ModelSpec,
    RmsNorm,
    Router,
)
from ferrule.archs.tensors import Fused, fused, tensors_named

_BLOCK = "model.layers.{layer}"

_MODULES = {**MODULES, **NORMS_AROUND, **PER_LAYER_MODULES, "scalar.weight": f"{_BLOCK}.layer_scalar"}

_EXPERT_MODULES = {
    "moe_joint_norm": f"{_BLOCK}.post_feedforward_layernorm",
    "ffn_post_norm": f"{_BLOCK}.post_feedforward_layernorm_1",
    "moe_post_norm": f"{_BLOCK}.post_feedforward_layernorm_2",
    "moe.input_norm": f"{_BLOCK}.pre_feedforward_layernorm_2",
    "moe.router": f"{_BLOCK}.router.proj",
    "moe.router_norm.weight": f"{_BLOCK}.router.scale",
    "moe.router.scales": f"{_BLOCK}.router.per_expert_scale",
}

_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def gemma4(config: Config) -> ModelSpec:
    """Five of six layers have a window, but never the last one; the others have larger heads."""
    config = config.with_defaults(
        head_dim=256,
        max_position_embeddings=131_072,
        sliding_window=512,
        rope_parameters=_ROPES,
        vocab_size_per_layer_input=262_144,
    ).with_absent(num_key_value_heads=4, global_head_dim=512, hidden_size_per_layer_input=256)
    # Bidirectional attention between the tokens of an image does not concern text.
    if config.values.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise config.unsupported("use_bidirectional_attention", '"vision", false or null')
    layers = config.layers
    types = config.texts("layer_types")
    if types and types[-1] == "sliding_attention":
        config = config.with_values(layer_types=[*types[:-1], "full_attention"])
    norm = RmsNorm(config.number("rms_norm_eps", default=1e-6))
    windows = layer_windows(
        config,
        sliding=lambda index: (index + 1) % 6 != 0 and index + 1 < layers,
        window=config.integer("sliding_window"),
    )
    read = kv_layers(config, windows)
    heads = _heads(config, windows, read)
    widths = {LAYER_TYPES[window is not None]: width for window, (width, _) in zip(windows, heads, strict=True)}
    activation = config.activation_named("hidden_activation", default="gelu_pytorch_tanh")
    width = config.integer("intermediate_size")
    double = config.flag("use_double_wide_mlp", default=False)
    spec = decoder(
        config,
        norm=norm,
        norms="around",
        windows=windows,
        rope_of=lambda layer_type: read_rope(config, widths[layer_type], layer_type),
        output_bias=config.flag("attention_bias", default=False),
        scale=1.0,
        attention_of=lambda index, attention: _attention(config, attention, heads[index], read[index]),
        ffn=[Dense(width * (1 if layer is None or not double else 2), activation) for layer in read],
        embedding=gemma_embedding(config),
        lm_head=LmHead(
            tied=config.flag("tie_word_embeddings", default=True),
            softcap=config.number_or_none("final_logit_softcapping"),
        ),
        modules=_MODULES,
    )
    experts = _experts(config, norm, activation) if config.flag("enable_moe_block", default=False) else None
    per_layer = config.integer("hidden_size_per_layer_input", default=0, low=0) > 0
    blocks = [
        [
            *_blocks(layer, norm, experts),
            *([per_layer_block(config, index, norm, activation)] if per_layer else []),
        ]
        for index, layer in enumerate(spec.layers)
    ]
    spec = replace(
        spec,
        layers=[Layer(tuple(each), scalar=True) for each in blocks],
        tables=[per_layer_table(config)] if per_layer else [],
    )
    modules = _MODULES if experts is None else {**_MODULES, **_expert_modules(experts)}
    known = per_layer_projections(config) if per_layer else None
    return replace(spec, tensors=tensors_named(spec, modules, known))


def _heads(config: Config, windows: Sequence[int | None], read: Sequence[int | None]) -> list[tuple[int, int]]:
    """Returns the width of a head and the number of key-value heads of each layer.

    `per_layer_config` has those that differ from the usual ones; without it, layers of full attention have others.
    """
    usual = (config.head_dim, config.kv_heads)
    heads = [usual if window is not None else _global_heads(config) for window in windows]
    # As in transformers, a present field replaces global_head_dim and num_global_key_value_heads, even if it is null.
    if "per_layer_config" in config.values:
        overrides = config.inner("per_layer_config")
        heads = [usual] * len(windows)
        for key in overrides.values:
            if not key.isdecimal() or int(key) >= len(windows):
                raise config.error("per_layer_config", f"an object with keys from 0 to {len(windows) - 1}")
            heads[int(key)] = _heads_of_layer(config, overrides.inner(key))
    for index, (window, source) in enumerate(zip(windows, read, strict=True)):
        alike = [other for other, kind in enumerate(windows) if kind == window]
        if heads[index][0] != heads[alike[0]][0]:
            raise config.error("per_layer_config", "an object with one head_dim for all layers of a type")
        if source is not None and heads[index] != heads[source]:
            raise config.error("per_layer_config", "an object with the same heads in layers that share keys and values")
    return heads


def _global_heads(config: Config) -> tuple[int, int]:
    """Returns the width of a head and the number of key-value heads in layers of full attention."""
    width = config.integer("global_head_dim", default=config.head_dim)
    if not config.flag("attention_k_eq_v", default=False):
        return width, config.kv_heads
    kv_heads = config.integer("num_global_key_value_heads", default=config.kv_heads)
    if config.heads % kv_heads:
        raise config.error("num_global_key_value_heads", f"a divisor of num_attention_heads ({config.heads})")
    return width, kv_heads


def _heads_of_layer(config: Config, layer: Config) -> tuple[int, int]:
    for field in layer.values:
        if field not in ("head_dim", "num_key_value_heads"):
            raise layer.unsupported(field, "missing, because only head_dim and num_key_value_heads differ by layer")
    kv_heads = layer.integer("num_key_value_heads", default=config.kv_heads)
    if config.heads % kv_heads:
        raise layer.error("num_key_value_heads", f"a divisor of num_attention_heads ({config.heads})")
    return layer.integer("head_dim", default=config.head_dim), kv_heads


def _attention(config: Config, attention: Attention, heads: tuple[int, int], read: int | None) -> Attention:
    """Returns an attention with these heads and normed values, or with the keys and values of another layer."""
    width, kv_heads = heads
    projections = HeadProjections(
        kv_heads,
        key_dim=width,
        value_dim=width,
        bias=config.flag("attention_bias", default=False),
        qk_norm=HeadNorm(RmsNorm(config.number("rms_norm_eps", default=1e-6))),
        values_are_keys=attention.window is None and config.flag("attention_k_eq_v", default=False),
        v_norm=RmsNorm(config.number("rms_norm_eps", default=1e-6), weight=False),
    )
    attention = replace(attention, projections=projections)
    return attention if read is None else reading(attention, read)


def _experts(config: Config, norm: RmsNorm, activation: Activation) -> Experts:
    """Returns the experts, whose router has a norm and a factor for each expert."""
    experts = config.experts("num_experts")
    check_separate_tensors(config, config.layers * experts)
    return Experts(
        experts=experts,
        experts_per_token=config.integer("top_k_experts"),
        expert=Dense(config.integer("moe_intermediate_size"), activation),
        norm=norm,
        router=Router(norm=norm, logit_scale=config.integer("hidden_size") ** -0.5, normalize=True, expert_scales=True),
    )


def _blocks(layer: Layer, norm: RmsNorm, experts: Experts | None) -> Iterator[Block]:
    """Yields the blocks of a layer with its experts. They are beside the dense network, and a norm follows the sum."""
    for block in layer.blocks:
        if block.name == "ffn" and experts is not None:
            yield Block("moe", experts, post_norm=norm, joint_norm=norm)
            yield replace(block, parallel=True)
        else:
            yield block


def _expert_modules(experts: Experts) -> dict[str, str | Fused]:
    rows = {f"moe.experts.{role}.weight": experts.expert.intermediate_size for role in ("gate", "up")}
    return {
        **_EXPERT_MODULES,
        **fused(f"{_BLOCK}.experts.gate_up_proj", rows, stack=experts.experts),
        **fused(f"{_BLOCK}.experts.down_proj", "moe.experts.down.weight", stack=experts.experts),
    }
