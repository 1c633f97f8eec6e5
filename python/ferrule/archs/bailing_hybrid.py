"""Bailing hybrid (Ling 3, inclusionAI 2026): Kimi delta attention with bounded decay, and gated latent attention.

Ling 3 flash is trained with limits of the experts' activations in its last layers, which transformers ignores.
"""

import math
from dataclasses import replace
from typing import cast

from ferrule.archs.config import Config, finite
from ferrule.archs.experts import (
    corrected_router,
    experts_after_dense,
    experts_by_layer_type,
    routed_experts,
)
from ferrule.archs.kimi_linear import delta_modules, experts_spelled
from ferrule.archs.latent import latent_decoder
from ferrule.archs.qwen3_next import attending_layers
from ferrule.archs.spec import Clamp, Decay, DeltaNet, Dense, Experts, Ffn, LmHead, ModelSpec, RmsNorm

_LAYER = "model.layers.{layer}"
_ATTENTION = f"{_LAYER}.attention"

MODULES = {
    "embedding": "model.word_embeddings",
    "attention.q": f"{_ATTENTION}.q_proj",
    "attention.q_a": f"{_ATTENTION}.q_a_proj",
    "attention.q_a_norm": f"{_ATTENTION}.q_a_layernorm",
    "attention.q_b": f"{_ATTENTION}.q_b_proj",
    "attention.kv_a": f"{_ATTENTION}.kv_a_proj_with_mqa",
    "attention.kv_a_norm": f"{_ATTENTION}.kv_a_layernorm",
    "attention.kv_b": f"{_ATTENTION}.kv_b_proj",
    "attention.gate": f"{_ATTENTION}.g_proj",
    "attention.output": f"{_ATTENTION}.dense",
    "delta_net.decay": f"{_ATTENTION}.f_proj",
    "delta_net.gate": f"{_ATTENTION}.g_proj",
    "delta_net.output": f"{_ATTENTION}.dense",
    "ffn.router.correction_bias": f"{_LAYER}.mlp.gate.expert_bias",
}
"""Module names in which Bailing's checkpoints differ from DeepSeek's."""

LIMITS = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")
"""Fields with the limit of each layer's experts, and of its shared expert; 0 or null for none."""


def bailing_hybrid(config: Config) -> ModelSpec:
    """The lm_head is stored, whatever `tie_word_embeddings` says; multi-token prediction layers are ignored."""
    config = experts_spelled(config).with_defaults(
        first_k_dense_replace=2,
        max_position_embeddings=262_144,
        moe_intermediate_size=768,
        n_routed_experts=512,
        rms_norm_eps=1e-6,
        rope_theta=6e6,
    )
    config.require(
        gated_attention_proj_granularity_type="head_wise",
        no_kda_lora=True,
        linear_attention="kda",
        rope_interleave=True,
        score_function="sigmoid",
        use_bias=False,
        use_qkv_bias=False,
    )
    # The rotated elements are those of qk_rope_head_dim, whatever this factor says.
    config = config.without("partial_rotary_factor")
    if "rope_parameters" in config:
        ropes = config.inner("rope_parameters").without("partial_rotary_factor")
        config = config.with_values(rope_parameters=ropes.values)
    # transformers writes the rotated part of a head in attention as head_dim, and the heads of delta nets apart.
    heads = config.integer("linear_num_heads", default=config.heads)
    head_dim = config.integer("linear_head_dim", default=config.integer("head_dim", default=128))
    taps = config.integer("linear_conv_kernel_dim", default=config.integer("short_conv_kernel_size", default=4))
    bounded = config.flag("kda_safe_gate", default=True)
    bound = config.number("kda_lower_bound", default=-5.0, low=-float("inf")) if bounded else None
    if bound is not None and bound > 0:
        raise config.error("kda_lower_bound", "at most 0")
    mixer = DeltaNet(
        key_heads=heads,
        value_heads=heads,
        key_dim=head_dim,
        value_dim=head_dim,
        taps=taps,
        norm=RmsNorm(config.number("rms_norm_eps")),
        activation=config.activation,
        decay=Decay(by_key=True, lower_bound=bound),
        gate="sigmoid",
    )
    experts = routed_experts(config, corrected_router(config))
    networks = experts_by_layer_type(config, experts) or experts_after_dense(config, experts)
    limits = zip(*(_limits(config, field) for field in LIMITS), strict=True)
    attending = attending_layers(config, interval=config.integer("layer_group_size", default=6))
    return latent_decoder(
        config,
        [_limited(network, *of_layer) for network, of_layer in zip(networks, limits, strict=True)],
        interleaved=True,
        output_gate="heads",
        mixers={index: mixer for index in range(config.layers) if index not in attending},
        lm_head=LmHead(tied=False),
        modules={**delta_modules(_ATTENTION), **MODULES},
        # transformers 5 has one name for both kinds of layers, unlike the published checkpoints.
        alternatives={"delta_net.output": f"{_ATTENTION}.o_proj"},
    )


def _limits(config: Config, field: str) -> list[float]:
    """Returns the limit of each layer; 0 for none, and for layers after the end of the list."""
    value: object = config.values.get(field)
    items = cast("list[object]", value) if isinstance(value, list) else []
    numbers = (finite(0 if item is None else item) for item in items)
    limits = [number for number in numbers if number is not None and number >= 0]
    if not isinstance(value, list | None) or len(limits) != len(items):
        raise config.error(field, "a list of finite numbers from 0, or null for no limit")
    return [*limits, *[0.0] * config.layers][: config.layers]


def _limited(network: Ffn, limit: float, shared_limit: float) -> Ffn:
    """Returns a layer's network with the limits of its experts."""
    if not isinstance(network, Experts) or network.shared is None:
        return network
    return replace(network, expert=_clamped(network.expert, limit), shared=_clamped(network.shared, shared_limit))


def _clamped(dense: Dense, limit: float) -> Dense:
    """Returns a network that computes min(silu(gate), limit) * clamp(up, -limit, limit); without a limit if it is 0.

    silu rises above 0, so it reaches the limit where the gate reaches the limit's inverse.
    """
    if not limit:
        return dense
    gate = limit
    for _ in range(100):  # converges to the inverse, because limit * exp(-gate) is at most 1 / e
        gate = limit * (1 + math.exp(-gate))
    return replace(dense, clamp=Clamp(alpha=1.0, limit=limit, offset=0.0, gate_limit=gate))
