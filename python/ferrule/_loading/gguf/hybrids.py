"""GGUF architectures with other mixers than attention: short convolutions, delta nets and state-space layers.

The tensors of a layer show its mixers. Metadata shows them too, but under keys that differ between architectures.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

from ferrule._loading.gguf.architecture import (
    GgufArchitecture,
    by_layer,
    fraction,
    has_biases,
    latent,
    layers_with,
    require_gating,
    shared_experts,
)
from ferrule._loading.gguf.file import GgufFile
from ferrule.archs.config import MAX_SIZE, MAX_TABLE_ROWS, Config
from ferrule.archs.qwen4_exp import MAX_HASHES, MAX_NGRAM

_RMS_NORM = "attention.layer_norm_rms_epsilon"
_GRANITE = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "attention_multiplier": "attention.scale",
}
_EXPERTS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
_DELTA_NET = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}
_QWEN_INDEXER = {
    "indexer_n_heads": "attention.indexer.head_count",
    "indexer_head_dim": "attention.indexer.key_length",
    "indexer_budget": "attention.indexer.top_k",
}
_MAMBA2 = {
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_d_ssm": "ssm.inner_size",
    "mamba_d_state": "ssm.state_size",
    "mamba_n_groups": "ssm.group_count",
    "mamba_n_heads": "ssm.time_step_rank",
}


def _attending(file: GgufFile, config: Config) -> list[int]:
    return layers_with(file, config, "attn_output.weight")


def _layer_types(file: GgufFile, config: Config, other: str, tensor: str = "attn_output.weight") -> list[str]:
    """Returns the type of each layer: full attention if it has a tensor of this name, or `other`."""
    attending = layers_with(file, config, tensor)
    return ["full_attention" if index in attending else other for index in range(config.layers)]


def _quotient(file: GgufFile, key: str, divisor: str) -> int:
    """Returns the value of a key divided by that of another.

    Raises ConfigError if the division leaves a remainder.
    """
    whole, parts = (file.metadata.integer(file.key(name)) for name in (key, divisor))
    if whole % parts:
        raise file.metadata.error(file.key(key), f"a multiple of {divisor} ({parts})")
    return whole // parts


def _expansion(file: GgufFile, config: Config) -> float:
    """Returns the inner size relative to the hidden size."""
    return fraction(file.metadata.integer(file.key("ssm.inner_size")), config.integer("hidden_size"))


def _lfm2(file: GgufFile, config: Config) -> dict[str, Any]:
    if file.metadata.integer(file.key("attention.sliding_window"), default=0, low=0):
        raise file.metadata.unsupported(file.key("attention.sliding_window"), "0 or omitted in this architecture")
    if not file.metadata.flag(file.key("attention.causal"), default=True):
        raise file.metadata.unsupported(file.key("attention.causal"), "true or omitted in this architecture")
    return {
        "layer_types": _layer_types(file, config, "conv"),
        "conv_bias": "shortconv.conv.bias" in file.in_layers,
    }


def _lfm2moe(file: GgufFile, config: Config) -> dict[str, Any]:
    require_gating(file, "sigmoid")
    return {**_lfm2(file, config), "use_expert_bias": "exp_probs_b.bias" in file.in_layers}


def _delta_nets(file: GgufFile, config: Config) -> dict[str, Any]:
    """Returns the fields of Qwen's hybrids, with the layers that have no experts."""
    sparse = layers_with(file, config, "ffn_gate_inp.weight")
    return {
        "layer_types": _layer_types(file, config, "linear_attention"),
        "linear_value_head_dim": _quotient(file, "ssm.inner_size", "ssm.time_step_rank"),
        "mlp_only_layers": [index for index in range(config.layers) if index not in sparse],
    }


