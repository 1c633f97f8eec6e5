"""Fields of hybrids and of their relatives that the published configurations leave at their defaults."""

from pathlib import Path

from checkpoint import JsonObject
from transformers import (
    FalconH1Config,
    MiMoV2FlashConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    PhimoeConfig,
    Qwen3NextConfig,
)
from variants import SLIDING_WINDOW, Variant, make_variant, rope, sizes


def small(**changes: object) -> JsonObject:
    """Dimensions of a decoder whose layers have several mixers; hidden states of 48 keep the files small."""
    return sizes(hidden_size=48, intermediate_size=40, **changes)


def delta_net(**changes: object) -> JsonObject:
    """Dimensions of a gated delta net and a gated attention layer after it."""
    return small(
        head_dim=16,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        layer_types=["linear_attention", "full_attention"],
        **changes,
    )


def count_layers(config: JsonObject) -> None:
    """Adds the number of layers, which published files have beside their types."""
    config["num_hidden_layers"] = len(config["layers_block_type"])


CASES: dict[str, Variant] = {
    # As nvidia/NVIDIA-Nemotron-3-Super: experts that read a latent. No published file has biases; attention has none
    # whatever the file says.
    "nemotron_h_latent": Variant(
        NemotronHConfig(
            **small(),
            layers_block_type=["linear_attention", "moe", "full_attention", "moe", "mlp"],
            head_dim=16,
            attention_bias=True,
            mlp_bias=True,
            use_bias=True,
            mamba_num_heads=4,
            mamba_head_dim=16,
            n_groups=2,
            ssm_state_size=16,
            n_routed_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            moe_shared_expert_intermediate_size=32,
            moe_latent_size=20,
            routed_scaling_factor=2.5,
        ),
        {"routed_scaling_factor": 1.0},
        edit=count_layers,
    ),
    # LongRoPE of microsoft/Phi-3.5-MoE-instruct, with an original context below the length of the text.
    "phimoe_longrope": Variant(
        PhimoeConfig(
            **small(),
            num_local_experts=4,
            original_max_position_embeddings=24,
            rope_parameters=rope(
                "longrope",
                short_factor=[1.0, 1.1, 1.5, 2.0, 2.5, 3.0],
                long_factor=[1.0, 2.0, 4.0, 8.0, 12.0, 16.0],
                short_mscale=1.2,
                long_mscale=1.4,
                original_max_position_embeddings=24,
            ),
        ),
        {"sliding_window": 8},
    ),
    # A `mamba_d_ssm` of null, biases beside factors on the inputs, and another activation.
    "falcon_h1_bias": Variant(
        FalconH1Config(
            **small(),
            attention_bias=True,
            hidden_act="gelu",
            mamba_d_ssm=None,
            mamba_n_heads=6,
            mamba_n_groups=2,
            mamba_d_state=16,
            mamba_proj_bias=True,
            projectors_bias=False,
            attention_in_multiplier=0.6,
            attention_out_multiplier=1.5,
            key_multiplier=0.5,
            ssm_in_multiplier=1.75,
            ssm_out_multiplier=0.8,
            ssm_multipliers=[0.5, 1.5, 2.0, 0.75, 1.25],
            mlp_multipliers=[0.5, 2.0],
        ),
        {"ssm_in_multiplier": 1.0},
    ),
    "qwen3_next_bias": Variant(
        Qwen3NextConfig(**delta_net(num_experts=0), attention_bias=True, hidden_act="gelu"), {"hidden_act": "silu"}
    ),
    "olmo_hybrid_bias": Variant(
        OlmoHybridConfig(
            **delta_net(num_key_value_heads=4), attention_bias=True, rope_parameters=rope("default", 500_000.0)
        ),
        {"linear_allow_neg_eigval": False},
    ),
    "mimo_v2_flash_bias": Variant(
        MiMoV2FlashConfig(
            **small(num_key_value_heads=1),
            attention_bias=True,
            head_dim=24,
            v_head_dim=16,
            sliding_window=SLIDING_WINDOW,
            layer_types=["full_attention", "sliding_attention"],
            mlp_layer_types=["dense", "dense"],
        ),
        {"attention_value_scale": 1.0},
    ),
}


def make(name: str, seed: int, out: Path) -> None:
    """Makes one case."""
    make_variant(CASES[name], seed, out)
