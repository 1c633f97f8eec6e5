"""Variants of decoders with experts."""

from pathlib import Path

import torch
from checkpoint import Edit, JsonObject, Tensors, old_spelling
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    GptOssConfig,
    GraniteMoeConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from variants import SLIDING_WINDOW, Variant, make_variant, rope, sizes

MXFP4_BLOCK = 32
"""Number of weights that share a scale (OCP Microscaling Formats 1.0)."""


def deepseek(**changes: object) -> JsonObject:
    """The dimensions of DeepSeek-V2 and V3: one dense layer, then experts; latent keys and values."""
    fields: JsonObject = sizes(
        num_key_value_heads=4,
        max_position_embeddings=640,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        n_routed_experts=8,
        n_shared_experts=2,
        num_experts_per_tok=2,
        kv_lora_rank=32,
        q_lora_rank=None,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
    )
    return {**fields, **changes}


def deepseek_spelling(topk_method: str, scoring: str, *dropped: str) -> Edit:
    """Adds fields of deepseek-ai's files that transformers ignores."""
    return old_spelling(
        "head_dim", "qk_head_dim", *dropped, topk_method=topk_method, scoring_func=scoring, moe_layer_freq=1
    )


def experts_spelling(config: JsonObject) -> None:
    """Renames the number of experts as in Qwen's files."""
    config["num_experts"] = config.pop("num_local_experts")


def prediction_layer() -> Tensors:
    """Adds the multi-token prediction layer after the last layer (DeepSeek-V3, section 2.2)."""
    prefix = "model.layers.2."
    norms = {prefix + name + ".weight": torch.ones(64, dtype=torch.bfloat16) for name in ("enorm", "hnorm")}
    return norms | {prefix + "eh_proj.weight": torch.zeros(64, 128, dtype=torch.bfloat16)}


def yarn(mscale: float, mscale_all_dim: float) -> JsonObject:
    """YaRN scaling of positions, as DeepSeek uses it."""
    return rope(
        "yarn",
        factor=40.0,
        original_max_position_embeddings=16,
        beta_fast=32.0,
        beta_slow=1.0,
        mscale=mscale,
        mscale_all_dim=mscale_all_dim,
    )


def gpt_oss() -> GptOssConfig:
    """gpt-oss (OpenAI 2025), with an activation limit low enough to have an effect."""
    return GptOssConfig(
        **sizes(),
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=SLIDING_WINDOW,
        swiglu_limit=1.5,
        rope_parameters=rope(
            "yarn",
            150000.0,
            factor=32.0,
            original_max_position_embeddings=8,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
        ),
    )


def old_gpt_oss(config: JsonObject) -> None:
    """Converts the fields to those of openai/gpt-oss-20b."""
    old_spelling("swiglu_alpha", experts_per_token=2, initial_context_length=8)(config)
    config["rope_scaling"]["rope_type"] = config["rope_scaling"].pop("type")


def old_gpt_oss_mxfp4(config: JsonObject) -> None:
    """Converts the fields to those of openai/gpt-oss-20b, with its quantization."""
    old_gpt_oss(config)
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}


