"""Changes of llama.cpp's converters to short convolutions, delta nets and state-space layers.

Sources: `conversion/` in llama.cpp (`lfm2.py`, `qwen.py`, `granite.py`, `nemotron.py`, `falcon_h1.py`, `mamba.py`,
`jamba.py`).
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

MIXED = (
    *("falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe", "mamba", "mamba2", "nemotron_h"),
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text"),
)
"""Values of `model_type` whose layers have such mixers."""
ATTENTION = ("attention", "full_attention", "indexed_attention")
LETTERS = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}


def mixer_metadata(config: Json, kv_heads: int) -> dict[str, object]:
    """Returns the values of config.json that concern mixers under GGUF's keys; None removes a key."""
    kind, layers = config["model_type"], config["num_hidden_layers"]
    by_layer = [kv_heads if index in attending(config) else 0 for index in range(layers)]
    match kind:
        case "lfm2" | "lfm2_moe":
            keys = {
                "attention.layer_norm_epsilon": None,
                "attention.layer_norm_rms_epsilon": config["norm_eps"],
                "attention.head_count_kv": by_layer,
                "shortconv.l_cache": config["conv_L_cache"],
            }
            if kind == "lfm2":
                width = int(config["block_ffn_dim_multiplier"] * int(2 * config["block_ff_dim"] / 3))
                multiple = config["block_multiple_of"]
                return {**keys, "feed_forward_length": -(-width // multiple) * multiple}
            return {**keys, "expert_gating_func": 2, "leading_dense_block_count": config["num_dense_layers"]}
        case "qwen3_next" | "qwen3_5_text" | "qwen3_5_moe_text" | "qwen4_exp_text":
            heads = config["linear_num_value_heads"]
            keys = ssm(config["linear_conv_kernel_dim"], heads * config["linear_value_head_dim"])
            keys |= state(config["linear_key_head_dim"], heads, config["linear_num_key_heads"])
            recurrent = [layer not in attending(config) for layer in range(layers)]
            return {**keys, "attention.recurrent_layers": recurrent, "full_attention_interval": 4}
        case "granitemoehybrid":
            if len(attending(config)) == layers:
                return {}
            heads = config["mamba_n_heads"]
            keys = ssm(config["mamba_d_conv"], heads * config["mamba_d_head"])
            keys |= state(config["mamba_d_state"], heads, config["mamba_n_groups"])
            extra = {"attention.head_count_kv": by_layer, "rope.scaling.finetuned": False, "context_length": 1 << 20}
            return {**keys, **extra}
        case "nemotron_h":
            heads = config["mamba_num_heads"]
            keys = ssm(config["conv_kernel"], heads * config["mamba_head_dim"])
            keys |= state(config["ssm_state_size"], heads, config["n_groups"])
            width = config["moe_intermediate_size"]
            widths = [width if kind == "moe" else 0 for kind in kinds(config)]
            return {**keys, "attention.head_count_kv": by_layer, "feed_forward_length": widths}
        case "falcon_h1":
            heads = config["mamba_n_heads"]
            keys = ssm(config["mamba_d_conv"], config["mamba_d_ssm"])
            return {**keys, **state(config["mamba_d_state"], heads, config["mamba_n_groups"])}
        case "mamba" | "falcon_mamba" | "mamba2":
            none = {"attention.key_length": None, "attention.value_length": None, "attention.head_count_kv": None}
            norms = {"attention.head_count": 0, "feed_forward_length": 0, "attention.layer_norm_epsilon": None}
            norms |= {"attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"], "context_length": 1 << 20}
            if kind == "mamba2":
                inner, heads = config["num_heads"] * config["head_dim"], config["num_heads"]
                keys = state(config["state_size"], heads, config["n_groups"])
            else:
                inner = config["intermediate_size"]
                keys = state(config["state_size"], config["time_step_rank"])
                keys["ssm.dt_b_c_rms"] = kind == "falcon_mamba"
            return {**none, **norms, **ssm(config["conv_kernel"], inner), **keys}
        case "jamba":
            inner = config["mamba_expand"] * config["hidden_size"]
            keys = {**ssm(config["mamba_d_conv"], inner), **state(config["mamba_d_state"], config["mamba_dt_rank"])}
            return {**keys, "attention.head_count_kv": by_layer}
        case _:
            return {}


def ssm(taps: int, inner: int) -> dict[str, object]:
    """Returns the keys of a convolution and the width of what it precedes."""
    return {"ssm.conv_kernel": taps, "ssm.inner_size": inner}


def state(size: int, rank: int, groups: int | None = None) -> dict[str, object]:
    """Returns the keys of a state; `rank` is a number of heads in newer mixers than Mamba."""
    return {"ssm.state_size": size, "ssm.time_step_rank": rank, "ssm.group_count": groups}


def kinds(config: Json) -> list[str]:
    """Returns the kinds of Nemotron-H's layers."""
    if "hybrid_override_pattern" in config:
        return [LETTERS[letter] for letter in config["hybrid_override_pattern"]]
    types: list[str] = config["layers_block_type"]
    return [{"linear_attention": "mamba", "full_attention": "attention"}.get(kind, kind) for kind in types]


def attending(config: Json) -> list[int]:
    """Returns the layers with attention."""
    layers = range(config["num_hidden_layers"])
    if "full_attn_idxs" in config:
        return config["full_attn_idxs"]
    if config["model_type"] == "nemotron_h":
        return [index for index in layers if kinds(config)[index] == "attention"]
    if "attn_layer_period" in config:
        return [index for index in layers if index % config["attn_layer_period"] == config["attn_layer_offset"]]
    if "full_attention_interval" in config and "layer_types" not in config:
        return [index for index in layers if (index + 1) % config["full_attention_interval"] == 0]
    types = config.get("layer_types", ["full_attention"] * len(layers))
    return [index for index in layers if types[index] in ATTENTION]


def mixer_tensors(config: Json, stored: Named) -> Named:
    """Returns the tensors of a checkpoint of such a model, with names that the `gguf` package maps."""
    for name, values in stored:
        if ".mtp." in name or "visual." in name:
            continue
        name, values = renamed(name, config), changed(name, values, config)  # noqa: PLW2901
        if name.endswith("in_proj_qkvz.weight"):
            yield from by_role(name, values, config)
        elif name.endswith("experts.gate_up_proj"):
            for role, part in zip(("gate_proj", "up_proj"), np.split(values, 2, axis=-2), strict=True):
                yield name.replace("gate_up_proj", f"{role}.weight"), part
        else:
            yield name, values


def renamed(name: str, config: Json) -> str:
    """Returns the name that the converter looks up."""
    name = name.replace("model.language_model.", "model.").replace("dt_bias", "dt_proj.bias")
    name = name.replace(".expert_bias", ".expert_bias.bias")
    if config["model_type"] == "qwen3_next" and (found := re.match(r".*\.(\d+)\.mlp\.(gate|up|down)_proj", name)):
        return f"blk.{found[1]}.ffn_{found[2]}.weight"  # llama.cpp has no model without experts
    if name.endswith("experts.down_proj"):
        return f"{name}.weight"
    if ".experts." in name and config["model_type"] == "lfm2_moe":
        return name.removeprefix("model.")
    if ".experts." in name:
        return re.sub(r"^\w+(\.layers\.\d+\.)(mixer|feed_forward)\.", r"model\1mlp.", name)
    if config["model_type"] == "granitemoehybrid" and not config["num_local_experts"] and "shared_mlp" in name:
        return name.replace("shared_mlp.output_linear", "mlp.down_proj").replace("shared_mlp", "dense_mlp")
    return name


def changed(name: str, values: Array, config: Json) -> Array:
    """Returns a tensor's values as they are stored in GGUF."""
    kind = config["model_type"]
    if kind in ("qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text") and ".linear_attn." in name:
        values = alternating(name, values, config)
    if kind == "falcon_h1":
        values = values * factor(name, values, config)
    if name.endswith(".A_log"):
        values = stored_decay(values)
    if name.endswith((".A_log", ".D")) and kind in ("falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h"):
        return values[:, None]
    if name.endswith((".conv1d.weight", ".conv.conv.weight")):
        return values.squeeze(1)
    if name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
        return values.reshape(config.get("n_groups", config.get("mamba_n_groups")), -1)
    return values


def stored_decay(values: Array) -> Array:
    """Returns the rates of a decay from their logarithms."""
    return -np.exp(values)


def factor(name: str, values: Array, config: Json) -> Array:
    """Returns Falcon-H1's factor of a tensor, or of each of its rows."""
    named = {
        "down_proj.weight": config["mlp_multipliers"][1],
        "gate_proj.weight": config["mlp_multipliers"][0],
        "k_proj.weight": config["key_multiplier"] * config["attention_in_multiplier"],
        "q_proj.weight": config["attention_in_multiplier"],
        "v_proj.weight": config["attention_in_multiplier"],
        "o_proj.weight": config["attention_out_multiplier"],
        "out_proj.weight": config["ssm_out_multiplier"],
        "lm_head.weight": config["lm_head_multiplier"],
        "embed_tokens.weight": config["embedding_multiplier"],
    }
    if name.endswith("in_proj.weight"):
        inner, keys = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        rows = (inner, inner, keys, keys, len(values) - 2 * inner - 2 * keys)
        return (config["ssm_in_multiplier"] * np.repeat(config["ssm_multipliers"], rows)[:, None]).astype(np.float32)
    found = next((value for end, value in named.items() if re.search(rf"(^|[._]){end}$", name)), 1.0)
    return np.array(found, np.float32)


def by_role(name: str, values: Array, config: Json) -> Named:
    """Separates queries, keys and values, and gates, of Qwen3-Next's rows, which alternate by key head."""
    heads, width = config["linear_num_key_heads"], config["linear_key_head_dim"]
    inner = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
    groups = values.reshape(heads, 2 * width + 2 * inner, -1)
    *parts, gates = np.split(groups, np.cumsum((width, width, inner)), axis=1)
    layer = re.findall(r"\d+", name)[0]
    rows = [part.reshape(-1, values.shape[1]) for part in parts]
    yield f"blk.{layer}.attn_qkv.weight", np.concatenate(rows)
    yield f"blk.{layer}.attn_gate.weight", gates.reshape(-1, values.shape[1])


def alternating(name: str, values: Array, config: Json) -> Array:
    """Reorders value heads so that head h belongs to key head `h % key_heads`."""
    key_heads, width = config["linear_num_key_heads"], config["linear_value_head_dim"]
    keys = 2 * key_heads * config["linear_key_head_dim"]

    def reorder(rows: Array, of_head: int) -> Array:
        heads = rows.reshape(key_heads, -1, of_head, *rows.shape[1:])
        return heads.swapaxes(0, 1).reshape(rows.shape)

    if re.search(r"(in_proj_qkv|conv1d)\.", name):
        return np.concatenate([values[:keys], reorder(values[keys:], width)])
    if "in_proj_z" in name:
        return reorder(values, width)
    if "out_proj" in name:
        return reorder(values.T, width).T
    if re.search(r"in_proj_[ab]|A_log|dt_bias", name):
        return reorder(values, 1)
    return values
