"""GGUF architectures whose layers differ in heads, rotary embedding or span of attention."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any, cast

from ferrule._loading.gguf.architecture import (
    GgufArchitecture,
    by_layer,
    fraction,
    has_biases,
    layers_with,
    require_gating,
    sliding,
)
from ferrule._loading.gguf.file import GgufFile
from ferrule.archs.config import Config
from ferrule.archs.deepseek_v4 import HEAVY, SLIDING, SPARSE
from ferrule.archs.rope import DEFAULT_THETA, ORIGINAL_LENGTH

FULL = "full_attention"
SQRT_SOFTPLUS = 4
"""Number of DeepSeek-V4's score function in `expert_gating_func`."""
UNROTATED = 1e30
"""Divisor of the frequencies of pairs that are not rotated."""
_KV_HEADS = "attention.head_count_kv"
_SLIDING_BASE = "rope.freq_base_swa"
_BLOCK_INDEXER = {
    "index_n_heads": "attention.indexer.head_count",
    "index_head_dim": "attention.indexer.key_length",
    "index_topk_blocks": "attention.indexer.top_k",
    "index_block_size": "attention.indexer.block_size",
    "index_local_blocks": "attention.indexer.local_blocks",
}


def _kv_heads(file: GgufFile, config: Config, kinds: list[str]) -> dict[str, int]:
    """Returns the number of key-value heads of each kind of layer.

    Raises UnsupportedModelError if it differs between layers of a kind.
    """
    found: dict[str, int] = {}
    for kind, heads in zip(kinds, by_layer(file, config, _KV_HEADS), strict=True):
        if found.setdefault(kind, heads) != heads:
            raise file.metadata.unsupported(file.key(_KV_HEADS), f"the same in all layers with {kind}")
    return found


def _gemma4(file: GgufFile, config: Config) -> dict[str, Any]:
    """Returns Gemma 4's fields; keys that do not end in `_swa` are about layers of full attention."""
    metadata, full_dim = file.metadata, config.head_dim
    head_dim = metadata.integer(file.key("attention.key_length_swa"), default=full_dim)
    for name, width in (
        ("attention.value_length", full_dim),
        ("attention.value_length_swa", head_dim),
        ("rope.dimension_count", full_dim),
        ("rope.dimension_count_swa", head_dim),
    ):
        if metadata.integer(file.key(name), default=width) != width:
            raise metadata.unsupported(file.key(name), f"equal to the length of keys ({width})")
    fields = sliding(file, config, 6)
    kinds: list[str] = fields["layer_types"]
    heads = _kv_heads(file, config, kinds)
    with_values = layers_with(file, config, "attn_v.weight", "attn_qkv.weight")
    values_are_keys = FULL in kinds and not any(kinds[index] == FULL for index in with_values)
    widths = by_layer(file, config, "feed_forward_length")
    if not values_are_keys and len(set(heads.values())) > 1:
        raise metadata.unsupported(file.key(_KV_HEADS), "the same in all layers if all have projections to values")
    base = metadata.number(file.key(_SLIDING_BASE), default=DEFAULT_THETA, above=1.0)
    return {
        **fields,
        **has_biases(file),
        **_networks(file, config, widths),
        "head_dim": head_dim,
        "global_head_dim": full_dim,
        "num_key_value_heads": heads.get(SLIDING, heads.get(FULL)),
        "num_global_key_value_heads": heads.get(FULL),
        "attention_k_eq_v": values_are_keys,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": base},
            FULL: {"rope_theta": config.number("rope_theta", default=1e6), **_proportional(file, full_dim)},
        },
    }


def _gemma3n(file: GgufFile, config: Config) -> dict[str, Any]:
    """Returns Gemma 3n's fields; files have the cutoff of gates in standard deviations, not the share of gates."""
    metadata, scales = file.metadata, file.key("activation_sparsity_scale")
    fields: dict[str, Any] = {
        **sliding(file, config, 5),
        **has_biases(file),
        "intermediate_size": by_layer(file, config, "feed_forward_length"),
        "laurel_rank": file.rows("blk.0.laurel_l.weight"),
        "altup_correct_scale": "altup_correct_scale.weight" in file.in_layers,
        "vocab_size_per_layer_input": file.rows("per_layer_token_embd.weight"),
        "rope_local_base_freq": metadata.number(file.key(_SLIDING_BASE), default=DEFAULT_THETA, above=1.0),
    }
    if scales in metadata:
        fields["activation_sparsity_pattern"] = _shares(metadata, scales, config.layers)
    return fields