def mxfp4_experts(tensors: Tensors) -> Tensors:
    """Replaces experts with random 4-bit ones: two values per byte, the first in the low half.

    `*_blocks [experts, outputs, inputs / 32, 16]`, `*_scales [experts, outputs, inputs / 32]`, the exponent plus 127.
    """
    random = torch.Generator().manual_seed(0)
    packed: Tensors = {}
    for name, value in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            packed[name] = value
            continue
        experts, inputs, outputs = value.shape
        shape = (experts, outputs, inputs // MXFP4_BLOCK)
        packed[name + "_blocks"] = torch.randint(256, (*shape, MXFP4_BLOCK // 2), generator=random, dtype=torch.uint8)
        packed[name + "_scales"] = torch.randint(121, 124, shape, generator=random, dtype=torch.uint8)
    return packed


CASES: dict[str, Variant] = {
    # moonshotai/Moonlight-16B-A3B: queries of full rank. Rotary pairs are adjacent elements.
    "deepseek_v3_halves": Variant(
        DeepseekV3Config(**deepseek(n_group=1, topk_group=1, rope_interleave=False)),
        {"rope_interleave": True},
        edit=deepseek_spelling("noaux_tc", "sigmoid"),
    ),
    # deepseek-ai/DeepSeek-V3, with the multi-token prediction layer.
    "deepseek_v3_yarn": Variant(
        DeepseekV3Config(**deepseek(n_group=4, topk_group=2, q_lora_rank=24, rope_parameters=yarn(1.0, 1.0))),
        {"rope_scaling": None},
        edit=deepseek_spelling("noaux_tc", "sigmoid", "rope_interleave"),
        unread=prediction_layer(),
    ),
    # deepseek-ai/DeepSeek-V2-Lite.
    "deepseek_v2_lite": Variant(
        DeepseekV2Config(**deepseek(topk_method="greedy", n_group=1, topk_group=1, rope_parameters=yarn(0.707, 0.707))),
        {"rope_scaling": None},
        edit=deepseek_spelling("greedy", "softmax"),
    ),
    # deepseek-ai/DeepSeek-V2; the two scales differ so that each has a visible effect.
    "deepseek_v2": Variant(
        DeepseekV2Config(
            **deepseek(
                topk_method="group_limited_greedy",
                num_experts_per_tok=3,
                n_group=4,
                topk_group=2,
                routed_scaling_factor=4.0,
                q_lora_rank=24,
                rope_parameters=yarn(1.0, 0.707),
            )
        ),
        {"topk_method": "greedy"},
        edit=deepseek_spelling("group_limited_greedy", "softmax"),
    ),
    "mixtral_sliding": Variant(
        MixtralConfig(**sizes(), num_local_experts=4, sliding_window=SLIDING_WINDOW),
        {"sliding_window": None},
        edit=old_spelling("head_dim"),
    ),
    "olmoe_clip": Variant(
        OlmoeConfig(**sizes(), num_experts=6, num_experts_per_tok=2, clip_qkv=0.8),
        {"clip_qkv": None},
    ),
    "qwen2_moe_dense_first": Variant(
        Qwen2MoeConfig(
            **sizes(num_hidden_layers=3),
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=48,
            mlp_only_layers=[0],
            norm_topk_prob=True,
        ),
        {"norm_topk_prob": False},
        edit=old_spelling("layer_types"),
    ),
    "qwen3_moe_every_other": Variant(
        Qwen3MoeConfig(
            **sizes(num_hidden_layers=4),
            head_dim=16,
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            decoder_sparse_step=2,
            norm_topk_prob=True,
            mlp_only_layers=[3],
        ),
        {"norm_topk_prob": False},
        edit=experts_spelling,
    ),
    # ibm-granite/granite-3.1-1b-a400m-instruct.
    "granitemoe": Variant(
        GraniteMoeConfig(
            **sizes(),
            num_local_experts=6,
            num_experts_per_tok=2,
            tie_word_embeddings=True,
            embedding_multiplier=12.0,
            logits_scaling=6.0,
            residual_multiplier=0.22,
            attention_multiplier=0.4,
        ),
        {"residual_multiplier": 1.0},
        edit=old_spelling(),
    ),
    "gpt_oss_published": Variant(gpt_oss(), {"swiglu_limit": 7.0}, edit=old_gpt_oss),
    "gpt_oss_mxfp4": Variant(gpt_oss(), {"swiglu_limit": 7.0}, edit=old_gpt_oss_mxfp4, edit_tensors=mxfp4_experts),
}


def make(name: str, seed: int, out: Path) -> None:
    """Writes one case."""
    make_variant(CASES[name], seed, out)