def _qwen4exp(file: GgufFile, config: Config) -> dict[str, Any]:
    """Returns Qwen4-Exp's fields. Files without embeddings of n-grams have none of their keys.

    Layers with attention whose ratio is 0 have no indexer.
    """
    metadata, key = file.metadata, file.key("attention.compress_ratios")
    fields = _delta_nets(file, config)
    ratios = by_layer(file, config, "attention.compress_ratios")
    attending = {ratio for ratio, kind in zip(ratios, fields["layer_types"], strict=True) if kind == "full_attention"}
    if len(attending) > 1:
        raise metadata.unsupported(key, "the same in all layers with attention")
    if attending <= {0}:
        fields |= dict.fromkeys(_QWEN_INDEXER)
    else:
        fields["indexer_compress_ratio"] = max(attending)
    return {**fields, **_ngrams(file, config)}


def _ngrams(file: GgufFile, config: Config) -> dict[str, Any]:
    """Returns the fields of the embeddings of n-grams of one layer."""
    metadata = file.metadata
    layers = metadata.integers(file.key("ple.layers"), low=0, high=config.layers - 1)
    if not layers:
        return {}
    if len(layers) > 1:
        raise metadata.unsupported(file.key("ple.layers"), "one layer, because files have one set of hashes")
    lengths = config.integer("ngram_size", low=2, high=MAX_NGRAM) - 1
    offsets = metadata.integers(file.key("ple.head_offsets"), low=0, high=MAX_TABLE_ROWS)
    rows = metadata.integers(file.key("ple.head_vocab_sizes"), low=1, high=MAX_SIZE)
    if not rows or offsets != [0, *accumulate(rows[:-1])]:
        raise metadata.unsupported(file.key("ple.head_offsets"), "sums of ple.head_vocab_sizes, in order from 0")
    hashes = lengths * config.integer("heads_per_ngram", high=MAX_HASHES // lengths)
    columns = metadata.integer(file.key("embedding_length_per_layer_input"), high=MAX_SIZE // hashes)
    config.integer("ple_conv_kernel_size")
    return {
        "ple_layer_ids": [layers[0] + 1],
        "ple_embed_dim": hashes * columns,
        "split_ngram_parts": 1,
        "make_ngram_vocab_size_divisible_by": file.rows(
            "per_layer_token_embd.weight", low=sum(rows), high=MAX_TABLE_ROWS
        ),
    }


def _hybrid_mamba2(file: GgufFile) -> dict[str, Any]:
    """Returns the fields of Mamba 2 in hybrids."""
    return {
        "mamba_d_head": _quotient(file, "ssm.inner_size", "ssm.time_step_rank"),
        "mamba_conv_bias": "ssm_conv1d.bias" in file.in_layers,
        "mamba_proj_bias": "ssm_in.bias" in file.in_layers,
        "projectors_bias": "ssm_out.bias" in file.in_layers,
        **has_biases(file),
        "mlp_bias": "ffn_up.bias" in file.in_layers,
    }


def _granitehybrid(file: GgufFile, config: Config) -> dict[str, Any]:
    """Returns the fields of Granite 4; a rotary embedding is said by a key that is about its scaling."""
    rotates = file.metadata.flag(file.key("rope.scaling.finetuned"), default=True)
    fields = {
        **_hybrid_mamba2(file),
        "layer_types": _layer_types(file, config, "mamba"),
        "position_embedding_type": "rope" if rotates else "nope",
        "attention_multiplier": config.number("attention_multiplier", default=1 / math.sqrt(config.head_dim)),
    }
    if not file.metadata.integer(file.key("expert_count"), default=0, low=0):
        fields["shared_intermediate_size"] = config.integer("intermediate_size")
        if "ffn_up.weight" in file.in_layers:
            fields["shared_intermediate_size"] = file.rows("blk.0.ffn_up.weight")
    return fields


def _falcon_h1(file: GgufFile, config: Config) -> dict[str, Any]:
    """Returns Falcon-H1's fields; converters multiply the weights by its factors."""
    return {**_hybrid_mamba2(file), "mamba_rms_norm": "ssm_norm.weight" in file.in_layers}


def _nemotron_h(file: GgufFile, config: Config) -> dict[str, Any]:
    kinds = {
        "mamba": layers_with(file, config, "ssm_in.weight"),
        "attention": _attending(file, config),
        "moe": layers_with(file, config, "ffn_gate_inp.weight"),
    }
    of_layer = {index: kind for kind, indices in kinds.items() for index in indices}
    types = [of_layer.get(index, "mlp") for index in range(config.layers)]
    fields = {
        "layers_block_type": types,
        "mamba_head_dim": _quotient(file, "ssm.inner_size", "ssm.time_step_rank"),
        "use_bias": "ssm_in.bias" in file.in_layers,
        "use_conv_bias": "ssm_conv1d.bias" in file.in_layers,
        "mlp_bias": bool({"ffn_up.bias", "ffn_up_shexp.bias"} & file.in_layers),
        "norm_topk_prob": file.metadata.flag(file.key("expert_weights_norm"), default=False),
    }
    if "mlp" in types:
        fields["intermediate_size"] = file.rows(f"blk.{types.index('mlp')}.ffn_up.weight")
    return fields


def _kimi_linear(file: GgufFile, config: Config) -> dict[str, Any]:
    """Returns Kimi Linear's fields; the heads of latent attention are those of the delta nets."""
    metadata = file.metadata
    require_gating(file, "sigmoid")
    fields = latent(file, config)
    fields["moe_renormalize"] = metadata.flag(file.key("expert_weights_norm"), default=True)
    del fields["norm_topk_prob"]
    return {
        **fields,
        "layer_types": _layer_types(file, config, "linear_attention", "attn_kv_a_mqa.weight"),
        "linear_attn_config": {
            "num_heads": config.heads,
            "head_dim": metadata.integer(file.key("kda.head_dim")),
            "short_conv_kernel_size": metadata.integer(file.key("ssm.conv_kernel")),
        },
    }


def _bailingmoe3(file: GgufFile, config: Config) -> dict[str, Any]:
    """Returns the fields of Ling 3; the heads of latent attention are those of the delta nets.

    Files without `kda.safe_gate` have decays with a bound.
    """
    metadata = file.metadata
    require_gating(file, "sigmoid")
    if not metadata.flag(file.key("kda.safe_gate"), default=True):
        raise metadata.unsupported(file.key("kda.safe_gate"), "true or omitted in this architecture")
    return {
        **latent(file, config),
        "layer_types": _layer_types(file, config, "linear_attention", "attn_kv_a_mqa.weight"),
        "linear_num_heads": config.heads,
        "linear_head_dim": config.integer("linear_head_dim"),
        "linear_conv_kernel_dim": config.integer("linear_conv_kernel_dim"),
        "kda_lower_bound": config.number("kda_lower_bound", low=-math.inf),
        "n_shared_experts": shared_experts(file, config),
    }


def _minimax(file: GgufFile, config: Config) -> dict[str, Any]:
    """Returns the fields of MiniMax-01: one factor for the streams of all blocks, and none for their outputs."""
    factor = file.metadata.number(file.key("residual_scale"), default=1.0)
    lightning = layers_with(file, config, "attn_norm_2.weight")
    return {
        "layer_types": [("full_attention", "linear_attention")[index in lightning] for index in range(config.layers)],
        **{f"{block}_alpha_factor": factor for block in ("full_attn", "linear_attn", "mlp")},
    }


def _mamba(file: GgufFile, config: Config) -> dict[str, Any]:
    """Returns the fields of Mamba, or of Falcon Mamba, which has norms without weights."""
    normed = file.metadata.flag(file.key("ssm.dt_b_c_rms"), default=False)
    return {
        "model_type": "falcon_mamba" if normed else "mamba",
        "use_bias": "ssm_in.bias" in file.in_layers,
        "use_conv_bias": "ssm_conv1d.bias" in file.in_layers,
    }


def _mamba2(file: GgufFile, config: Config) -> dict[str, Any]:
    return {
        "expand": _expansion(file, config),
        "head_dim": _quotient(file, "ssm.inner_size", "ssm.time_step_rank"),
        "use_bias": "ssm_in.bias" in file.in_layers,
        "use_conv_bias": "ssm_conv1d.bias" in file.in_layers,
    }


def _jamba(file: GgufFile, config: Config) -> dict[str, Any]:
    sparse = layers_with(file, config, "ffn_gate_inp.weight")
    return {
        **_period(file, config, "attn", _attending(file, config)),
        **_period(file, config, "expert", sparse),
        "num_experts": file.metadata.integer(file.key("expert_count")) if sparse else 1,
        "mamba_expand": _expansion(file, config),
        "mamba_conv_bias": "ssm_conv1d.bias" in file.in_layers,
        "mamba_proj_bias": "ssm_in.bias" in file.in_layers,
    }


def _period(file: GgufFile, config: Config, kind: str, layers: list[int]) -> dict[str, int]:
    """Returns the period and offset that say which layers are of a kind."""
    offset = layers[0] if layers else config.layers
    period = layers[1] - offset if len(layers) > 1 else max(config.layers, offset + 1)
    if layers != list(range(offset, config.layers, period)):
        raise file.metadata.unsupported(
            file.key("attention.head_count_kv" if kind == "attn" else "expert_count"),
            f"such that layers of kind {kind!r} are equally far apart, not {layers}",
        )
    return {f"{kind}_layer_period": period, f"{kind}_layer_offset": offset}


HYBRIDS = (
    GgufArchitecture(
        "bailingmoe3",
        "bailing_hybrid",
        {
            "n_routed_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "first_k_dense_replace": "leading_dense_block_count",
            "routed_scaling_factor": "expert_weights_scale",
            "n_group": "expert_group_count",
            "topk_group": "expert_group_used_count",
            "kv_lora_rank": "attention.kv_lora_rank",
            "linear_head_dim": "kda.head_dim",
            "linear_conv_kernel_dim": "ssm.conv_kernel",
            "kda_lower_bound": "kda.gate_lower_bound",
            "expert_swiglu_limit_list": "swiglu_clamp_exp",
            "share_expert_swiglu_limit_list": "swiglu_clamp_shexp",
        },
        {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "first_k_dense_replace": 0},
        _bailingmoe3,
        interleaved=None,
        heads=False,
    ),
    GgufArchitecture(
        "falcon-h1", "falcon_h1", _MAMBA2, {"mamba_norm_before_gate": False, "mamba_rms_norm": False}, _falcon_h1
    ),
    GgufArchitecture(
        "granitehybrid",
        "granitemoehybrid",
        {
            **_GRANITE,
            **_MAMBA2,
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "shared_intermediate_size": "expert_shared_feed_forward_length",
        },
        {"num_local_experts": 0},
        _granitehybrid,
        interleaved=True,
    ),
    GgufArchitecture(
        "jamba",
        "jamba",
        {
            "num_experts_per_tok": "expert_used_count",
            "mamba_d_conv": "ssm.conv_kernel",
            "mamba_d_state": "ssm.state_size",
            "mamba_dt_rank": "ssm.time_step_rank",
        },
        derive=_jamba,
        rotates=False,
    ),
    GgufArchitecture(
        "kimi-linear",
        "kimi_linear",
        {
            "num_experts": "expert_count",
            "num_experts_per_token": "expert_used_count",
            "num_shared_experts": "expert_shared_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "first_k_dense_replace": "leading_dense_block_count",
            "routed_scaling_factor": "expert_weights_scale",
            "num_expert_group": "expert_group_count",
            "topk_group": "expert_group_used_count",
            "kv_lora_rank": "attention.kv_lora_rank",
        },
        {"first_k_dense_replace": 0, "routed_scaling_factor": 1.0, "mla_use_nope": True},
        _kimi_linear,
        rotates=False,
        heads=False,
    ),
    GgufArchitecture(
        "lfm2",
        "lfm2",
        {"norm_eps": _RMS_NORM, "conv_L_cache": "shortconv.l_cache"},
        {"block_auto_adjust_ff_dim": False},
        _lfm2,
    ),
    GgufArchitecture(
        "lfm2moe",
        "lfm2_moe",
        {
            **_EXPERTS,
            "norm_eps": _RMS_NORM,
            "conv_L_cache": "shortconv.l_cache",
            "num_dense_layers": "leading_dense_block_count",
            "routed_scaling_factor": "expert_weights_scale",
        },
        {"num_dense_layers": 0},
        _lfm2moe,
    ),
    GgufArchitecture(
        "mamba",
        "mamba",
        {
            "intermediate_size": "ssm.inner_size",
            "state_size": "ssm.state_size",
            "time_step_rank": "ssm.time_step_rank",
            "conv_kernel": "ssm.conv_kernel",
            "layer_norm_epsilon": _RMS_NORM,
        },
        derive=_mamba,
        rotates=False,
        heads=False,
    ),
    GgufArchitecture(
        "mamba2",
        "mamba2",
        {
            "num_heads": "ssm.time_step_rank",
            "n_groups": "ssm.group_count",
            "state_size": "ssm.state_size",
            "conv_kernel": "ssm.conv_kernel",
            "layer_norm_epsilon": _RMS_NORM,
        },
        derive=_mamba2,
        rotates=False,
        heads=False,
    ),
    GgufArchitecture(
        "minimax-01",
        "minimax",
        {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
        derive=_minimax,
    ),
    *(
        GgufArchitecture(
            name,
            "nemotron_h",
            {
                "layer_norm_epsilon": "attention.layer_norm_epsilon",
                "mamba_num_heads": "ssm.time_step_rank",
                "n_groups": "ssm.group_count",
                "ssm_state_size": "ssm.state_size",
                "conv_kernel": "ssm.conv_kernel",
                "n_routed_experts": "expert_count",
                "num_experts_per_tok": "expert_used_count",
                "moe_intermediate_size": "expert_feed_forward_length",
                "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
                "moe_latent_size": "moe_latent_size",
                "routed_scaling_factor": "expert_weights_scale",
                "n_group": "expert_group_count",
                "topk_group": "expert_group_used_count",
            },
            derive=_nemotron_h,
            rotates=False,
        )
        for name in ("nemotron_h", "nemotron_h_moe")
    ),
    GgufArchitecture(
        "qwen4exp",
        "qwen4_exp_text",
        {
            **_SHARED,
            **_DELTA_NET,
            **_QWEN_INDEXER,
            "hc_count": "hyper_connection.count",
            "hc_lowrank": "hyper_connection.low_rank",
            "ngram_size": "ple.ngram_size",
            "heads_per_ngram": "ple.heads_per_ngram",
            "ple_conv_kernel_size": "ple.conv_kernel",
            "eos_token_id": "ple.eos_token_id",
            "ngram_multipliers": "ple.layer_multipliers",
            "ngram_hash_rows": "ple.head_vocab_sizes",
        },
        {"output_gate_type": "sigmoid"},
        _qwen4exp,
        alternating=True,
    ),
    GgufArchitecture("qwen3next", "qwen3_next", {**_SHARED, **_DELTA_NET}, {"num_experts": 0}, _delta_nets),
    GgufArchitecture("qwen35", "qwen3_5_text", _DELTA_NET, derive=_delta_nets, alternating=True),
    GgufArchitecture("qwen35moe", "qwen3_5_moe_text", {**_SHARED, **_DELTA_NET}, derive=_delta_nets, alternating=True),
)
"""Architectures that the registry contains too, in a module of their own because they share much."""
