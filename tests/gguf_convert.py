"""Converts Hugging Face checkpoints to GGUF with the changes that llama.cpp's converters make.

Names come from the `gguf` package's own tables; what is done to rows and weights follows llama.cpp's `conversion/`, one
function here for each habit.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from gguf_families import FAMILIES
from gguf_mixers import MIXED, attending, mixer_metadata, mixer_tensors
from gguf_named import NAMED, named_metadata, named_tensors
from gguf_varied import VARIED, varied_metadata, varied_tensors

Array = npt.NDArray[np.float32]
Json = Mapping[str, Any]
Named = Iterator[tuple[str, Array]]

DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"), "I64": np.dtype("<i8")}
ALWAYS_F32 = re.compile(r"(conv|conv1d|conv1d_[qkv]|ffn_gate_inp|ffn_gate_inp_shexp|ssm_norm)\.weight$|ssm_[ad]$")
"""Routers, kernels of convolutions, norms by group, and parameters of states, which llama.cpp reads as F32 only."""
MAX_INT32 = (1 << 31) - 1
LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
SIZES = {
    "context_length": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length"),
    "embedding_length": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "block_count": LAYERS,
    "feed_forward_length": ("intermediate_size", "n_inner", "ffn_hidden_size"),
    "attention.head_count": ("num_attention_heads", "n_head", "n_heads"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "expert_count": ("num_local_experts", "num_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok", "num_experts_per_token"),
}


class Checkpoint:
    """A checkpoint during its conversion to GGUF."""

    def __init__(self, directory: Path) -> None:
        config: Json = json.loads((directory / "config.json").read_text())
        self.config: Json = {**config, **config.get("text_config", {})}
        self.directory = directory
        self.family = FAMILIES[self.config["model_type"]]
        if self.config.get("use_bidirectional_attention"):
            self.family = replace(self.family, arch=MODEL_ARCH.GEMMA_EMBEDDING)
        if self.config["model_type"] == "granitemoehybrid" and len(attending(self.config)) == self.first(*LAYERS):
            self.family = replace(self.family, arch=MODEL_ARCH.GRANITE)
        self.heads = self.first("num_attention_heads", "n_head", "n_heads") or 0
        self.hidden = self.first("hidden_size", "n_embd", "n_embed", "d_model")
        self.layers = self.first(*LAYERS)
        self.width = self.config.get("head_dim") or self.hidden // max(self.heads, 1)
        self.kv_heads = self.first("num_key_value_heads", "num_kv_heads") or self.heads
        if self.config["model_type"] == "falcon" and not self.config["new_decoder_architecture"]:
            self.kv_heads = 1 if self.config["multi_query"] else self.heads
        if self.config["model_type"] == "gpt_bigcode":
            self.kv_heads = 1 if self.config["multi_query"] else self.heads
        if self.config["model_type"] in ("gpt_neox", "bloom", "mpt", "gpt2"):
            self.kv_heads = self.heads
        self.rope = self._rope()

    def _rope(self) -> Json:
        """RoPE parameters of layers without a window, in the format of transformers 5; empty if there are none."""
        if rope := self.config.get("rope_parameters"):
            return rope.get("full_attention", rope.get("main", rope))
        if self.config.get("rope_theta", self.config.get("rotary_emb_base")) is None:
            return {}
        rope = dict(self.config.get("rope_scaling") or {})
        part = self.first("partial_rotary_factor", "rotary_pct")
        return {
            **rope,
            "rope_type": rope.get("rope_type", rope.get("type")),
            "rope_theta": self.first("rope_theta", "rotary_emb_base"),
            "partial_rotary_factor": 1.0 if part is None else part,
        }

    def first(self, *fields: str) -> Any:
        """Returns the value of the first of these fields that is present."""
        return next((self.config[name] for name in fields if self.config.get(name) is not None), None)


def convert(
    directory: Path, file: Path, storage: str = "F32", *, split_latent: bool = True, tokenizer: bool = True
) -> Path:
    """Writes a checkpoint as GGUF with matrices of type `storage`, and the tokenizer if the directory has one.

    With `tokenizer=False`, it is left out: the file is for programs that give token ids.
    """
    checkpoint = Checkpoint(directory)
    arch = checkpoint.family.arch
    writer = GGUFWriter(file, checkpoint.family.name or gguf.MODEL_ARCH_NAMES[arch])
    for key, value in metadata(checkpoint, split_latent=split_latent):
        add(writer, key, value)
    if tokenizer and (directory / "tokenizer.json").exists():
        add_tokenizer(writer, directory)
    else:
        writer.add_tokenizer_model("none")
        writer.add_vocab_size(checkpoint.config["vocab_size"])
    names = gguf.get_tensor_name_map(arch, checkpoint.layers)
    stored = stored_tensors(directory / "model.safetensors")
    if checkpoint.config["model_type"] in MIXED:
        stored = mixer_tensors(checkpoint.config, stored)
    if checkpoint.config["model_type"] in VARIED:
        stored = varied_tensors(checkpoint.config, stored)
    if checkpoint.config["model_type"] in NAMED:
        stored = named_tensors(checkpoint.config, stored)
    for name, values in tensors(checkpoint, stored, split_latent=split_latent):
        target = name if name.startswith(("blk.", "output", "per_layer")) else gguf_name(names, name)
        add_tensor(writer, target, values, storage)
    for name, factors in factor_tensors(checkpoint):
        add_tensor(writer, name, factors, "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def gguf_name(names: gguf.TensorNameMap, name: str) -> str:
    """Returns the `gguf` package's name of a tensor; some converters shorten the name that they look up."""
    if name == "lm_head.weight":  # for which it has none in families whose published models are all tied
        return "output.weight"
    endings = (".weight", ".bias")
    candidates = (
        name,
        name.removeprefix("transformer."),
        name.replace("e_score_correction_bias", "e_score_correction.bias"),
    )
    found = next((found for each in candidates if (found := names.get_name(each, endings))), None)
    if found is None:
        raise KeyError(f"the gguf package has no name for {name!r}")
    return found


