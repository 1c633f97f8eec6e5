"""DeepSeek-V4 (DeepSeek-AI 2026): compressed attention, experts by token id, and mixed residual streams."""

from __future__ import annotations

from dataclasses import replace

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.experts import routed_experts
from ferrule.archs.qwen4_exp import MAX_STREAMS
from ferrule.archs.rope import DEFAULT_THETA, read_rope, rope_parameters
from ferrule.archs.spec import (
    Clamp,
    CompressedAttention,
    Compression,
    EntryIndexer,
    Experts,
    Layer,
    ModelSpec,
    RmsNorm,
    Rope,
    Router,
    Sinkhorn,
    Span,
    Streams,
    Weighted,
)
from ferrule.archs.tensors import Fused, fused, tensors_named

_LAYER = "model.layers.{layer}"
_ATTENTION = f"{_LAYER}.attn"
_FFN = f"{_LAYER}.ffn"
_INDEXER = f"{_ATTENTION}.indexer"
_BLOCK = "compressed_attention"

_MODULES: dict[str, str | Fused] = {
    "lm_head": "head",
    f"{_BLOCK}_norm": f"{_LAYER}.attn_norm",
    f"{_BLOCK}.q_a": f"{_ATTENTION}.wq_a",
    f"{_BLOCK}.q_a_norm": f"{_ATTENTION}.q_norm",
    f"{_BLOCK}.q_b": f"{_ATTENTION}.wq_b",
    f"{_BLOCK}.kv": f"{_ATTENTION}.wkv",
    f"{_BLOCK}.kv_norm": f"{_ATTENTION}.norm",
    f"{_BLOCK}.sinks.weight": f"{_ATTENTION}.attn_sink",
    f"{_BLOCK}.output": f"{_ATTENTION}.wo_b",
    f"{_BLOCK}.indexer.q": f"{_INDEXER}.wq_b",
    f"{_BLOCK}.indexer.weights": f"{_INDEXER}.weights_proj",
    **{
        f"{_BLOCK}.{role}.{part}": f"{module}.compressor.{name}"
        for role, module in (("compressor", _ATTENTION), ("indexer", _INDEXER))
        for part, name in (("values", "wkv"), ("gates", "wgate"), ("bias.weight", "ape"), ("norm", "norm"))
    },
    "ffn_norm": f"{_LAYER}.ffn_norm",
    "ffn.router": f"{_FFN}.gate",
    "ffn.router.correction_bias": f"{_FFN}.gate.bias",
    "ffn.router.token_experts": f"{_FFN}.gate.tid2eid",
    **{
        f"ffn.{role}.{part}": f"{_FFN}.{module}.{name}"
        for role, module in (("experts", "experts.{expert}"), ("shared", "shared_experts"))
        for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    },
    **{
        f"{span}_streams.{role}.weight": f"{_LAYER}.hc_{module}_{name}"
        for span, module in (("attention", "attn"), ("ffn", "ffn"))
        for role, name in (("mix", "fn"), ("base", "base"), ("scale", "scale"))
    },
    **{f"streams.end.{role}.weight": f"model.hc_head.hc_{name}" for role, name in (("mix", "fn"), ("base", "base"))},
    "streams.end.scale.weight": "model.hc_head.hc_scale",
}

_ALTERNATIVES = {
    "embedding": "embed",
    f"{_BLOCK}.kv_norm": f"{_ATTENTION}.kv_norm",
    **{f"streams.end.{role}.weight": f"hc_head_{name}" for role, name in (("mix", "fn"), ("base", "base"))},
    "streams.end.scale.weight": "hc_head_scale",
}
"""Names in DeepSeek's own files, where layers and the final norm have no prefix."""

SLIDING, SPARSE, HEAVY = LAYER_TYPES = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
"""Kinds of attention: to a window; also to entries that an indexer chooses; also to all entries."""
LAYER_TYPE_OF_RATIO = {0: SLIDING, 4: SPARSE, 128: HEAVY}
"""Kind of attention by the number of tokens of a block, which `compress_ratios` lists for each layer."""
DEFAULT_RATES = {SPARSE: 4, HEAVY: 128}
"""Tokens of a block."""
OLD_RATE_FIELDS = {SPARSE: "compress_rate_csa", HEAVY: "compress_rate_hca"}
"""Fields of old files with the tokens of a block."""
PAGE_TOKENS = 16
"""Tokens of a page in the native module, which blocks divide or are a multiple of."""
MAX_ITERATIONS = 100
"""Most iterations that normalize a matrix; the native module has the same limit."""


def deepseek_v4(config: Config) -> ModelSpec:
    """Multi-token prediction layers are ignored."""
    config = config.spelled(n_routed_experts="num_local_experts").with_defaults(
        max_position_embeddings=1_048_576,
        moe_intermediate_size=2048,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=6,
        num_attention_heads=64,
        num_key_value_heads=1,
        head_dim=512,
    )
    config.require(num_key_value_heads=1, attention_bias=False, mlp_bias=False)
    config.require(n_shared_experts=1, norm_topk_prob=True, scoring_func="sqrtsoftplus", hidden_act="silu")
    eps = config.number("rms_norm_eps", default=1e-6)
    types = _layer_types(config)
    ropes = [_rope(config, "main" if kind == SLIDING else "compress") for kind in types]
    places = {rope: place for place, rope in enumerate(dict.fromkeys(ropes))}
    attentions = [_attention(config, kind, eps, rope, places[rope]) for kind, rope in zip(types, ropes, strict=True)]
    experts = {by_token: _experts(config, by_token=by_token) for by_token in (False, True)}
    modules = {**_MODULES, **_output_modules(attentions[0])}
    spec = decoder(
        config,
        layer_ropes=ropes,
        mixers=dict(enumerate(attentions)),
        ffn=[experts[by_token] for by_token in _layers_by_token(config)],
        modules=modules,
        alternatives=_ALTERNATIVES,
    )
    streams = config.integer("hc_mult", default=4, low=2, high=MAX_STREAMS)
    weighted = Weighted(RmsNorm(eps, weight=False), config.number("hc_eps", default=1e-6))
    mix = Sinkhorn(weighted.norm, weighted.eps, config.integer("hc_sinkhorn_iters", default=20, high=MAX_ITERATIONS))
    spans = (Span("attention_streams", 1, mix), Span("ffn_streams", 1, mix))
    layers = [Layer(tuple(replace(block, stream_scale=0.0) for block in layer.blocks), spans) for layer in spec.layers]
    spec = replace(spec, layers=layers, streams=Streams(streams, weighted))
    return replace(spec, tensors=tensors_named(spec, modules, spec.tensors, _ALTERNATIVES))