def _shares(metadata: Config, key: str, layers: int) -> list[float]:
    """Returns the share of gates of each layer that are 0: the normal distribution at the layer's cutoff."""
    value: object = metadata.values[key]
    items = cast("list[object]", value) if isinstance(value, list) else []
    cutoffs = [item for item in items if isinstance(item, float) and item < math.inf]  # false for NaN as well
    if len(items) < layers or len(cutoffs) != len(items):
        raise metadata.error(key, f"a list of {layers} numbers, which may be -inf")
    return [NormalDist().cdf(cutoff) for cutoff in cutoffs[:layers]]


def _networks(file: GgufFile, config: Config, widths: list[int]) -> dict[str, Any]:
    """Returns the fields of Gemma 4's networks: the last ones, of shared keys and values, may be twice as wide."""
    shared = file.metadata.integer(file.key("attention.shared_kv_layers"), default=0, low=0, high=config.layers - 1)
    double = bool(shared) and widths[-1] == 2 * widths[0]
    first = config.layers - shared
    if widths != [widths[0]] * first + [widths[0] * (1 + double)] * shared:
        raise file.metadata.unsupported(
            file.key("feed_forward_length"), "the same in all layers, or twice as large in those of shared_kv_layers"
        )
    fields: dict[str, Any] = {"intermediate_size": widths[0], "use_double_wide_mlp": double}
    if file.metadata.values.get(file.key("expert_count")):
        fields["enable_moe_block"] = True
    if "per_layer_token_embd.weight" in file:
        fields["vocab_size_per_layer_input"] = file.rows("per_layer_token_embd.weight")
    return fields