def add(writer: GGUFWriter, key: str, value: object) -> None:
    """Adds a key whose value is a number, a flag, a string or a list."""
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case [int(), *_] if max(value) > MAX_INT32:
            writer.add_key_value(key, value, gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT64)
        case list():
            writer.add_array(key, value)
        case _:
            raise TypeError(f"{key} is {value!r}")


def add_tensor(writer: GGUFWriter, name: str, values: Array, storage: str) -> None:
    """Adds a tensor: a matrix as `storage` if its rows are whole blocks, all others as F32."""
    if name.endswith("tid2eid.weight"):
        writer.add_tensor(name, values.astype(np.int32))
        return
    kind = GGMLQuantizationType["F32" if ALWAYS_F32.search(name) else storage]
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    if kind == GGMLQuantizationType.F32 or values.ndim < 2 or values.shape[-1] % block:
        writer.add_tensor(name, values.copy(order="C"))
    else:
        writer.add_tensor(name, quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)


def metadata(checkpoint: Checkpoint, *, split_latent: bool) -> Iterator[tuple[str, object]]:
    """Returns the values of config.json under GGUF's keys."""
    config, family, rope = checkpoint.config, checkpoint.family, checkpoint.rope
    kind = config["model_type"]
    prefix = (family.name or gguf.MODEL_ARCH_NAMES[family.arch]) + "."
    values: dict[str, object] = {key: checkpoint.first(*fields) for key, fields in SIZES.items()}
    for name, key in family.keys.items():
        if (value := config.get(name)) is not None:
            values[key] = float(value) if key.endswith("scale") else value
    values["attention.head_count_kv"] = checkpoint.kv_heads
    values["feed_forward_length"] = values["feed_forward_length"] or 4 * checkpoint.hidden
    values["context_length"] = values["context_length"] or 2048
    if kind == "bert":
        values |= {"attention.causal": False, "pooling_type": 1}
    if kind == "youtu":
        values |= {"expert_shared_count": 0, "leading_dense_block_count": checkpoint.layers}
    if kind == "ernie4_5_moe":
        shared = config["moe_num_shared_experts"] * config["moe_intermediate_size"]
        values["expert_shared_feed_forward_length"] = shared
    if kind == "olmo":
        values["attention.layer_norm_epsilon"] = 1e-5
    if kind == "mpt":
        values["attention.max_alibi_bias"] = float(config["attn_config"]["alibi_bias_max"])
        values["attention.clamp_kqv"] = config["attn_config"]["clip_qkv"]
    if kind == "phi3":
        values["attention.sliding_window"] = config["sliding_window"] or 0
    if "layer_types" in config and "attention.sliding_window" in values:
        values["attention.sliding_window_pattern"] = [each == "sliding_attention" for each in config["layer_types"]]
    elif "sliding_window_pattern" in config:
        values["attention.sliding_window_pattern"] = config["sliding_window_pattern"]
    if kind in ("bailing_moe_v2", "deepseek_v3", "glm4_moe", "glm_moe_dsa", "dots1", "minimax_m2", "exaone_moe"):
        values["expert_gating_func"] = 2
    if "indexer_types" in config:
        values["attention.indexer.types"] = [each == "full" for each in config["indexer_types"]]
    if kind in MIXED:
        values |= mixer_metadata(config, checkpoint.kv_heads)
    if rope:
        values |= rotation(checkpoint)
    if "kv_lora_rank" in config:
        rope_dim, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
        whole = config["qk_nope_head_dim"] + rope_dim
        values |= {"rope.dimension_count": rope_dim, "attention.key_length": whole}
        values["attention.value_length"] = config.get("v_head_dim") or checkpoint.width
        if split_latent and kind != "minicpm3":
            values |= {
                "attention.key_length_mla": whole,
                "attention.value_length_mla": values["attention.value_length"],
            }
            values |= {"attention.key_length": rank + rope_dim, "attention.value_length": rank}
            values["attention.head_count_kv"] = 1
    if kind in VARIED:
        values |= varied_metadata(config)
    if kind in NAMED:
        values |= named_metadata(config, checkpoint.directory)
    if kind == "apertus":
        values |= xielu(checkpoint)
    for key, value in values.items():
        if value is not None:
            yield key if key.startswith("xielu.") else prefix + key, value
    if rope.get("rope_type") == "longrope":
        original, longest = original_length(checkpoint), config["max_position_embeddings"]
        yield f"{prefix}rope.scaling.attn_factor", math.sqrt(1 + math.log(longest / original) / math.log(original))


