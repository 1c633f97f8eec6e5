"""Changes that converters to GGUF make to the checkpoints of each model_type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gguf import MODEL_ARCH


@dataclass(frozen=True)
class Family:
    """Changes that converters make to the checkpoints of a model_type."""

    arch: MODEL_ARCH
    rotated_in_pairs: bool = False
    """Whether rows of queries and keys are permuted so that adjacent elements form rotary pairs."""
    ones: bool = False
    """Whether 1 is added to the weights of norms."""
    transposed: bool = False
    """Whether matrices are stored transposed."""
    groups: bool = False
    """Whether fused rows of queries, keys and values alternate by head or by group."""
    name: str = ""
    """Name of the architecture, if the `gguf` package has it under another one."""
    keys: Mapping[str, str] = field(default_factory=dict[str, str])
    """Further fields of config.json, and their GGUF keys after the architecture's name."""


CAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
WINDOW = {"sliding_window": "attention.sliding_window"}
GRANITE = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
LOGIT_SCALE = {"logit_scale": "logit_scale"}
SAME_WIDTH = {"intermediate_size": "expert_feed_forward_length"}
EXPERT_WIDTH = {"moe_intermediate_size": "expert_feed_forward_length"}
SHARED_WIDTH = EXPERT_WIDTH | {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
ROUTED = {
    **EXPERT_WIDTH,
    "n_shared_experts": "expert_shared_count",
    "num_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
LATENT = {"q_lora_rank": "attention.q_lora_rank", "kv_lora_rank": "attention.kv_lora_rank"}

FAMILIES = {
    "apertus": Family(MODEL_ARCH.APERTUS),
    "arcee": Family(MODEL_ARCH.ARCEE, rotated_in_pairs=True),
    "bailing_moe_v2": Family(MODEL_ARCH.BAILINGMOE2, keys=ROUTED),
    "bailing_hybrid": Family(
        MODEL_ARCH.BAILINGMOE2,
        name="bailingmoe3",
        keys={
            **ROUTED,
            **LATENT,
            "moe_renormalize": "expert_weights_norm",
            "num_expert_group": "expert_group_count",
        },
    ),
    "bert": Family(MODEL_ARCH.BERT),
    "bitnet": Family(MODEL_ARCH.BITNET),
    "bloom": Family(MODEL_ARCH.BLOOM, groups=True),
    "cohere": Family(MODEL_ARCH.COMMAND_R, keys=LOGIT_SCALE),
    "cohere2": Family(MODEL_ARCH.COHERE2, keys=LOGIT_SCALE | WINDOW),
    "deepseek_v2": Family(MODEL_ARCH.DEEPSEEK2, keys=ROUTED | LATENT),
    "deepseek_v3": Family(MODEL_ARCH.DEEPSEEK2, keys=ROUTED | LATENT),
    "deepseek_v4": Family(
        MODEL_ARCH.DEEPSEEK2,
        name="deepseek4",
        keys={
            **WINDOW,
            **ROUTED,
            "q_lora_rank": "attention.q_lora_rank",
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
    ),
    "dots1": Family(MODEL_ARCH.DOTS1, keys=ROUTED),
    "ernie4_5": Family(MODEL_ARCH.ERNIE4_5),
    "ernie4_5_moe": Family(
        MODEL_ARCH.ERNIE4_5_MOE,
        keys=EXPERT_WIDTH
        | {
            "moe_num_experts": "expert_count",
            "moe_k": "expert_used_count",
            "moe_num_shared_experts": "expert_shared_count",
            "moe_layer_interval": "interleave_moe_layer_step",
            "moe_layer_start_index": "leading_dense_block_count",
        },
    ),
    "exaone_moe": Family(MODEL_ARCH.EXAONE_MOE, keys=WINDOW | ROUTED),
    "exaone4": Family(MODEL_ARCH.EXAONE4, keys=WINDOW),
    "falcon": Family(MODEL_ARCH.FALCON, groups=True),
    "falcon_h1": Family(MODEL_ARCH.FALCON_H1),
    "falcon_mamba": Family(MODEL_ARCH.MAMBA),
    "gemma": Family(MODEL_ARCH.GEMMA, ones=True),
    "gemma2": Family(MODEL_ARCH.GEMMA2, ones=True, keys=CAPS | WINDOW),
    "gemma3_text": Family(MODEL_ARCH.GEMMA3, ones=True, keys=CAPS | WINDOW),
    "gemma3n_text": Family(MODEL_ARCH.GEMMA3N, keys=CAPS | WINDOW),
    "gemma4_text": Family(
        MODEL_ARCH.GEMMA4, keys=CAPS | WINDOW | EXPERT_WIDTH | {"top_k_experts": "expert_used_count"}
    ),
    "glm": Family(MODEL_ARCH.CHATGLM),
    "glm4": Family(MODEL_ARCH.GLM4),
    "glm4_moe": Family(MODEL_ARCH.GLM4_MOE, keys=ROUTED),
    "glm_moe_dsa": Family(
        MODEL_ARCH.GLM_DSA,
        keys={
            **ROUTED,
            **LATENT,
            "index_n_heads": "attention.indexer.head_count",
            "index_head_dim": "attention.indexer.key_length",
            "index_topk": "attention.indexer.top_k",
        },
    ),
    "gpt2": Family(MODEL_ARCH.GPT2, transposed=True),
    "gpt_bigcode": Family(MODEL_ARCH.STARCODER),
    "gpt_neox": Family(MODEL_ARCH.GPTNEOX, groups=True, keys={"use_parallel_residual": "use_parallel_residual"}),
    "gpt_oss": Family(MODEL_ARCH.GPT_OSS, keys={**WINDOW, **SAME_WIDTH}),
    "granite": Family(MODEL_ARCH.GRANITE, rotated_in_pairs=True, keys=GRANITE),
    "granitemoe": Family(MODEL_ARCH.GRANITE_MOE, rotated_in_pairs=True, keys=GRANITE),
    "granitemoeshared": Family(
        MODEL_ARCH.GRANITE_MOE,
        rotated_in_pairs=True,
        keys=GRANITE | {"shared_intermediate_size": "expert_shared_feed_forward_length"},
    ),
    "granite_swa": Family(MODEL_ARCH.GRANITE, rotated_in_pairs=True, name="granite_swa", keys=GRANITE | WINDOW),
    "granitemoe_swa": Family(MODEL_ARCH.GRANITE_MOE, rotated_in_pairs=True, name="granite_swa", keys=GRANITE | WINDOW),
    "granitemoehybrid": Family(
        MODEL_ARCH.GRANITE_HYBRID,
        rotated_in_pairs=True,
        keys=GRANITE | {"shared_intermediate_size": "expert_shared_feed_forward_length"},
    ),
    "hunyuan_v1_dense": Family(MODEL_ARCH.HUNYUAN_DENSE),
    "hunyuan_v1_moe": Family(MODEL_ARCH.HUNYUAN_MOE, keys={"moe_topk": "expert_used_count", **SAME_WIDTH}),
    "hy_v3": Family(
        MODEL_ARCH.DOTS1,
        name="hy_v3",
        keys=EXPERT_WIDTH
        | {"router_scaling_factor": "expert_weights_scale", "num_shared_experts": "expert_shared_count"},
    ),
    "jais2": Family(MODEL_ARCH.JAIS2),
    "jamba": Family(MODEL_ARCH.JAMBA),
    "kimi_linear": Family(MODEL_ARCH.KIMI_LINEAR, keys=ROUTED | LATENT),
    "lfm2": Family(MODEL_ARCH.LFM2),
    "lfm2_moe": Family(MODEL_ARCH.LFM2MOE, keys=EXPERT_WIDTH),
    "llama": Family(MODEL_ARCH.LLAMA, rotated_in_pairs=True),
    "llama4_text": Family(MODEL_ARCH.LLAMA4),
    "mamba": Family(MODEL_ARCH.MAMBA),
    "mamba2": Family(MODEL_ARCH.MAMBA2),
    "minicpm3": Family(MODEL_ARCH.MINICPM3, keys=LATENT),
    "minimax_m2": Family(MODEL_ARCH.MINIMAXM2, keys=SAME_WIDTH),
    "minimax_m3_vl_text": Family(
        MODEL_ARCH.MINIMAXM2,
        ones=True,
        name="minimax-m3",
        keys={
            **SAME_WIDTH,
            "dense_intermediate_size": "feed_forward_length",
            "routed_scaling_factor": "expert_weights_scale",
            "index_n_heads": "attention.indexer.head_count",
            "index_head_dim": "attention.indexer.key_length",
            "index_topk_blocks": "attention.indexer.top_k",
            "index_block_size": "attention.indexer.block_size",
            "index_local_blocks": "attention.indexer.local_blocks",
        },
    ),
    "mimo_v2_flash": Family(MODEL_ARCH.MIMO2, keys=ROUTED | WINDOW),
    "minimax": Family(MODEL_ARCH.LLAMA, name="minimax-01", keys={"full_attn_alpha_factor": "residual_scale"}),
    "ministral3": Family(MODEL_ARCH.MISTRAL3, rotated_in_pairs=True),
    "mistral": Family(MODEL_ARCH.LLAMA, rotated_in_pairs=True),
    "mistral4": Family(MODEL_ARCH.MISTRAL4, keys=ROUTED | LATENT),
    "mixtral": Family(MODEL_ARCH.LLAMA, rotated_in_pairs=True),
    "mpt": Family(MODEL_ARCH.MPT),
    "nemotron": Family(MODEL_ARCH.NEMOTRON, ones=True),
    "nemotron_h": Family(
        MODEL_ARCH.NEMOTRON_H_MOE,
        keys=ROUTED
        | {
            "moe_latent_size": "moe_latent_size",
            "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        },
    ),
    "olmo": Family(MODEL_ARCH.OLMO, rotated_in_pairs=True, keys={"clip_qkv": "attention.clamp_kqv"}),
    "olmo2": Family(MODEL_ARCH.OLMO2),
    "olmo3": Family(MODEL_ARCH.OLMO2, keys=WINDOW),
    "olmoe": Family(MODEL_ARCH.OLMOE),
    "phi": Family(MODEL_ARCH.PHI2),
    "phi3": Family(MODEL_ARCH.PHI3, keys=WINDOW),
    "phimoe": Family(MODEL_ARCH.PHIMOE, keys=WINDOW),
    "qwen2": Family(MODEL_ARCH.QWEN2),
    "qwen2_moe": Family(MODEL_ARCH.QWEN2MOE, keys=SHARED_WIDTH),
    "qwen3": Family(MODEL_ARCH.QWEN3),
    "qwen3_5_moe_text": Family(MODEL_ARCH.QWEN35MOE, ones=True, keys=SHARED_WIDTH),
    "qwen3_5_text": Family(MODEL_ARCH.QWEN35, ones=True),
    "qwen4_exp_text": Family(
        MODEL_ARCH.QWEN35MOE,
        ones=True,
        name="qwen4exp",
        keys={
            **SHARED_WIDTH,
            "hc_count": "hyper_connection.count",
            "hc_lowrank": "hyper_connection.low_rank",
            "indexer_n_heads": "attention.indexer.head_count",
            "indexer_head_dim": "attention.indexer.key_length",
            "indexer_budget": "attention.indexer.top_k",
        },
    ),
    "qwen3_moe": Family(MODEL_ARCH.QWEN3MOE, keys=EXPERT_WIDTH),
    "qwen3_next": Family(MODEL_ARCH.QWEN3NEXT, ones=True, keys=SHARED_WIDTH),
    "seed_oss": Family(MODEL_ARCH.SEED_OSS),
    "smollm3": Family(MODEL_ARCH.SMOLLM3, rotated_in_pairs=True),
    "stablelm": Family(MODEL_ARCH.STABLELM),
    "starcoder2": Family(MODEL_ARCH.STARCODER2),
    "youtu": Family(MODEL_ARCH.DEEPSEEK2, keys={**LATENT, **SAME_WIDTH}),
}
"""Conversions by model_type."""
