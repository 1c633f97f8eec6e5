"""MiMo-V2-Flash (Xiaomi 2025): sliding layers with sinks and more key-value heads, and DeepSeek-V3's router."""

from __future__ import annotations

from dataclasses import replace

from ferrule.archs.config import Config
from ferrule.archs.decoder import LAYER_TYPES, decoder, layer_windows
from ferrule.archs.experts import EXPERT_MODULES, corrected_router, experts_by_layer_type
from ferrule.archs.rope import read_rope
from ferrule.archs.spec import Attention, Dense, Experts, HeadProjections, Layer, ModelSpec, Rope


def mimo_v2_flash(config: Config) -> ModelSpec:
    """Multi-token prediction layers are ignored."""
    config = config.with_defaults(
        head_dim=192,
        max_position_embeddings=131_072,
        moe_intermediate_size=2048,
        n_routed_experts=256,
        num_experts_per_tok=8,
        rms_norm_eps=config.number("layernorm_epsilon", default=1e-5),
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        **_layer_types(config),
    ).with_absent(attention_value_scale=0.707, num_key_value_heads=4)
    config.require(scoring_func="sigmoid", topk_method="noaux_tc")
    config.require(swa_num_attention_heads=config.heads, swa_head_dim=config.head_dim)
    bias = config.flag("attention_bias", default=False)
    value_dim = config.integer("v_head_dim", default=128)
    config.require(swa_v_head_dim=value_dim)
    experts = Experts(
        experts=config.experts("n_routed_experts"),
        experts_per_token=config.integer("num_experts_per_tok"),
        expert=Dense(config.integer("moe_intermediate_size"), config.activation),
        router=corrected_router(config),
    )
    sliding_kv_heads = config.with_values(
        num_key_value_heads=config.integer("swa_num_key_value_heads", default=2 * config.kv_heads)
    ).kv_heads
    sinks = {
        LAYER_TYPES[0]: config.flag("add_full_attention_sink_bias", default=False),
        LAYER_TYPES[1]: config.flag("add_swa_attention_sink_bias", default=True),
    }
    windows = layer_windows(config, sliding=_slides, window=_window(config))

    def attention(index: int, usual: Attention) -> Attention:
        sliding = windows[index] is not None
        kv_heads = sliding_kv_heads if sliding else config.kv_heads
        return replace(
            usual,
            projections=HeadProjections(kv_heads, key_dim=config.head_dim, value_dim=value_dim, bias=bias),
            sinks=sinks[LAYER_TYPES[sliding]],
        )

    spec = decoder(
        config,
        windows=windows,
        rope_of=lambda layer_type: _rope(config, layer_type),
        attention_of=attention,
        ffn=experts_by_layer_type(config, experts),
        modules={**EXPERT_MODULES, "attention.sinks.weight": "model.layers.{layer}.self_attn.attention_sink_bias"},
    )
    # The factor on the values passes through attention and the output projection, which has no bias.
    scale = config.number("attention_value_scale", default=1.0)
    blocks = [layer.blocks for layer in spec.layers]
    return replace(spec, layers=[Layer((replace(first, residual_scale=scale), *others)) for first, *others in blocks])


def _layer_types(config: Config) -> dict[str, list[str] | None]:
    """Returns the types of layers for those that are missing; published files write them as numbers."""
    attention = config.integers("hybrid_layer_pattern", low=0, high=1)
    networks = config.integers("moe_layer_freq", low=0, high=1)
    return {
        "layer_types": [LAYER_TYPES[kind] for kind in attention] or None,
        "mlp_layer_types": [("dense", "sparse")[kind] for kind in networks]
        or [("dense", "sparse")[index > 0] for index in range(config.layers)],
    }


def _slides(index: int) -> bool:
    """Whether a layer has a window by default: all but the first and every sixth."""
    return index > 0 and (index + 1) % 6 != 0


def _window(config: Config) -> int:
    """Returns the window with the present token, which `sliding_window_size` does not count."""
    earlier = config.integer_or_none("sliding_window_size")
    return config.integer("sliding_window", default=129) if earlier is None else earlier + 1


def _rope(config: Config, layer_type: str) -> Rope:
    """Sliding layers have a separate base."""
    sliding = layer_type == LAYER_TYPES[1]
    if "rope_parameters" not in config:
        if sliding:
            config = config.without("rope_theta").spelled(rope_theta="swa_rope_theta")
        config = config.with_defaults(rope_theta=10_000.0 if sliding else 5e6, partial_rotary_factor=0.334)
    return read_rope(config, config.head_dim, layer_type, partial=1.0)