def xielu(checkpoint: Checkpoint) -> dict[str, object]:
    """Returns the parameters of Apertus's xIELU in each layer."""
    found: dict[str, list[tuple[int, float]]] = {}
    for name, values in stored_tensors(checkpoint.directory / "model.safetensors"):
        if ".act_fn." in name:
            _, _, layer, *_, parameter = name.split(".")
            found.setdefault(parameter, []).append((int(layer), float(values.reshape(())[()])))
    return {f"xielu.{parameter}": [value for _, value in sorted(values)] for parameter, values in found.items()}


def rotation(checkpoint: Checkpoint) -> dict[str, object]:
    """Returns the GGUF keys of RoPE and its scaling."""
    config, rope = checkpoint.config, checkpoint.rope
    rotary_dim = int(checkpoint.width * rope.get("partial_rotary_factor", 1.0))
    if config["model_type"] == "minimax_m2":
        rotary_dim = config["rotary_dim"]
    base = float(rope["rope_theta"])
    if "alpha" in rope:  # Hunyuan's scaling is expressed as a different base
        base *= rope["alpha"] ** (checkpoint.width / (checkpoint.width - 2))
    keys: dict[str, object] = {"rope.freq_base": base, "rope.dimension_count": rotary_dim}
    sliding = (config.get("rope_parameters") or {}).get("sliding_attention", {})
    if local := sliding.get("rope_theta", config.get("rope_local_base_freq")):
        keys["rope.freq_base_swa"] = float(local)
    if "mrope_section" in rope:
        keys["rope.dimension_sections"] = [*rope["mrope_section"], 0]
    kind = rope.get("rope_type")
    if kind in ("linear", "yarn"):
        keys |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        for field_, key in (("attention_factor", "yarn_attn_factor"), ("beta_fast", "yarn_beta_fast")):
            if field_ in rope:
                keys[f"rope.scaling.{key}"] = float(rope[field_])
        if "mscale_all_dim" in rope:
            keys["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    if kind == "longrope":
        keys["rope.scaling.original_context_length"] = original_length(checkpoint)
    return keys


def original_length(checkpoint: Checkpoint) -> int:
    """Returns the context length before RoPE scaling, in tokens."""
    return checkpoint.first("original_max_position_embeddings") or checkpoint.rope["original_max_position_embeddings"]


def factor_tensors(checkpoint: Checkpoint) -> Named:
    """Returns RoPE scaling as tensors of divisors of the rotary frequencies."""
    rope = checkpoint.rope
    if rope.get("rope_type") == "longrope":
        for name in ("long", "short"):
            yield f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32)
    if rope.get("rope_type") == "proportional":
        pairs = checkpoint.config["global_head_dim"] // 2
        rotated = int(2 * pairs * rope["partial_rotary_factor"] / 2)
        yield "rope_freqs.weight", np.array([1.0] * rotated + [1e30] * (pairs - rotated), np.float32)
    if rope.get("rope_type") == "llama3":
        frequencies = rope["rope_theta"] ** -(np.arange(0, checkpoint.width, 2) / checkpoint.width)
        old, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = np.clip((old * frequencies / (2 * math.pi) - low) / (high - low), 0, 1)
        yield "rope_freqs.weight", (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


def tensors(checkpoint: Checkpoint, stored: Named, *, split_latent: bool) -> Named:
    """Returns the converted tensors under their original names; expert tensors are stacked under one name."""
    config, family = checkpoint.config, checkpoint.family
    experts: dict[str, list[tuple[int, Array]]] = {}
    norms: dict[str, list[tuple[int, Array]]] = {}
    tied = config.get("tie_word_embeddings", family.arch in (MODEL_ARCH.GEMMA, MODEL_ARCH.GPT2))
    tied = tied and config["model_type"] not in ("bailing_hybrid", "kimi_linear")  # which store an lm_head
    left_out = ("masked_bias", "attention.bias", "inv_freq", "position_ids", *(["lm_head.weight"] if tied else []))
    for name, unchanged in stored:
        if name.endswith(left_out) or "pooler." in name or name.startswith(f"model.layers.{checkpoint.layers}."):
            continue  # the latter predict further tokens
        values = changed(name, unchanged, checkpoint)
        if found := re.match(r"(.*\.experts)\.(\d+)\.(.*)", name):
            experts.setdefault(f"{found[1]}.{found[3]}", []).append((int(found[2]), values))
        elif found := re.match(r"(.*_layernorm)\.norms\.(\d+)(\.weight)", name):
            norms.setdefault(found[1] + found[3], []).append((int(found[2]), values))
        elif split_latent and name.endswith("kv_b_proj.weight") and config["model_type"] != "minicpm3":
            yield from split(name, values, checkpoint)
        elif "gate_up_proj" in name and ".experts." in name:
            yield from gates_and_ups(name, values)
        elif re.search(r"experts\.down_proj(_bias)?$", name):
            yield name.replace("_bias", ".bias") if "bias" in name else f"{name}.weight", transposed(name, values)
        elif name.endswith("input_linear.weight"):
            gate, up = np.split(values, 2, axis=-2)
            layer = re.findall(r"\d+", name)[0]
            last = "_exps" if "block_sparse_moe" in name else "" if "dense_mlp" in name else "_shexp"
            yield from ((f"blk.{layer}.ffn_{role}{last}.weight", part) for role, part in (("gate", gate), ("up", up)))
        elif name.endswith("sinks"):
            yield f"{name}.weight", values
        else:
            yield name, values
    for name, parts in (experts | norms).items():
        stack = np.stack([values for _, values in sorted(parts, key=lambda part: part[0])])
        mixtral = checkpoint.config["model_type"] == "mixtral"
        yield (
            name.replace("model.layers", "layers").replace("block_sparse_moe", "feed_forward") if mixtral else name,
            stack,
        )


def changed(name: str, values: Array, checkpoint: Checkpoint) -> Array:
    """Returns a tensor's values as they are stored in GGUF."""
    config, family = checkpoint.config, checkpoint.family
    if family.ones and name.endswith("norm.weight") and "linear_attn" not in name:
        return values + 1
    if family.transposed and re.search(r"c_(attn|proj|fc)\.weight$", name):
        return values.T
    if family.rotated_in_pairs and (found := re.search(r"\.([qk])_proj\.(weight|bias)$", name)):
        return in_pairs(values, checkpoint.heads if found[1] == "q" else checkpoint.kv_heads)
    if family.groups and "query_key_value" in name:
        return ungrouped(values, checkpoint)
    # GGUF has no keys for the following factors: llama.cpp hard-codes those of the published models.
    if config["model_type"] == "gemma2" and "q_proj" in name:
        return values * np.float32((checkpoint.width / config["query_pre_attn_scalar"]) ** 0.5)
    if config["model_type"] == "minicpm3" and name == "model.norm.weight":
        return values * np.float32(config["dim_model_base"] / 256)
    return values


def in_pairs(values: Array, heads: int) -> Array:
    """Permutes rows from rotary pairs in the two halves of a head to adjacent rotary pairs."""
    halves = values.reshape(heads, 2, len(values) // heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(values.shape)


def ungrouped(values: Array, checkpoint: Checkpoint) -> Array:
    """Reorders rows grouped as queries, keys and values per group into all queries, all keys, all values."""
    queries = checkpoint.heads // checkpoint.kv_heads
    groups = values.reshape(checkpoint.kv_heads, queries + 2, checkpoint.width, -1)
    parts = (groups[:, :queries], groups[:, queries : queries + 1], groups[:, queries + 1 :])
    return np.concatenate([part.reshape(-1, groups.shape[-1]) for part in parts]).reshape(values.shape)


def split(name: str, values: Array, checkpoint: Checkpoint) -> Named:
    """Splits the latent up-projection into each head's key matrix, transposed, and value matrix."""
    nope = checkpoint.config["qk_nope_head_dim"]
    heads = values.reshape(checkpoint.heads, -1, values.shape[-1])
    layer = re.findall(r"\d+", name)[0]
    yield f"blk.{layer}.attn_k_b.weight", heads[:, :nope].swapaxes(1, 2)
    yield f"blk.{layer}.attn_v_b.weight", heads[:, nope:]


def gates_and_ups(name: str, values: Array) -> Named:
    """Separates gpt-oss's gate and up rows, which alternate."""
    values = transposed(name, values)
    for index, role in enumerate(("gate_proj", "up_proj")):
        base, bias = name.removesuffix("_bias").replace("gate_up_proj", role), name.endswith("_bias")
        yield f"{base}.{'bias' if bias else 'weight'}", values[:, index::2]


def transposed(name: str, values: Array) -> Array:
    """Transposes experts that are stored as [inputs, outputs]."""
    return values if name.endswith("_bias") else values.swapaxes(-1, -2)


def stored_tensors(file: Path) -> Named:
    """Returns the tensors of a safetensors file in float32."""
    data = np.memmap(file, np.uint8, "r")
    (length,) = struct.unpack("<Q", data[:8].tobytes())
    for name, entry in json.loads(data[8 : 8 + length].tobytes()).items():
        if name == "__metadata__" or entry["dtype"] not in DTYPES:
            continue
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        raw = np.frombuffer(data[start:end].tobytes(), DTYPES[entry["dtype"]]).reshape(entry["shape"])
        wide = (raw.astype(np.uint32) << 16).view(np.float32) if entry["dtype"] == "BF16" else raw.astype(np.float32)
        yield name, wide


def add_tokenizer(writer: GGUFWriter, directory: Path) -> None:
    """Adds the byte-level BPE of tokenizer.json, with the special tokens and chat template of the files beside it."""
    described: Json = json.loads((directory / "tokenizer.json").read_text())
    config: Json = json.loads((directory / "tokenizer_config.json").read_text())
    added = {token["id"]: token for token in described["added_tokens"]}
    texts = {index: token for token, index in described["model"]["vocab"].items()}
    texts |= {index: token["content"] for index, token in added.items()}
    types = gguf.TokenType
    kinds = [
        types.NORMAL if index not in added else types.CONTROL if added[index]["special"] else types.USER_DEFINED
        for index in sorted(texts)
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([texts[index] for index in sorted(texts)])
    writer.add_token_types(kinds)
    merges = described["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    ids = {token: index for index, token in texts.items()}
    for role, method in (("bos_token", writer.add_bos_token_id), ("eos_token", writer.add_eos_token_id)):
        if config.get(role):
            method(ids[config[role]])
    writer.add_add_bos_token(bool(config.get("add_bos_token", False)))
    template = directory / "chat_template.jinja"
    if template.exists():
        writer.add_chat_template(template.read_text())
