"""GGUF architectures: the translation of their metadata to the fields of config.json.

Each architecture is a line in REGISTRY, with a function if a table does not suffice. Sources: convert_hf_to_gguf.py in
llama.cpp for the changes of the converters, and llama_model_rope_type for the pairs of the rotary embedding.
"""

from __future__ import annotations

import math
from typing import Any

from ferrule._loading.gguf.architecture import (
    GgufArchitecture,
    gating,
    has_biases,
    latent,
    layer_flags,
    layers_with,
    require_gating,
    same_base,
    shared_experts,
    sliding,
)
from ferrule._loading.gguf.by_layer import VARIED
from ferrule._loading.gguf.file import GgufFile
from ferrule._loading.gguf.hybrids import HYBRIDS
from ferrule.archs.config import Config


def _llama(file: GgufFile, config: Config) -> dict[str, Any]:
    if file.metadata.values.get(file.key("expert_count")):
        return {"model_type": "mixtral", "sliding_window": None}
    return _biased(file, config)


def _biased(file: GgufFile, config: Config) -> dict[str, Any]:
    return {**has_biases(file), "mlp_bias": "ffn_up.bias" in file.in_layers}


def _seed_oss(file: GgufFile, config: Config) -> dict[str, Any]:
    return {**has_biases(file), "attention_out_bias": "attn_output.bias" in file.in_layers}


def _gemma2(file: GgufFile, config: Config) -> dict[str, Any]:
    same_base(file)
    # Only the 27B model, which has 46 layers, scales attention scores by a width that is not its heads' width.
    widths = config.head_dim if config.layers != 46 else config.integer("hidden_size") // config.heads
    return {**sliding(file, config, 2), "query_pre_attn_scalar": widths}


def _gemma3(file: GgufFile, config: Config) -> dict[str, Any]:
    width = config.head_dim if config.layers != 62 else config.integer("hidden_size") // config.heads
    return {
        **sliding(file, config, 6),
        "query_pre_attn_scalar": width,
        "rope_local_base_freq": file.metadata.number(file.key("rope.freq_base_swa"), default=10_000.0, above=1.0),
    }


def _phi3(file: GgufFile, config: Config) -> dict[str, Any]:
    return {"sliding_window": file.metadata.integer(file.key("attention.sliding_window"), default=0, low=0) or None}


def _mpt(file: GgufFile, config: Config) -> dict[str, Any]:
    largest = file.metadata.number(file.key("attention.max_alibi_bias"), default=0.0, low=0.0)
    clamp = file.metadata.number(file.key("attention.clamp_kqv"), default=0.0, low=0.0)
    return {
        "attn_config": {"alibi": largest > 0, "alibi_bias_max": largest or 8.0, "clip_qkv": clamp or None},
        "no_bias": not {"attn_qkv.bias", "ffn_up.bias"} & file.in_layers,
    }


def _falcon(file: GgufFile, config: Config) -> dict[str, Any]:
    two_norms = "attn_norm_2.weight" in file.in_layers
    grouped = two_norms or 1 < config.kv_heads < config.heads
    return {
        "new_decoder_architecture": grouped,
        "num_ln_in_parallel_attn": 2 if two_norms else 1,
        "multi_query": config.kv_heads == 1,
        "bias": "attn_qkv.bias" in file.in_layers,
    }


def _stablelm(file: GgufFile, config: Config) -> dict[str, Any]:
    return {
        "use_parallel_residual": "ffn_norm.weight" not in file.in_layers,
        "use_qkv_bias": "attn_q.bias" in file.in_layers,
        "qk_layernorm": "attn_q_norm.weight" in file.in_layers,
    }


def _starcoder(file: GgufFile, config: Config) -> dict[str, Any]:
    return {"multi_query": config.kv_heads == 1}


def _starcoder2(file: GgufFile, config: Config) -> dict[str, Any]:
    window = file.metadata.integer(file.key("attention.sliding_window"), default=0, low=0)
    return {"use_bias": "attn_q.bias" in file.in_layers, "sliding_window": window or None}


