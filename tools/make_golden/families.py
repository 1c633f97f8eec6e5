"""Families without a case in tests/golden/logits, each configured as a published model."""

from pathlib import Path

import torch
from checkpoint import JsonObject, Tensors, old_spelling
from dense import gpt2
from reference import VOCABULARY
from transformers import (
    ArceeConfig,
    BioGptConfig,
    CodeGenConfig,
    CwmConfig,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    ExaoneMoeConfig,
    FlexOlmoConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GPTNeoConfig,
    GraniteMoeSharedConfig,
    HeliumConfig,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    HyperCLOVAXConfig,
    InternLM3Config,
    Jais2Config,
    MiniCPM3Config,
    MiniMaxM2Config,
    MinistralConfig,
    NemotronConfig,
    Olmo3Config,
    PersimmonConfig,
    SeedOssConfig,
    SolarOpenConfig,
    VaultGemmaConfig,
    YoutuConfig,
)
from variants import SLIDING_WINDOW, Variant, make_variant, rope, sizes


def without(sizes: JsonObject, *fields: str) -> JsonObject:
    """Sizes for a family whose configuration lacks the given fields."""
    return {name: value for name, value in sizes.items() if name not in fields}


def experts(**changes: object) -> JsonObject:
    """Dimensions of a mixture of experts in DeepSeek-V3's format."""
    fields: JsonObject = sizes(
        moe_intermediate_size=32,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )
    return {**fields, **changes}


def latent(**changes: object) -> JsonObject:
    """The dimensions of latent attention."""
    return {
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "qk_nope_head_dim": 16,
        **changes,
    }


def offsets_from_one(tensors: Tensors) -> Tensors:
    """Norms whose weights are offsets from 1 begin at 1 in transformers' class, and end near 0 in published files."""
    return {
        name: (value - 1).to(torch.bfloat16) if name.endswith("norm.weight") else value
        for name, value in tensors.items()
    }


def old_olmo3(config: JsonObject) -> None:
    """Converts the fields to those of allenai/Olmo-3-7B-Instruct: one RoPE object, only for layers without a window."""
    parameters = config.pop("rope_parameters")["full_attention"]
    config["rope_theta"] = parameters.pop("rope_theta")
    config["rope_scaling"] = parameters


