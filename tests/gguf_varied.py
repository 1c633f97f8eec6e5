"""Changes of llama.cpp's converters to families whose layers differ, or that have special keys or tensors.

Sources: `conversion/` in llama.cpp (`gemma.py`, `mimo.py`, `granite.py`, `llama.py`, `mistral3.py`, `hunyuan.py`,
`kimi_linear.py`, `bitnet.py`, `deepseek.py`).
"""

from __future__ import annotations

import math
import re
from statistics import NormalDist

import numpy as np

from gguf_mixers import Array, Json, Named, stored_decay

VARIED = (
    *(
        "apertus",
        "bitnet",
        "deepseek_v4",
        "gemma3n_text",
        "gemma4_text",
        "granite_swa",
        "granitemoe_swa",
        "hy_v3",
        "kimi_linear",
    ),
    *("llama4_text", "mimo_v2_flash", "minimax", "ministral3", "mistral4"),
)
"""Values of `model_type` of these families."""
LEFT_OUT = (
    "vision_tower.",
    "vision_model.",
    "multi_modal_projector.",
    "embed_vision.",
    "embed_audio.",
    "audio_tower.",
    "_decay",
    "slope_rate",
)
NAMES = {
    "mlp.expert_bias": "exp_probs_b",
    "self_attn.attention_sink_bias": "attn_sinks.weight",
    "self_attn.sinks": "attn_sinks.weight",
    "self_attn.attn_sub_norm.weight": "attn_sub_norm.weight",
    "mlp.ffn_sub_norm.weight": "ffn_sub_norm.weight",
    "altup.correct_output_scale": "altup_correct_scale.weight",
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
    "gate.e_score_correction_bias": "exp_probs_b.bias",
    "self_attn.qkv_proj.weight": "attn_qkv.weight",
    "self_attn.output_gate.weight": "attn_gate.weight",
    "self_attn.norm.weight": "attn_norm_2.weight",
    "self_attn.out_proj.weight": "attn_output.weight",
    "router.gate.weight": "ffn_gate_inp.weight",
    "shared_mlp.gate_proj.weight": "ffn_gate_shexp.weight",
    "shared_mlp.up_proj.weight": "ffn_up_shexp.weight",
    "shared_mlp.down_proj.weight": "ffn_down_shexp.weight",
    "self_attn.A_log": "ssm_a",
    "self_attn.dt_bias": "ssm_dt.bias",
}
"""Ends of tensors' names in checkpoints, and the names in GGUF after `blk.N.`."""


DEEPSEEK4 = {
    **{f"hc_head.hc_{part}": f"output_hc_{part}.weight" for part in ("fn", "base", "scale")},
    "head.weight": "output.weight",
    "attn.attn_sink": "attn_sinks.weight",
    "attn.q_norm.weight": "attn_q_a_norm.weight",
    "attn.norm.weight": "attn_kv_a_norm.weight",
    "attn.wq_a.weight": "attn_q_a.weight",
    "attn.wq_b.weight": "attn_q_b.weight",
    "attn.wkv.weight": "attn_kv.weight",
    "attn.wo_a.weight": "attn_output_a.weight",
    "attn.wo_b.weight": "attn_output_b.weight",
    "attn.indexer.wq_b.weight": "indexer.attn_q_b.weight",
    "attn.indexer.weights_proj.weight": "indexer.proj.weight",
    **{
        f"attn.{module}compressor.{part}": f"{name}_compressor_{end}.weight"
        for module, name in (("", "attn"), ("indexer.", "indexer"))
        for part, end in (("ape", "ape"), ("wkv.weight", "kv"), ("wgate.weight", "gate"), ("norm.weight", "norm"))
    },
    "ffn.gate.weight": "ffn_gate_inp.weight",
    "ffn.gate.bias": "exp_probs_b.bias",
    "ffn.gate.tid2eid": "ffn_gate_tid2eid.weight",
    **{
        f"ffn.{module}.{part}.weight": f"ffn_{name}_{end}.weight"
        for module, end in (("experts", "exps"), ("shared_experts", "shexp"))
        for part, name in (("w1", "gate"), ("w2", "down"), ("w3", "up"))
    },
}
"""Names of DeepSeek-V4's tensors after the layer's number, and those in GGUF that the `gguf` package does not have."""


def deepseek4_tensors(stored: Named) -> Named:
    """Returns DeepSeek-V4's tensors under GGUF's names, with the experts of a layer stacked."""
    experts: dict[str, list[tuple[int, Array]]] = {}
    for name, values in stored:
        found = re.match(r"model\.layers\.(\d+)\.(.*)", name)
        if not found:
            yield DEEPSEEK4.get(name.removeprefix("model."), name), values
        elif of_expert := re.match(r"ffn\.experts\.(\d+)\.(.*)", found[2]):
            target = f"blk.{found[1]}.{DEEPSEEK4[f'ffn.experts.{of_expert[2]}']}"
            experts.setdefault(target, []).append((int(of_expert[1]), values))
        else:
            same = f"{found[2]}.weight" if found[2].startswith("hc_") else found[2]
            yield f"blk.{found[1]}.{DEEPSEEK4.get(found[2], same)}", values
    for target, matrices in experts.items():
        yield target, np.stack([values for _, values in sorted(matrices, key=lambda matrix: matrix[0])])