def _olmo2(file: GgufFile, config: Config) -> dict[str, Any]:
    if file.metadata.values.get(file.key("attention.sliding_window")):
        same_base(file)
        return {"model_type": "olmo3", **has_biases(file), **sliding(file, config, 4)}
    return has_biases(file)


def _command_r(file: GgufFile, config: Config) -> dict[str, Any]:
    return {**has_biases(file), "use_qk_norm": "attn_q_norm.weight" in file.in_layers}


def _cohere2(file: GgufFile, config: Config) -> dict[str, Any]:
    same_base(file)
    return {**has_biases(file), **sliding(file, config, 4)}


def _granite(file: GgufFile, config: Config) -> dict[str, Any]:
    fields = {
        **_biased(file, config),
        "attention_multiplier": file.metadata.number(
            file.key("attention.scale"), default=1 / math.sqrt(config.head_dim)
        ),
    }
    if not file.metadata.values.get(file.key("expert_count")):
        # Granite 4 without Mamba states the width of experts that it does not have.
        fields["intermediate_size"] = file.rows("blk.0.ffn_up.weight")
    elif file.key("expert_shared_feed_forward_length") in file.metadata:
        fields["model_type"] = "granitemoeshared"
    return fields


def _gpt_oss(file: GgufFile, config: Config) -> dict[str, Any]:
    same_base(file)
    if config.integer("moe_intermediate_size") != config.integer("intermediate_size"):
        # The file has the width of the experts under two keys.
        return {"intermediate_size": config.integer("moe_intermediate_size"), **sliding(file, config, 2)}
    return sliding(file, config, 2)


def _exaone4(file: GgufFile, config: Config) -> dict[str, Any]:
    same_base(file)
    return sliding(file, config, 4)


def _exaone_moe(file: GgufFile, config: Config) -> dict[str, Any]:
    return {**_sigmoid(file, config), **_exaone4(file, config)}


def _sigmoid(file: GgufFile, config: Config) -> dict[str, Any]:
    """Returns the fields of a mixture of experts in DeepSeek-V3's form."""
    require_gating(file, "sigmoid")
    return {
        **has_biases(file),
        "use_qk_norm": "attn_q_norm.weight" in file.in_layers,
        "norm_topk_prob": file.metadata.flag(file.key("expert_weights_norm"), default=False),
    }