def _proportional(file: GgufFile, head_dim: int) -> dict[str, Any]:
    """Returns the scaling of full attention: a divisor for each pair, which for pairs without rotation is huge."""
    name = "rope_freqs.weight"
    if name not in file:
        return {"rope_type": "default"}
    divisors = file.factors(name, head_dim // 2)
    rotated = [divisor for divisor in divisors if divisor < UNROTATED]
    same = len(set(rotated)) == 1 and list(divisors[: len(rotated)]) == rotated
    if not same:
        raise file.metadata.unsupported(
            "tensor rope_freqs.weight", f"one number for the first pairs, and {UNROTATED:g} for the others"
        )
    return {
        "rope_type": "proportional",
        "partial_rotary_factor": fraction(2 * len(rotated), head_dim),
        "factor": rotated[0],
    }


def _mimo2(file: GgufFile, config: Config) -> dict[str, Any]:
    """Returns MiMo-V2's fields."""
    metadata, head_dim = file.metadata, config.head_dim
    rotary_dim = metadata.integer(file.key("rope.dimension_count"), default=head_dim, low=2, high=head_dim)
    fields = sliding(file, config, 0)
    kinds: list[str] = fields["layer_types"]
    heads = _kv_heads(file, config, kinds)
    sinks = {kinds[index] for index in layers_with(file, config, "attn_sinks.weight")}
    sparse = layers_with(file, config, "ffn_gate_inp.weight")
    return {
        **fields,
        **has_biases(file),
        "num_key_value_heads": heads.get(FULL, heads.get(SLIDING)),
        "swa_num_key_value_heads": heads.get(SLIDING, heads.get(FULL)),
        "v_head_dim": metadata.integer(file.key("attention.value_length"), default=head_dim),
        "partial_rotary_factor": fraction(rotary_dim, head_dim),
        "swa_rope_theta": metadata.number(
            file.key(_SLIDING_BASE), default=config.number("rope_theta", default=DEFAULT_THETA), above=1.0
        ),
        "add_full_attention_sink_bias": FULL in sinks,
        "add_swa_attention_sink_bias": SLIDING in sinks,
        "mlp_layer_types": ["sparse" if index in sparse else "dense" for index in range(config.layers)],
    }


def _granite_swa(file: GgufFile, config: Config) -> dict[str, Any]:
    """Returns the fields of Granite with windows, dense or with experts."""
    metadata, key = file.metadata, file.key("attention.rope_pattern")
    base = config.number("rope_theta", default=DEFAULT_THETA)
    rotated = metadata.flags(key) or [True] * config.layers
    if len(rotated) < config.layers:
        raise metadata.error(key, f"a list of {config.layers} items that are true for layers with a rotary embedding")
    fields = {
        **sliding(file, config, 4, first=True),
        **has_biases(file),
        "mlp_bias": "ffn_up.bias" in file.in_layers,
        "layer_rope_theta": [base if rotates else 0 for rotates in rotated[: config.layers]],
        "attention_multiplier": config.number("attention_multiplier", default=1 / math.sqrt(config.head_dim)),
    }
    if metadata.values.get(file.key("expert_count")):
        shared = metadata.integer(file.key("expert_shared_feed_forward_length"), default=0, low=0)
        fields |= {"model_type": "granitemoe_swa", "shared_intermediate_size": shared}
    return fields


def _llama4(file: GgufFile, config: Config) -> dict[str, Any]:
    """Returns Llama 4's fields; files lack some numbers, which llama.cpp has as constants.

    A window of 0 means that all layers attend to everything and rotate.
    """
    metadata, layers = file.metadata, config.layers
    fields = {
        **has_biases(file),
        "moe_layers": layers_with(file, config, "ffn_gate_inp.weight"),
        # The published model with 128 experts has no norms of queries and keys.
        "use_qk_norm": config.integer("num_local_experts") != 128,
    }
    if metadata.integer(file.key("attention.sliding_window"), default=1, low=0) == 0:
        return {**fields, "no_rope_layers": [1] * layers, "layer_types": [FULL] * layers}
    return {
        **fields,
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "no_rope_layer_interval": metadata.integer(file.key("attention.sliding_window_pattern"), default=4),
    }


def _deepseek4(file: GgufFile, config: Config) -> dict[str, Any]:
    """Returns DeepSeek-V4's fields: layers with an indexer choose entries, other layers with entries read all of them.

    Raises UnsupportedModelError if layers of one kind differ in the tokens of an entry, or in the limit of their gates.
    """
    metadata, key = file.metadata, file.key("expert_gating_func")
    if metadata.integer(key, default=SQRT_SOFTPLUS) != SQRT_SOFTPLUS:
        raise metadata.unsupported(key, f"{SQRT_SOFTPLUS} (square root of softplus) in this architecture")
    ratios, key = by_layer(file, config, "attention.compress_ratios"), file.key("attention.compress_ratios")
    indexed = layers_with(file, config, "indexer.proj.weight")
    kinds = [SPARSE if index in indexed else HEAVY if ratio else SLIDING for index, ratio in enumerate(ratios)]
    rates = dict(zip(kinds, ratios, strict=True))
    if any(rates[kind] != ratio for kind, ratio in zip(kinds, ratios, strict=True)):
        raise metadata.unsupported(key, "the same for all layers with an indexer, and for all others that are not 0")
    limits = {limit for name in ("swiglu_clamp_exp", "swiglu_clamp_shexp") for limit in _limits(file, name)}
    if len(limits) > 1:
        limit = "the same for all layers, and equal to swiglu_clamp_shexp"
        raise metadata.unsupported(file.key("swiglu_clamp_exp"), limit)
    # The factor of YaRN on attention is 1 in this architecture.
    scaling = {name: value for name, value in config.values["rope_scaling"].items() if name != "attention_factor"}
    if scaling:
        scaling[ORIGINAL_LENGTH] = config.integer(ORIGINAL_LENGTH)
    return {
        "layer_types": kinds,
        "compress_rates": {kind: rate for kind, rate in rates.items() if kind != SLIDING},
        "rope_scaling": scaling,
        "swiglu_limit": min(limits, default=None),
    }


def _minimax_m3(file: GgufFile, config: Config) -> dict[str, Any]:
    """Returns MiniMax-M3's fields: all layers after the dense ones have experts and an indexer.

    Raises ConfigError if a layer has no indexer, as in files that old versions of llama.cpp wrote.
    """
    metadata, layers = file.metadata, config.layers
    require_gating(file, "sigmoid")
    if not metadata.flag(file.key("expert_weights_norm"), default=True):
        raise metadata.unsupported(file.key("expert_weights_norm"), "true or omitted in this architecture")
    dense = metadata.integer(file.key("leading_dense_block_count"), default=0, low=0, high=layers)
    for layer in range(dense, layers):
        file.shape(f"blk.{layer}.indexer.q_proj.weight")
    for field in _BLOCK_INDEXER:
        config.integer(field, low=0 if field == "index_local_blocks" else 1)
    shared = metadata.integer(file.key("expert_shared_count"))
    return {
        "layer_types": [FULL] * dense + ["minimax_m3_sparse"] * (layers - dense),
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (layers - dense),
        "shared_intermediate_size": shared * config.integer("intermediate_size"),
    }


def _limits(file: GgufFile, name: str) -> tuple[float, ...]:
    """Returns the limits of all layers under a key, which may hold one number for all of them."""
    metadata, key = file.metadata, file.key(name)
    if isinstance(metadata.values.get(key), list):
        return metadata.numbers(key)
    limit = metadata.number_or_none(key)
    return () if limit is None else (limit,)


VARIED = (
    GgufArchitecture(
        "deepseek4",
        "deepseek_v4",
        {
            "n_routed_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "n_shared_experts": "expert_shared_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "routed_scaling_factor": "expert_weights_scale",
            "norm_topk_prob": "expert_weights_norm",
            "num_hash_layers": "hash_layer_count",
            "q_lora_rank": "attention.q_lora_rank",
            "qk_rope_head_dim": "rope.dimension_count",
            "sliding_window": "attention.sliding_window",
            "o_groups": "attention.output_group_count",
            "o_lora_rank": "attention.output_lora_rank",
            "compress_rope_theta": "attention.compress_rope_freq_base",
            "index_n_heads": "attention.indexer.head_count",
            "index_head_dim": "attention.indexer.key_length",
            "index_topk": "attention.indexer.top_k",
            "hc_mult": "hyper_connection.count",
            "hc_sinkhorn_iters": "hyper_connection.sinkhorn_iterations",
            "hc_eps": "hyper_connection.epsilon",
        },
        derive=_deepseek4,
        interleaved=None,
    ),
    GgufArchitecture(
        "gemma3n",
        "gemma3n_text",
        {
            "final_logit_softcapping": "final_logit_softcapping",
            "num_kv_shared_layers": "attention.shared_kv_layers",
            "hidden_size_per_layer_input": "embedding_length_per_layer_input",
            "altup_num_inputs": "altup.num_inputs",
            "altup_active_idx": "altup.active_idx",
        },
        {"num_kv_shared_layers": 0},
        _gemma3n,
        varying=("intermediate_size",),
    ),
    GgufArchitecture(
        "gemma4",
        "gemma4_text",
        {
            "final_logit_softcapping": "final_logit_softcapping",
            "num_kv_shared_layers": "attention.shared_kv_layers",
            "hidden_size_per_layer_input": "embedding_length_per_layer_input",
            "num_experts": "expert_count",
            "top_k_experts": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
        },
        {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
        _gemma4,
        rotates=False,
        heads=False,
        varying=("num_key_value_heads", "intermediate_size"),
    ),
    GgufArchitecture(
        "granite_swa",
        "granite_swa",
        {
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
            "attention_multiplier": "attention.scale",
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
        },
        derive=_granite_swa,
        interleaved=True,
    ),
    GgufArchitecture(
        "llama4",
        "llama4_text",
        {
            "intermediate_size": "expert_feed_forward_length",
            "intermediate_size_mlp": "feed_forward_length",
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        derive=_llama4,
        interleaved=True,
    ),
    GgufArchitecture(
        "mimo2",
        "mimo_v2_flash",
        {
            "n_routed_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "routed_scaling_factor": "expert_weights_scale",
            "attention_value_scale": "attention.value_scale",
            "n_group": "expert_group_count",
            "topk_group": "expert_group_used_count",
        },
        derive=_mimo2,
        heads=False,
        varying=("num_key_value_heads",),
    ),
    GgufArchitecture(
        "minimax-m3",
        "minimax_m3_vl_text",
        {
            **_BLOCK_INDEXER,
            "intermediate_size": "expert_feed_forward_length",
            "dense_intermediate_size": "feed_forward_length",
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "routed_scaling_factor": "expert_weights_scale",
        },
        {"routed_scaling_factor": 1.0},
        _minimax_m3,
    ),
)
"""Architectures that the registry contains too."""
