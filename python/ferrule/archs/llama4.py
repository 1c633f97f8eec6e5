"""Llama 4 (Meta 2025): chunked attention, layers without rotation, and experts with weighted inputs."""

from __future__ import annotations

from dataclasses import replace

from ferrule.archs.config import MAX_LAYERS, Config
from ferrule.archs.decoder import decoder
from ferrule.archs.spec import Attention, Dense, Experts, HeadNorm, ModelSpec, QueryGrowth, RmsNorm, Router
from ferrule.archs.tensors import fused

TYPES = ("full_attention", "chunked_attention")


def llama4(config: Config) -> ModelSpec:
    """Layers without rotation attend to the whole context, with queries that grow with their position."""
    config = config.with_defaults(
        head_dim=128, max_position_embeddings=131_072, rms_norm_eps=1e-5, rope_theta=500_000.0
    ).with_absent(num_key_value_heads=8, attention_chunk_size=8192)
    rotated = _rotated(config)
    chunked = _chunked(config, rotated)
    chunk = config.integer_or_none("attention_chunk_size")
    norm = RmsNorm(config.number("rms_norm_eps"), weight=False)
    qk_norm = HeadNorm(norm, after_rope=True) if config.flag("use_qk_norm", default=True) else None
    growth = None
    if _tunes_temperature(config):
        beta = config.number("attn_scale", default=0.1, low=0.0)
        growth = QueryGrowth(beta, length=config.integer("floor_scale", default=8192), offset=1)

    def attention(index: int, usual: Attention) -> Attention:
        usual = replace(usual, chunk=chunk if chunked[index] else None)
        if rotated[index]:
            return replace(usual, projections=replace(usual.projections, qk_norm=qk_norm))
        return replace(usual, query_growth=growth)

    experts = _experts(config)
    width = experts.expert.intermediate_size
    step = config.integer("interleave_moe_layer_step", default=1)
    if "moe_layers" in config:
        sparse = set(config.integers("moe_layers", low=0, high=MAX_LAYERS))
    else:
        sparse = set(range(step - 1, config.layers, step))
    dense = Dense(config.integer("intermediate_size_mlp", default=16_384), config.activation)
    bias = config.flag("attention_bias", default=False)
    block = "model.layers.{layer}.feed_forward"
    gate_up = {"ffn.experts.gate.weight": width, "ffn.experts.up.weight": width}
    count = experts.experts
    return decoder(
        config,
        rotated=rotated,
        interleaved=True,
        qkv_bias=bias,
        output_bias=bias,
        attention_of=attention,
        ffn=[experts if index in sparse else dense for index in range(config.layers)],
        modules={
            **{f"ffn.{role}": f"{block}.{role}_proj" for role in ("gate", "up", "down")},
            **{f"ffn.shared.{role}": f"{block}.shared_expert.{role}_proj" for role in ("gate", "up", "down")},
            "ffn.router": f"{block}.router",
            **fused(f"{block}.experts.gate_up_proj", gate_up, transposed=True, stack=count),
            **fused(f"{block}.experts.down_proj", "ffn.experts.down.weight", transposed=True, stack=count),
        },
    )


def _tunes_temperature(config: Config) -> bool:
    """Returns whether queries grow; the first published files have an integer there."""
    field = "attn_temperature_tuning"
    is_number = type(config.values.get(field)) is int
    return config.integer(field, low=0) > 0 if is_number else config.flag(field, default=True)


def _experts(config: Config) -> Experts:
    expert = Dense(config.integer("intermediate_size"), config.activation)
    return Experts(
        experts=config.experts("num_local_experts", default=16),
        experts_per_token=config.integer("num_experts_per_tok", default=1),
        expert=expert,
        router=Router(scoring="sigmoid", weigh_input=True),
        shared=expert,
    )


def _rotated(config: Config) -> list[bool]:
    """Returns whether each layer is rotated, by `no_rope_layers`, where 1 means rotated."""
    layers = config.layers
    flags = config.integers("no_rope_layers", low=0, high=1)
    if not flags:
        interval = config.integer("no_rope_layer_interval", default=4)
        return [(index + 1) % interval != 0 for index in range(layers)]
    if len(flags) != layers:
        raise config.error("no_rope_layers", f"a list of {layers} items, each 0 or 1")
    return [bool(flag) for flag in flags]


def _chunked(config: Config, rotated: list[bool]) -> list[bool]:
    """Returns whether each layer has chunked attention, by default the rotated ones."""
    types = config.texts("layer_types") or [TYPES[flag] for flag in rotated]
    if len(types) != config.layers or any(kind not in TYPES for kind in types):
        raise config.error("layer_types", f"a list of {config.layers} items, each one of {', '.join(TYPES)}")
    return [kind == "chunked_attention" for kind in types]