def _deepseek2(file: GgufFile, config: Config) -> dict[str, Any]:
    """Returns the fields of DeepSeek-V2 and V3, which differ in their router's score function."""
    metadata, growth = file.metadata, file.key("attention.temperature_scale")
    if metadata.number(growth, default=0.0, low=0.0):
        raise metadata.unsupported(growth, "0 or omitted in this architecture")
    fields = latent(file, config)
    if not metadata.values.get(file.key("expert_count")):
        return {**fields, "model_type": "youtu"}
    if gating(file, "softmax") == "sigmoid":
        return {**fields, "model_type": "deepseek_v3", "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    groups = metadata.integer(file.key("expert_group_count"), default=1)
    method = "greedy" if groups == 1 else "group_limited_greedy"
    return {**fields, "model_type": "deepseek_v2", "topk_method": method, "scoring_func": "softmax"}


def _glm_dsa(file: GgufFile, config: Config) -> dict[str, Any]:
    """Returns GLM-5's fields; layers without an indexer's tensors share one in files without their types."""
    metadata, key = file.metadata, file.key("attention.indexer.types")
    require_gating(file, "sigmoid")
    indexed = layers_with(file, config, "indexer.attn_q_b.weight")
    has = layer_flags(file, config, "attention.indexer.types") or [index in indexed for index in range(config.layers)]
    if not has[0]:
        raise metadata.error(key, "true for the first layer, whose tensors of an indexer must be in the file")
    return {**latent(file, config), "indexer_types": ["full" if each else "shared" for each in has]}


def _bailingmoe2(file: GgufFile, config: Config) -> dict[str, Any]:
    fields = _sigmoid(file, config)
    return {**fields, "use_qkv_bias": fields.pop("attention_bias"), "use_bias": "attn_output.bias" in file.in_layers}


def _minicpm3(file: GgufFile, config: Config) -> dict[str, Any]:
    """Returns MiniCPM3's fields; multipliers that the metadata lacks are taken from the published model."""
    metadata = file.metadata
    rope_dim = metadata.integer(file.key("rope.dimension_count"))
    width_key = file.key("attention.key_length")
    if metadata.integer(width_key) <= rope_dim:
        raise metadata.error(width_key, f"above rope.dimension_count ({rope_dim})")
    return {
        "q_lora_rank": metadata.integer_or_none(file.key("attention.q_lora_rank")),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": metadata.integer(width_key) - rope_dim,
        "v_head_dim": file.rows("blk.0.attn_kv_b.weight") // config.heads - (metadata.integer(width_key) - rope_dim),
    }


def _query_growth(file: GgufFile, config: Config) -> dict[str, float]:
    """Returns the growth of queries beyond the original context as Mistral's config.json states it."""
    metadata, key = file.metadata, file.key("attention.temperature_length")
    beta = metadata.number(file.key("attention.temperature_scale"), default=0.0, low=0.0)
    if not beta:
        return {}
    original = config.integer("original_max_position_embeddings")
    if metadata.integer(key, default=original) != original:
        raise metadata.unsupported(key, f"rope.scaling.original_context_length ({original})")
    return {"llama_4_scaling_beta": beta}


def _mistral3(file: GgufFile, config: Config) -> dict[str, Any]:
    """Returns the fields of Ministral 3, or of Mistral if the queries do not grow."""
    metadata = file.metadata
    if metadata.values.get(file.key("expert_count")):
        raise metadata.unsupported(file.key("expert_count"), "0 or omitted in this architecture")
    mscale = metadata.number(file.key("rope.scaling.yarn_log_multiplier"), default=0.0, low=0.0)
    factors = {"mscale": 1.0, "mscale_all_dim": mscale} if mscale else {}
    return {"rope_scaling": {**config.values["rope_scaling"], **factors, **_query_growth(file, config)}}


def _mistral4(file: GgufFile, config: Config) -> dict[str, Any]:
    require_gating(file, "softmax")
    fields = {"rope_scaling": config.values["rope_scaling"], **latent(file, config)}
    parameters = {**fields["rope_scaling"], **_query_growth(file, config)}
    return {**fields, "model_type": "mistral4", "rope_parameters": parameters, "rope_scaling": None}


def _hy_v3(file: GgufFile, config: Config) -> dict[str, Any]:
    """Returns Hunyuan 3's fields; the width of its shared expert is a number of experts."""
    require_gating(file, "sigmoid")
    metadata = file.metadata
    sparse = layers_with(file, config, "ffn_gate_inp.weight")
    return {
        **has_biases(file),
        "num_shared_experts": shared_experts(file, config),
        "route_norm": metadata.flag(file.key("expert_weights_norm"), default=False),
        "mlp_layer_types": ["sparse" if index in sparse else "dense" for index in range(config.layers)],
    }


def _phimoe(file: GgufFile, config: Config) -> dict[str, Any]:
    return {**_phi3(file, config), **has_biases(file), "lm_head_bias": "output.bias" in file}


def _ernie(file: GgufFile, config: Config) -> dict[str, Any]:
    return {"use_bias": "attn_q.bias" in file.in_layers}


def _bert(file: GgufFile, config: Config) -> dict[str, Any]:
    """Returns BERT's fields. Converters drop RoBERTa's unused position rows, so a RoBERTa is read as a BERT."""
    return {
        "max_position_embeddings": file.rows("position_embd.weight"),
        "type_vocab_size": file.rows("token_types.weight"),
    }


_LAYER_NORM = "attention.layer_norm_epsilon"
_EXPERTS = {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
_LOCAL_EXPERTS = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
_EXPERT_WIDTH = {"moe_intermediate_size": "expert_feed_forward_length"}
_ROUTED_EXPERTS = {
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    **_EXPERT_WIDTH,
}
_UNROUTED = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "first_k_dense_replace": 0}
_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_GRANITE = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_ERNIE_MOE = {
    "moe_num_experts": "expert_count",
    "moe_k": "expert_used_count",
    "moe_num_shared_experts": "expert_shared_count",
    "moe_layer_interval": "interleave_moe_layer_step",
    "moe_layer_start_index": "leading_dense_block_count",
    **_EXPERT_WIDTH,
}


REGISTRY = (
    GgufArchitecture("apertus", "apertus", defaults={"hidden_act": "xielu"}, derive=_biased),
    GgufArchitecture("arcee", "arcee", derive=_biased, interleaved=True),
    GgufArchitecture("bailingmoe2", "bailing_moe_v2", _ROUTED_EXPERTS, _UNROUTED, _bailingmoe2),
    GgufArchitecture("bert", "bert", {"layer_norm_eps": _LAYER_NORM}, derive=_bert, rotates=False),
    # llama.cpp's converter reads the first BitNets, whose activation is SiLU.
    GgufArchitecture("bitnet", "bitnet", defaults={"hidden_act": "silu"}, derive=_biased),
    GgufArchitecture("bloom", "bloom", {"layer_norm_epsilon": _LAYER_NORM}, rotates=False),
    GgufArchitecture("chatglm", "glm", derive=_biased, interleaved=True),
    GgufArchitecture(
        "cohere2",
        "cohere2",
        {"layer_norm_eps": _LAYER_NORM, "logit_scale": "logit_scale"},
        derive=_cohere2,
        interleaved=True,
    ),
    GgufArchitecture(
        "command-r",
        "cohere",
        {"layer_norm_eps": _LAYER_NORM, "logit_scale": "logit_scale"},
        derive=_command_r,
        interleaved=True,
    ),
    GgufArchitecture(
        "deepseek2",
        "deepseek_v2",
        {**_ROUTED_EXPERTS, "kv_lora_rank": "attention.kv_lora_rank"},
        _UNROUTED,
        _deepseek2,
        interleaved=True,
        heads=False,
    ),
    GgufArchitecture("dots1", "dots1", _ROUTED_EXPERTS, _UNROUTED | {"sliding_window": None}, _sigmoid),
    GgufArchitecture("ernie4_5", "ernie4_5", derive=_ernie, interleaved=True),
    GgufArchitecture(
        "ernie4_5-moe", "ernie4_5_moe", _ERNIE_MOE, {"moe_num_shared_experts": 0}, _ernie, interleaved=True
    ),
    GgufArchitecture("exaone4", "exaone4", derive=_exaone4),
    GgufArchitecture("exaone-moe", "exaone_moe", _ROUTED_EXPERTS, _UNROUTED, _exaone_moe),
    GgufArchitecture("falcon", "falcon", {"layer_norm_epsilon": _LAYER_NORM}, derive=_falcon),
    GgufArchitecture("gemma", "gemma"),
    GgufArchitecture("gemma2", "gemma2", _CAPS, derive=_gemma2),
    GgufArchitecture("gemma3", "gemma3_text", _CAPS, derive=_gemma3),
    GgufArchitecture("gemma-embedding", "gemma3_text", _CAPS, {"use_bidirectional_attention": True}, _gemma3),
    GgufArchitecture(
        "glm-dsa",
        "glm_moe_dsa",
        {
            **_ROUTED_EXPERTS,
            "kv_lora_rank": "attention.kv_lora_rank",
            "index_n_heads": "attention.indexer.head_count",
            "index_head_dim": "attention.indexer.key_length",
            "index_topk": "attention.indexer.top_k",
        },
        _UNROUTED,
        _glm_dsa,
        interleaved=None,
        heads=False,
    ),
    GgufArchitecture("glm4", "glm4", derive=_biased, interleaved=True),
    GgufArchitecture("glm4moe", "glm4_moe", _ROUTED_EXPERTS, _UNROUTED, _sigmoid),
    GgufArchitecture(
        "gpt-oss", "gpt_oss", _LOCAL_EXPERTS | _EXPERT_WIDTH, derive=_gpt_oss, scaling={"truncate": False}
    ),
    GgufArchitecture("gpt2", "gpt2", {"layer_norm_epsilon": _LAYER_NORM}, rotates=False),
    GgufArchitecture(
        "gptneox", "gpt_neox", {"layer_norm_eps": _LAYER_NORM, "use_parallel_residual": "use_parallel_residual"}
    ),
    GgufArchitecture("granite", "granite", _GRANITE, derive=_granite, interleaved=True),
    GgufArchitecture(
        "granitemoe",
        "granitemoe",
        {**_GRANITE, **_LOCAL_EXPERTS, "shared_intermediate_size": "expert_shared_feed_forward_length"},
        derive=_granite,
        interleaved=True,
    ),
    GgufArchitecture("hunyuan-dense", "hunyuan_v1_dense", derive=_biased),
    GgufArchitecture("hunyuan-moe", "hunyuan_v1_moe", _EXPERTS, derive=_biased),
    GgufArchitecture(
        "hy_v3",
        "hy_v3",
        {**_EXPERTS, **_EXPERT_WIDTH, "router_scaling_factor": "expert_weights_scale"},
        {"router_scaling_factor": 1.0},
        _hy_v3,
    ),
    GgufArchitecture("internlm2", "llama", derive=_biased, interleaved=True),
    GgufArchitecture("jais2", "jais2", {"layer_norm_eps": _LAYER_NORM}, derive=_biased),
    GgufArchitecture("llama", "llama", _LOCAL_EXPERTS, derive=_llama, interleaved=True),
    GgufArchitecture("minicpm3", "minicpm3", {"kv_lora_rank": "attention.kv_lora_rank"}, derive=_minicpm3, heads=False),
    GgufArchitecture("minimax-m2", "minimax_m2", _LOCAL_EXPERTS),
    GgufArchitecture("mistral3", "ministral3", derive=_mistral3, interleaved=True),
    GgufArchitecture(
        "mistral4",
        "mistral4",
        {**_ROUTED_EXPERTS, "kv_lora_rank": "attention.kv_lora_rank"},
        _UNROUTED,
        _mistral4,
        interleaved=True,
        heads=False,
    ),
    GgufArchitecture("mpt", "mpt", {"layer_norm_epsilon": _LAYER_NORM}, derive=_mpt, rotates=False),
    GgufArchitecture("nemotron", "nemotron", {"norm_eps": _LAYER_NORM}, derive=_biased),
    GgufArchitecture("olmo", "olmo", {"clip_qkv": "attention.clamp_kqv"}, derive=_biased, interleaved=True),
    GgufArchitecture("olmo2", "olmo2", derive=_olmo2),
    GgufArchitecture("olmoe", "olmoe", _EXPERTS, {"norm_topk_prob": False}, _biased),
    GgufArchitecture("phi2", "phi", {"layer_norm_eps": _LAYER_NORM}),
    GgufArchitecture("phi3", "phi3", derive=_phi3),
    GgufArchitecture("phimoe", "phimoe", _LOCAL_EXPERTS, derive=_phimoe),
    GgufArchitecture("qwen2", "qwen2"),
    GgufArchitecture(
        "qwen2moe",
        "qwen2_moe",
        {**_EXPERTS, **_EXPERT_WIDTH, "shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
        {"norm_topk_prob": False},
    ),
    GgufArchitecture("qwen2vl", "qwen2_vl_text"),
    GgufArchitecture("qwen3", "qwen3", derive=_biased),
    GgufArchitecture("qwen3moe", "qwen3_moe", {**_EXPERTS, **_EXPERT_WIDTH}, {"norm_topk_prob": True}, _biased),
    GgufArchitecture("qwen3vl", "qwen3_vl_text", derive=_biased),
    GgufArchitecture("qwen3vlmoe", "qwen3_moe", {**_EXPERTS, **_EXPERT_WIDTH}, {"norm_topk_prob": True}, _biased),
    GgufArchitecture("seed_oss", "seed_oss", derive=_seed_oss),
    GgufArchitecture("smollm3", "smollm3", derive=_biased, interleaved=True),
    GgufArchitecture("stablelm", "stablelm", {"layer_norm_eps": _LAYER_NORM}, derive=_stablelm),
    GgufArchitecture("starcoder", "gpt_bigcode", {"layer_norm_epsilon": _LAYER_NORM}, derive=_starcoder, rotates=False),
    GgufArchitecture("starcoder2", "starcoder2", {"norm_epsilon": _LAYER_NORM}, derive=_starcoder2),
    *HYBRIDS,
    *VARIED,
)
