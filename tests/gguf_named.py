"""Families whose tensors' names the `gguf` package does not have: Ling 3 and MiniMax-M3.

Sources: `conversion/` (`bailingmoe3.py`, `minimax.py`) and `src/llama-arch.cpp` in llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
Json = Mapping[str, Any]
Named = Iterator[tuple[str, Array]]

NAMED = ("bailing_hybrid", "minimax_m3_vl_text")
"""Values of `model_type` of these families."""
NAMES = {
    "bailing_hybrid": {
        "attention.A_log": "ssm_a",
        "attention.dt_bias": "ssm_dt.bias",
        "attention.b_proj.weight": "ssm_beta.weight",
        "attention.f_proj.weight": "ssm_f_a.weight",
        "attention.o_norm.weight": "ssm_norm.weight",
        **{f"attention.{name}.weight": "attn_output.weight" for name in ("dense", "o_proj")},
        **{f"attention.{role}_proj.weight": f"attn_{role}.weight" for role in ("q", "k", "v", "q_a", "q_b")},
        **{f"attention.{role}_conv1d.weight": f"ssm_conv1d_{role}.weight" for role in ("q", "k", "v")},
        "attention.q_a_layernorm.weight": "attn_q_a_norm.weight",
        "attention.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
        "attention.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
        "mlp.gate.expert_bias": "exp_probs_b.bias",
    },
    "minimax_m3_vl_text": {
        **{
            f"self_attn.index_{name}.weight": f"indexer.{name}.weight"
            for name in ("q_proj", "k_proj", "q_norm", "k_norm")
        },
        **{
            f"{module}.{role}_proj.weight": f"ffn_{role}{end}.weight"
            for module, end in (("mlp", ""), ("block_sparse_moe.shared_experts", "_shexp"))
            for role in ("gate", "up", "down")
        },
        **{f"self_attn.{role}_norm.weight": f"attn_{role}_norm.weight" for role in ("q", "k")},
    },
}
"""Names of tensors after the layer's number in checkpoints, and those in GGUF."""


def named_metadata(config: Json) -> dict[str, object]:
    """Returns the values of config.json under GGUF's keys."""
    match config["model_type"]:
        case "bailing_hybrid":
            width = config["moe_intermediate_size"] * config["num_shared_experts"]
            return {
                "attention.head_count_kv": [int(kind == "full_attention") for kind in config["layer_types"]],
                "kda.head_dim": config["linear_head_dim"],
                "kda.safe_gate": config["kda_safe_gate"],
                "kda.gate_lower_bound": float(config["kda_lower_bound"]),
                "ssm.conv_kernel": config["short_conv_kernel_size"],
                "expert_shared_feed_forward_length": width,
                "expert_gating_func": 2,
                **{
                    key: [float(limit or 0) for limit in config[field]]
                    for field, key in (
                        ("expert_swiglu_limit_list", "swiglu_clamp_exp"),
                        ("share_expert_swiglu_limit_list", "swiglu_clamp_shexp"),
                    )
                    if config.get(field)
                },
            }
        case _:
            return {
                "expert_shared_count": config["shared_intermediate_size"] // config["intermediate_size"],
                "expert_weights_norm": True,
                "expert_gating_func": 2,
                "leading_dense_block_count": config["mlp_layer_types"].count("dense"),
            }


def named_tensors(config: Json, stored: Named) -> Named:
    """Returns the tensors of a checkpoint of such a model, under GGUF's names where the `gguf` package has none."""
    names = NAMES[config["model_type"]]
    for name, values in stored:
        if "vision" in name or "projector" in name or "patch_merge" in name:
            continue
        name = name.removeprefix("language_model.")  # noqa: PLW2901
        found = re.match(r"model\.layers\.(\d+)\.(.*)", name)
        layer, last = (int(found[1]), found[2]) if found else (0, "")
        if last == "attention.g_proj.weight":
            gate = "attn_gate" if config["layer_types"][layer] == "full_attention" else "ssm_g_a"
            yield f"blk.{layer}.{gate}.weight", values
        else:
            yield f"blk.{layer}.{names[last]}" if last in names else name, changed(last, values)


def changed(name: str, values: Array) -> Array:
    """Returns a tensor's values as they are stored in GGUF, by its name after the layer's number."""
    if name == "attention.A_log":
        return np.exp(values)[:, None]
    if re.fullmatch(r"attention\.[qkv]_conv1d\.weight", name):
        return values.reshape(1, len(values), 1, -1)
    return values
