"""Families whose tensors' names the `gguf` package does not have: Ling 3, MiniMax-M3 and Qwen4-Exp.

Sources: `conversion/` (`bailingmoe3.py`, `minimax.py`, `qwen4exp.py`) and `src/llama-arch.cpp` in llama.cpp.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
Json = Mapping[str, Any]
Named = Iterator[tuple[str, Array]]

NAMED = ("bailing_hybrid", "minimax_m3_vl_text", "qwen4_exp_text")
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
    "qwen4_exp_text": {
        **{
            f"{module}_hyper_connection.{name}.weight": f"hc_{span}_{role}.weight"
            for module, span in (("attn", "attn"), ("mlp", "ffn"))
            for name, role in (
                ("hc_norm", "norm"),
                ("input_mix_weight_down", "down"),
                ("input_mix_weight_up", "up"),
                ("block_inject_weight", "inject"),
            )
        },
        **{f"self_attn.indexer.{role}_layernorm.weight": f"indexer.{role}_norm.weight" for role in ("q", "k")},
        **{f"ple.{name}_proj.weight": f"ple_{name}.weight" for name in ("key", "value")},
        **{f"ple.norm_{name}.weight": f"ple_norm_{name}.weight" for name in ("key", "query", "conv")},
        "ple.conv1d.weight": "ple_conv1d.weight",
    },
}
"""Names of tensors after the layer's number in checkpoints, and those in GGUF."""
CONSTANTS = {
    "layer_multipliers": "ple.layer_multipliers",
    "ngram_heads_offsets": "ple.head_offsets",
    "ngram_heads_vocab_sizes": "ple.head_vocab_sizes",
}
"""Constants of the hashes of n-grams, and their keys."""


def named_metadata(config: Json, directory: Path) -> dict[str, object]:
    """Returns the values of config.json under GGUF's keys."""
    layers = range(config["num_hidden_layers"])
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
        case "minimax_m3_vl_text":
            return {
                "expert_shared_count": config["shared_intermediate_size"] // config["intermediate_size"],
                "expert_weights_norm": True,
                "expert_gating_func": 2,
                "leading_dense_block_count": config["mlp_layer_types"].count("dense"),
            }
        case _:
            attending = [config["layer_types"][layer] != "linear_attention" for layer in layers]
            keys: dict[str, object] = {
                "attention.compress_ratios": [config["indexer_compress_ratio"] * each for each in attending],
            }
            return {**keys, **ngram_metadata(config, directory)} if config["ple_layer_ids"] else keys


def ngram_metadata(config: Json, directory: Path) -> dict[str, object]:
    """Returns the keys of the embeddings of n-grams, with the constants of their hashes."""
    [layer] = (layer - 1 for layer in config["ple_layer_ids"])
    at = f"model.layers.{layer}.ple.ple_embedding"
    hashes = (config["ngram_size"] - 1) * config["heads_per_ngram"]
    return {
        "ple.layers": [layer],
        "ple.ngram_size": config["ngram_size"],
        "ple.heads_per_ngram": config["heads_per_ngram"],
        "ple.conv_kernel": config["ple_conv_kernel_size"],
        "ple.eos_token_id": config["eos_token_id"],
        "embedding_length_per_layer_input": config["ple_embed_dim"] // hashes,
        **{key: integers(directory / "model.safetensors", f"{at}.{name}") for name, key in CONSTANTS.items()},
    }


def integers(file: Path, name: str) -> list[int]:
    """Returns the integers of an I64 tensor of a safetensors file."""
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    start, end = json.loads(data[8 : 8 + length])[name]["data_offsets"]
    return np.frombuffer(data[8 + length + start : 8 + length + end], "<i8").tolist()


def named_tensors(config: Json, stored: Named) -> Named:
    """Returns the tensors of a checkpoint of such a model, under GGUF's names where the `gguf` package has none."""
    kind, parts = config["model_type"], dict[int, Array]()
    names = NAMES[kind]
    for name, values in stored:
        if "vision" in name or "projector" in name or "patch_merge" in name:
            continue
        name = name.removeprefix("language_model.")  # noqa: PLW2901
        found = re.match(r"model\.layers\.(\d+)\.(.*)", name)
        layer, last = (int(found[1]), found[2]) if found else (0, "")
        if last.startswith("ple.") and layer + 1 not in config["ple_layer_ids"]:
            continue
        if shard := re.match(r"ple\.ple_embedding\.ngram_embedding\.shard_(\d+)", last):
            parts[int(shard[1])] = values
        elif last == "self_attn.indexer.index_qk_proj.weight":
            queries = config["indexer_n_heads"] * config["indexer_head_dim"]
            yield f"blk.{layer}.indexer.q_proj.weight", values[:queries]
            yield f"blk.{layer}.indexer.k_proj.weight", values[queries:]
        elif last == "attention.g_proj.weight":
            gate = "attn_gate" if config["layer_types"][layer] == "full_attention" else "ssm_g_a"
            yield f"blk.{layer}.{gate}.weight", values
        elif mixer := re.fullmatch(r"model\.hyper_connection_mixer\.(\w+)\.weight", name):
            yield f"output_hc_{mixer[1].removeprefix('hc_').removeprefix('input_mix_weight_')}.weight", values
        elif not last.startswith("ple.ple_embedding."):
            yield f"blk.{layer}.{names[last]}" if last in names else name, changed(last, values)
    if parts:
        yield "per_layer_token_embd.weight", np.concatenate([rows for _, rows in sorted(parts.items())])


def changed(name: str, values: Array) -> Array:
    """Returns a tensor's values as they are stored in GGUF, by its name after the layer's number."""
    if name == "attention.A_log":
        return np.exp(values)[:, None]
    if re.fullmatch(r"attention\.[qkv]_conv1d\.weight", name):
        return values.reshape(1, len(values), 1, -1)
    return values + 1 if name.startswith("ple.norm_") else values