def varied_metadata(config: Json) -> dict[str, object]:
    """Returns values of config.json under GGUF's keys."""
    layers = config["num_hidden_layers"]
    types = config.get("layer_types", ["full_attention"] * layers)
    match config["model_type"]:
        case "gemma3n_text":
            return {
                "altup.num_inputs": config["altup_num_inputs"],
                "altup.active_idx": config["altup_active_idx"],
                "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
                # Published files have a float.
                "attention.shared_kv_layers": float(config["num_kv_shared_layers"]),
                "activation_sparsity_scale": [
                    NormalDist().inv_cdf(share) if share else -math.inf
                    for share in config["activation_sparsity_pattern"]
                ],
            }
        case "gemma4_text":
            return gemma4(config, types)
        case "deepseek_v4":
            rates = {"sliding_attention": 0, **config["compress_rates"]}
            limits = [config["swiglu_limit"]] * layers
            return {
                "attention.compress_ratios": [rates[kind] for kind in types],
                "attention.sliding_window_pattern": None,
                "expert_gating_func": 4,
                # Some files state layers that they do not have.
                "nextn_predict_layers": config["num_nextn_predict_layers"],
                "hash_layer_count": config["mlp_layer_types"].count("hash_moe"),
                "rope.dimension_count": config["qk_rope_head_dim"],
                "rope.freq_base": config["rope_theta"],
                "swiglu_clamp_exp": limits,
                "swiglu_clamp_shexp": limits,
            }
        case "granite_swa" | "granitemoe_swa":
            pattern = [theta > 0 for theta in config["layer_rope_theta"]]
            return {"attention.rope_pattern": pattern, "expert_shared_feed_forward_length": None}
        case "hy_v3":
            width = config["moe_intermediate_size"] * config["num_shared_experts"]
            return {
                "expert_shared_feed_forward_length": width,
                "expert_weights_norm": True,
                "expert_gating_func": 2,
            }
        case "kimi_linear":
            linear = config["linear_attn_config"]
            return {
                "attention.head_count_kv": [int(each + 1 in linear["full_attn_layers"]) for each in range(layers)],
                "kda.head_dim": linear["head_dim"],
                "ssm.conv_kernel": linear["short_conv_kernel_size"],
                "expert_gating_func": 2,
            }
        case "llama4_text":
            return {
                "feed_forward_length": config["intermediate_size_mlp"],
                "expert_feed_forward_length": config["intermediate_size"],
                "interleave_moe_layer_step": config["interleave_moe_layer_step"],
            }
        case "mimo_v2_flash":
            sliding = [kind == "sliding_attention" for kind in types]
            heads = config["num_key_value_heads"]
            return {
                "attention.head_count_kv": [2 * heads if each else heads for each in sliding],
                "attention.sliding_window": config["sliding_window_size"] + 1,
                "attention.sliding_window_pattern": sliding,
                "attention.value_length": config["v_head_dim"],
                "attention.value_scale": config["attention_value_scale"],
            }
        case "ministral3":
            rope = config["rope_parameters"]
            return {
                "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
                "attention.temperature_scale": rope["llama_4_scaling_beta"],
            }
        case "mistral4":
            return {"attention.temperature_scale": config["rope_parameters"]["llama_4_scaling_beta"]}
        case _:
            return {}


def gemma4(config: Json, types: list[str]) -> dict[str, object]:
    """Returns the keys of Gemma 4; those without `_swa` are about layers of full attention."""
    full, sliding = config["global_head_dim"], config["head_dim"]
    keys: dict[str, object] = {
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in types],
        "rope.dimension_count": full,
        "rope.dimension_count_swa": sliding,
    }
    for name in ("attention.key_length", "attention.value_length"):
        keys |= {name: full, f"{name}_swa": sliding}
    if config["use_double_wide_mlp"]:
        width, first = config["intermediate_size"], len(types) - config["num_kv_shared_layers"]
        keys["feed_forward_length"] = [width if layer < first else 2 * width for layer in range(len(types))]
    if (heads := config["num_global_key_value_heads"]) is not None:
        keys["attention.head_count_kv"] = [
            config["num_key_value_heads"] if kind == "sliding_attention" else heads for kind in types
        ]
    return keys


def varied_tensors(config: Json, stored: Named) -> Named:
    """Returns the tensors of a checkpoint of such a model, under GGUF's names where the `gguf` package has none."""
    if config["model_type"] == "deepseek_v4":
        yield from deepseek4_tensors(stored)
        return
    streams: dict[str, list[Array]] = {}
    for name, values in stored:
        if found := re.match(r"model\.(altup_\w*projections)\.\d\.weight", name):
            streams.setdefault(found[1], []).append(values)
            continue
        if ".act_fn." in name or any(part in name for part in LEFT_OUT):
            continue
        name = re.sub(r"^(model\.language_model|language_model\.model)\.", "model.", name)  # noqa: PLW2901
        name = name.removeprefix("language_model.")  # noqa: PLW2901
        found = re.match(r"model\.layers\.(\d+)\.(.*)", name)
        if found and config["model_type"] == "llama4_text" and "experts." in name:
            yield from transposed_experts(found[1], name, values)
            continue
        end = next((end for end in NAMES if found and found[2].endswith(end) and f".{end}" in name), None)
        if name.endswith("A_log"):
            values = stored_decay(values)  # noqa: PLW2901
        if name.endswith("_conv1d.weight"):
            values = values.reshape(1, len(values), 1, -1)  # noqa: PLW2901
        yield f"blk.{found[1]}.{NAMES[end]}" if found and end else name, values
    for projections, matrices in streams.items():
        yield f"model.{projections}.weight", np.stack(matrices)


def transposed_experts(layer: str, name: str, values: Array) -> Named:
    """Transposes Llama 4's experts, and separates gates from what they multiply."""
    if name.endswith("gate_up_proj"):
        for role, part in zip(("gate", "up"), np.split(values.swapaxes(-1, -2), 2, axis=-2), strict=True):
            yield f"blk.{layer}.ffn_{role}_exps.weight", part
    else:
        yield f"blk.{layer}.ffn_down_exps.weight", values.swapaxes(-1, -2)