def _output_modules(attention: CompressedAttention) -> dict[str, Fused]:
    """Returns the tensor that has the first projections of all groups of heads."""
    rows = {f"{_BLOCK}.output_{group}.weight": attention.output_rank for group in range(attention.output_groups)}
    return fused(f"{_ATTENTION}.wo_a.weight", rows)


def _layer_types(config: Config) -> list[str]:
    """Returns the kind of attention of each layer: by `layer_types`, or by `compress_ratios`.

    Without either, two layers attend to all entries, and then the kinds with entries alternate.
    """
    layers = config.layers
    if "layer_types" not in config and "compress_ratios" in config:
        ratios = config.integers("compress_ratios", low=0, high=max(LAYER_TYPE_OF_RATIO))[:layers]
        if len(ratios) != layers or any(ratio not in LAYER_TYPE_OF_RATIO for ratio in ratios):
            known = ", ".join(map(str, LAYER_TYPE_OF_RATIO))
            raise config.error("compress_ratios", f"a list of at least {layers} items, each one of {known}")
        return [LAYER_TYPE_OF_RATIO[ratio] for ratio in ratios]
    usual = [HEAVY if index < 2 or index % 2 == 0 else SPARSE for index in range(layers)]
    return config.layer_kinds("layer_types", *LAYER_TYPES) or usual


def _rope(config: Config, kind: str) -> Rope:
    """Returns the rotary embedding of layers without entries ("main") or with them ("compress").

    Only the latter is scaled, without the usual factor of YaRN on attention.
    """
    rotated = config.integer("qk_rope_head_dim", default=64, high=config.head_dim) / config.head_dim
    parameters = rope_parameters(config)
    if not any(isinstance(value, dict) for value in parameters.values.values()):
        theta = config.number("compress_rope_theta", default=160_000.0, above=1.0)
        scaling = {"attention_factor": 1.0, **parameters.values, "rope_theta": theta}
        main = {"rope_theta": config.number("rope_theta", default=DEFAULT_THETA, above=1.0)}
        config = config.without("rope_scaling").with_values(rope_parameters={"main": main, "compress": scaling})
    return read_rope(config, config.head_dim, kind, partial=rotated, interleaved=True)


def _attention(config: Config, kind: str, eps: float, rope: Rope, place: int) -> CompressedAttention:
    heads, groups = config.heads, config.integer("o_groups", default=8)
    if heads % groups:
        raise config.error("o_groups", f"a divisor of num_attention_heads ({heads})")
    return CompressedAttention(
        heads=heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        window=config.integer("sliding_window", default=128),
        query_rank=config.integer("q_lora_rank", default=1024),
        norm=RmsNorm(eps),
        query_norm=RmsNorm(eps, weight=False),
        rope=place,
        output_groups=groups,
        output_rank=config.integer("o_lora_rank", default=1024),
        compression=None if kind == SLIDING else _compression(config, kind, rope.rotary_dim),
    )


def _compression(config: Config, kind: str, rotary_dim: int) -> Compression:
    rates, field = config.inner("compress_rates"), kind
    if OLD_RATE_FIELDS[kind] in config:
        rates, field = config, OLD_RATE_FIELDS[kind]
    block = rates.integer(field, default=DEFAULT_RATES[kind])
    if PAGE_TOKENS % block and block % PAGE_TOKENS:
        raise rates.unsupported(field, f"a divisor or a multiple of {PAGE_TOKENS}")
    if kind == HEAVY:
        return Compression(block)
    indexer = EntryIndexer(
        heads=config.integer("index_n_heads", default=64),
        head_dim=config.integer("index_head_dim", default=128, low=rotary_dim),
        entries=config.integer("index_topk", default=512),
    )
    return Compression(block, overlap=True, indexer=indexer)


def _layers_by_token(config: Config) -> list[bool]:
    """Returns for each layer whether experts are chosen by token id: by `mlp_layer_types`, or the first few."""
    types = config.layer_kinds("mlp_layer_types", "hash_moe", "moe")
    if not types:
        hashed = config.integer("num_hash_layers", default=3, low=0)
        return [index < hashed for index in range(config.layers)]
    return [kind == "hash_moe" for kind in types]


def _experts(config: Config, *, by_token: bool) -> Experts:
    router = Router(
        scoring="sqrt_softplus",
        normalize=True,
        scale=config.number("routed_scaling_factor", default=1.5),
        correction_bias=not by_token,
        token_experts=by_token,
    )
    experts = routed_experts(config, router)
    clamp = Clamp(alpha=1.0, limit=config.number("swiglu_limit", default=10.0), offset=0.0)
    network = replace(experts.expert, clamp=clamp)
    return replace(experts, expert=network, shared=network)