def old_hunyuan(config: JsonObject) -> None:
    """Converts the fields to those of tencent/Hunyuan-7B-Instruct."""
    old_spelling()(config)
    config["rope_scaling"] |= {"factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}


def old_internlm3(config: JsonObject) -> None:
    """Converts the fields to those of internlm/internlm3-8b-instruct."""
    old_spelling()(config)
    config["architectures"] = ["InternLM3ForCausalLM"]  # transformers 5 has no separate class for it
    config["qkv_bias"], config["bias"] = config.pop("attention_bias"), config.pop("mlp_bias")


def pattern_in_letters(config: JsonObject) -> None:
    """Converts the fields to those of LGAI-EXAONE/EXAONE-4.0-32B."""
    config["sliding_window_pattern"] = "LLLG"


CASES: dict[str, Variant] = {
    "arcee": Variant(ArceeConfig(**sizes()), {"hidden_act": "relu"}, edit=old_spelling()),
    "biogpt": Variant(BioGptConfig(**without(sizes(pad_token_id=1, bos_token_id=0), "num_key_value_heads"))),
    "codegen": Variant(CodeGenConfig(**gpt2(n_ctx=256, rotary_dim=8, n_head=8, n_inner=96)), {"rotary_dim": 4}),
    "cwm": Variant(
        CwmConfig(
            **sizes(num_hidden_layers=3),
            head_dim=16,
            sliding_window=SLIDING_WINDOW,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
            rope_parameters=rope(
                "llama3",
                1e6,
                factor=16.0,
                high_freq_factor=4.0,
                low_freq_factor=1.0,
                original_max_position_embeddings=32,
            ),
        ),
        {"sliding_window": 255},
    ),
    "dots1": Variant(Dots1Config(**experts(), head_dim=16, sliding_window=None), {"routed_scaling_factor": 1.0}),
    "ernie4_5": Variant(Ernie4_5Config(**sizes(), head_dim=16), edit=old_spelling()),
    "ernie4_5_moe": Variant(
        Ernie4_5_MoeConfig(
            **sizes(num_hidden_layers=3),
            moe_intermediate_size=32,
            moe_k=2,
            moe_num_experts=6,
            moe_num_shared_experts=2,
            moe_layer_start_index=1,
        )
    ),
    "exaone4": Variant(
        Exaone4Config(**sizes(num_hidden_layers=4), sliding_window=SLIDING_WINDOW, sliding_window_pattern=4),
        {"sliding_window": 255},
        edit=pattern_in_letters,
    ),
    # LGAI-EXAONE/EXAONE-4.0-1.2B: no windows, and rotary embeddings in all layers.
    "exaone4_no_window": Variant(
        Exaone4Config(**sizes(), sliding_window=None, sliding_window_pattern=None, layer_types=["full_attention"] * 2),
        {"sliding_window": SLIDING_WINDOW},
    ),
    "exaone_moe": Variant(
        ExaoneMoeConfig(
            **sizes(num_hidden_layers=4),
            sliding_window=SLIDING_WINDOW,
            sliding_window_pattern=4,
            first_k_dense_replace=1,
            moe_intermediate_size=32,
            num_experts=6,
            num_experts_per_tok=2,
            num_shared_experts=1,
        ),
        {"routed_scaling_factor": 1.0},
    ),
    "flex_olmo": Variant(FlexOlmoConfig(**sizes(), num_experts=4, num_experts_per_tok=2)),
    "glm4_moe": Variant(
        Glm4MoeConfig(**experts(), head_dim=16, use_qk_norm=True, attention_bias=True),
        {"routed_scaling_factor": 1.0},
        edit=old_spelling(),
    ),
    "glm4_moe_lite": Variant(
        Glm4MoeLiteConfig(**{**without(experts(), "first_k_dense_replace"), **latent()}), {"rope_interleave": False}
    ),
    "gpt_neo": Variant(
        GPTNeoConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            num_layers=2,
            num_heads=4,
            intermediate_size=96,
            max_position_embeddings=256,
            attention_types=[[["global", "local"], 1]],
            window_size=SLIDING_WINDOW,
            bos_token_id=1,
            eos_token_id=2,
        ),
        {"window_size": 255},
    ),
    "granitemoeshared": Variant(
        GraniteMoeSharedConfig(
            **sizes(intermediate_size=48),
            num_local_experts=6,
            num_experts_per_tok=2,
            shared_intermediate_size=64,
            embedding_multiplier=12.0,
            logits_scaling=6.0,
            residual_multiplier=0.22,
            attention_multiplier=0.4,
            tie_word_embeddings=True,
        )
    ),
    "helium": Variant(HeliumConfig(**sizes(), head_dim=16), edit=old_spelling()),
    "hunyuan_v1_dense": Variant(
        HunYuanDenseV1Config(**sizes(), head_dim=16, rope_parameters=rope("dynamic", alpha=50.0, factor=1.0)),
        {"rope_scaling": {"type": "default"}},
        edit=old_hunyuan,
    ),
    # tencent/Hunyuan-A13B-Instruct has a list of the numbers of active experts.
    "hunyuan_v1_moe": Variant(HunYuanMoEV1Config(**sizes(), head_dim=16, num_experts=6, moe_topk=[2, 3])),
    "hyperclovax": Variant(
        HyperCLOVAXConfig(
            **sizes(), attention_multiplier=0.4, embedding_multiplier=10.0, logits_scaling=0.5, residual_multiplier=0.8
        ),
        {"attention_multiplier": None},
    ),
    "internlm3": Variant(
        InternLM3Config(
            **sizes(),
            head_dim=16,
            attention_bias=True,
            mlp_bias=True,
            rope_parameters=rope("dynamic", 50_000.0, factor=6.0),
        ),
        edit=old_internlm3,
    ),
    "jais2": Variant(Jais2Config(**sizes())),
    "minicpm3": Variant(
        MiniCPM3Config(
            **{**sizes(), **latent()},
            dim_model_base=32,
            rope_parameters=rope(
                "longrope",
                short_factor=[1.0, 1.1, 1.2, 1.3],
                long_factor=[1.0, 1.5, 2.0, 3.0],
                original_max_position_embeddings=32,
            ),
        ),
        {"dim_model_base": None},
        edit=old_spelling(),
    ),
    "minimax_m2": Variant(
        MiniMaxM2Config(
            **sizes(intermediate_size=48), head_dim=16, num_local_experts=6, num_experts_per_tok=2, rotary_dim=8
        ),
        {"rope_parameters": rope("default", 5e6, partial_rotary_factor=1.0)},
        edit=old_spelling("partial_rotary_factor"),
    ),
    "ministral": Variant(
        MinistralConfig(
            **sizes(),
            head_dim=16,
            sliding_window=SLIDING_WINDOW,
            layer_types=["full_attention", "sliding_attention"],
        ),
        {"sliding_window": 255},
    ),
    "nemotron": Variant(
        NemotronConfig(**sizes()), {"partial_rotary_factor": 1.0}, edit=old_spelling(), edit_tensors=offsets_from_one
    ),
    "olmo3": Variant(
        Olmo3Config(
            **sizes(num_hidden_layers=4),
            sliding_window=SLIDING_WINDOW,
            rope_parameters={
                "full_attention": rope(
                    "yarn",
                    500000.0,
                    factor=8.0,
                    original_max_position_embeddings=32,
                    beta_fast=32.0,
                    beta_slow=1.0,
                    attention_factor=1.2079,
                ),
                "sliding_attention": rope("default", 500000.0),
            },
        ),
        {"rope_scaling": None},
        edit=old_olmo3,
    ),
    "persimmon": Variant(
        PersimmonConfig(**without(sizes(), "num_key_value_heads")), {"partial_rotary_factor": 1.0}, edit=old_spelling()
    ),
    "seed_oss": Variant(SeedOssConfig(**sizes(), head_dim=24), edit=old_spelling()),
    "solar_open": Variant(
        SolarOpenConfig(**without(experts(), "first_k_dense_replace"), head_dim=16), {"routed_scaling_factor": 1.0}
    ),
    "vaultgemma": Variant(
        VaultGemmaConfig(**sizes(), head_dim=16, query_pre_attn_scalar=24, sliding_window=SLIDING_WINDOW),
        {"sliding_window": 255},
    ),
    # transformers 5.23 zeroes the padding token's row, regardless of the file's values.
    "youtu": Variant(YoutuConfig(**{**sizes(pad_token_id=None), **latent()})),
}


def make(name: str, seed: int, out: Path) -> None:
    """Writes one case."""
    make_variant(CASES[name], seed, out)
