"""Write a bf16 checkpoint of random numbers, to measure speed at sizes that are too large for git.

Weights are not repeated, as in a trained model, and a row of K weights has the variance 1 / K, so that hidden states
stay of order one. The tokenizer has a token for each byte, and fills the vocabulary with tokens that do not occur in
text. It is for programs that require a tokenizer; benchmarks should use token ids.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

SHAPES = Path(__file__).resolve().parents[1] / "python" / "ferrule" / "_loading" / "shapes"
CHUNK = 1 << 24
"""Number of weights to draw at a time."""


Named = Iterator[tuple[str, tuple[int, ...]]]


def tensors(config: dict[str, Any]) -> Named:
    """Returns name and shape of every tensor: [outputs, inputs] for matrices, [width] for norms."""
    return TENSORS[config["model_type"]](config)


def decoder_tensors(config: dict[str, Any]) -> Named:
    """Returns the tensors of decoders with attention in all layers, or with delta nets in those that have none."""
    hidden, ffn, kind = config["hidden_size"], config["intermediate_size"], config["model_type"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        if (layer + 1) % config.get("full_attention_interval", 1):
            yield from delta_net_tensors(config, f"{prefix}.linear_attn")
        else:
            norms = () if kind == "llama" else ("q_norm", "k_norm")
            yield from attention_tensors(config, f"{prefix}.self_attn", "o_proj", norms)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        networks, inner = [f"{prefix}.mlp"], ffn
        if kind == "qwen3_moe":
            yield f"{prefix}.mlp.gate.weight", (config["num_experts"], hidden)
            networks = [f"{prefix}.mlp.experts.{expert}" for expert in range(config["num_experts"])]
            inner = config["moe_intermediate_size"]
        for network in networks:
            yield f"{network}.gate_proj.weight", (inner, hidden)
            yield f"{network}.up_proj.weight", (inner, hidden)
            yield f"{network}.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def attention_tensors(config: dict[str, Any], prefix: str, output: str, norms: tuple[str, ...]) -> Named:
    """Returns the tensors of attention; a gate for its output is stored with the queries."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    width = config.get("head_dim", hidden // heads)
    queries, keys = heads * width, config["num_key_value_heads"] * width
    yield f"{prefix}.q_proj.weight", (queries * (2 if config.get("attn_output_gate") else 1), hidden)
    yield f"{prefix}.k_proj.weight", (keys, hidden)
    yield f"{prefix}.v_proj.weight", (keys, hidden)
    yield from ((f"{prefix}.{norm}.weight", (width,)) for norm in norms)
    yield f"{prefix}.{output}.weight", (hidden, queries)


def delta_net_tensors(config: dict[str, Any], prefix: str) -> Named:
    """Returns the tensors of a gated delta net."""
    hidden, heads, width = config["hidden_size"], config["linear_num_value_heads"], config["linear_value_head_dim"]
    values = heads * width
    mixed = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + values
    yield f"{prefix}.A_log", (heads,)
    yield f"{prefix}.dt_bias", (heads,)
    yield f"{prefix}.conv1d.weight", (mixed, 1, config["linear_conv_kernel_dim"])
    for name, rows in {"in_proj_qkv": mixed, "in_proj_z": values, "in_proj_a": heads, "in_proj_b": heads}.items():
        yield f"{prefix}.{name}.weight", (rows, hidden)
    yield f"{prefix}.norm.weight", (width,)
    yield f"{prefix}.out_proj.weight", (hidden, values)


def lfm2_tensors(config: dict[str, Any]) -> Named:
    """Returns the tensors of LFM2, which mixes attention with short convolutions."""
    hidden, multiple = config["hidden_size"], config["block_multiple_of"]
    ffn = int(config["block_ffn_dim_multiplier"] * int(2 * config["block_ff_dim"] / 3))
    ffn = -(-ffn // multiple) * multiple
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.operator_norm.weight", (hidden,)
        if layer in config["full_attn_idxs"]:
            yield from attention_tensors(config, f"{prefix}.self_attn", "out_proj", ("q_layernorm", "k_layernorm"))
        else:
            yield f"{prefix}.conv.in_proj.weight", (3 * hidden, hidden)
            yield f"{prefix}.conv.conv.weight", (hidden, 1, config["conv_L_cache"])
            yield f"{prefix}.conv.out_proj.weight", (hidden, hidden)
        yield f"{prefix}.ffn_norm.weight", (hidden,)
        yield f"{prefix}.feed_forward.w1.weight", (ffn, hidden)
        yield f"{prefix}.feed_forward.w3.weight", (ffn, hidden)
        yield f"{prefix}.feed_forward.w2.weight", (hidden, ffn)
    yield "model.embedding_norm.weight", (hidden,)


def granite_tensors(config: dict[str, Any]) -> Named:
    """Returns the tensors of Granite 4, which mixes attention with Mamba 2, and experts in every layer."""
    hidden, experts, ffn = config["hidden_size"], config["num_local_experts"], config["intermediate_size"]
    shared, heads, width = config["shared_intermediate_size"], config["mamba_n_heads"], config["mamba_d_head"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer, kind in enumerate(config["layer_types"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        if kind == "attention":
            yield from attention_tensors(config, f"{prefix}.self_attn", "o_proj", ())
        else:
            keys = config["mamba_n_groups"] * config["mamba_d_state"]
            yield from mamba2_tensors(f"{prefix}.mamba", hidden, heads, width, keys=keys, taps=config["mamba_d_conv"])
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.block_sparse_moe.router.layer.weight", (experts, hidden)
        yield f"{prefix}.block_sparse_moe.input_linear.weight", (experts, 2 * ffn, hidden)
        yield f"{prefix}.block_sparse_moe.output_linear.weight", (experts, hidden, ffn)
        yield f"{prefix}.shared_mlp.input_linear.weight", (2 * shared, hidden)
        yield f"{prefix}.shared_mlp.output_linear.weight", (hidden, shared)
    yield "model.norm.weight", (hidden,)


def mamba2_tensors(prefix: str, hidden: int, heads: int, width: int, *, keys: int, taps: int) -> Named:
    """Returns the tensors of Mamba 2; `keys` is the width of the keys of all groups."""
    inner, mixed = heads * width, heads * width + 2 * keys
    yield from ((f"{prefix}.{name}", (heads,)) for name in ("A_log", "D", "dt_bias"))
    yield f"{prefix}.conv1d.weight", (mixed, 1, taps)
    yield f"{prefix}.conv1d.bias", (mixed,)
    yield f"{prefix}.in_proj.weight", (inner + mixed + heads, hidden)
    yield f"{prefix}.norm.weight", (inner,)
    yield f"{prefix}.out_proj.weight", (hidden, inner)


def nemotron_tensors(config: dict[str, Any]) -> Named:
    """Returns the tensors of Nemotron-H, whose layers are Mamba 2 (M), attention (*), experts (E) or a network (-)."""
    hidden, experts, shared = config["hidden_size"], config["n_routed_experts"], config["n_shared_experts"]
    heads, width, keys = (
        config["mamba_num_heads"],
        config["mamba_head_dim"],
        config["n_groups"] * config["ssm_state_size"],
    )
    yield "backbone.embeddings.weight", (config["vocab_size"], hidden)
    for layer, kind in enumerate(config["hybrid_override_pattern"]):
        prefix = f"backbone.layers.{layer}.mixer"
        yield f"backbone.layers.{layer}.norm.weight", (hidden,)
        networks = {"E": {f"{prefix}.experts.{expert}": config["moe_intermediate_size"] for expert in range(experts)}}
        networks["E"][f"{prefix}.shared_experts"] = shared * config["moe_shared_expert_intermediate_size"]
        networks["-"] = {prefix: config["intermediate_size"]}
        if kind == "M":
            yield from mamba2_tensors(prefix, hidden, heads, width, keys=keys, taps=config["conv_kernel"])
        elif kind == "*":
            yield from attention_tensors(config, prefix, "o_proj", ())
        elif kind == "E":
            yield f"{prefix}.gate.weight", (experts, hidden)
            yield f"{prefix}.gate.e_score_correction_bias", (experts,)
        for network, ffn in networks.get(kind, {}).items():
            yield f"{network}.up_proj.weight", (ffn, hidden)
            yield f"{network}.down_proj.weight", (hidden, ffn)
    yield "backbone.norm_f.weight", (hidden,)
    yield "lm_head.weight", (config["vocab_size"], hidden)


def gemma4_tensors(config: dict[str, Any]) -> Named:
    """Returns the tensors of Gemma 4 with per-layer embeddings; its last layers read the keys and values of others."""
    hidden, ffn, narrow = config["hidden_size"], config["intermediate_size"], config["hidden_size_per_layer_input"]
    layers = config["num_hidden_layers"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    yield "model.embed_tokens_per_layer.weight", (config["vocab_size_per_layer_input"], layers * narrow)
    yield "model.per_layer_model_projection.weight", (layers * narrow, hidden)
    yield "model.per_layer_projection_norm.weight", (narrow,)
    for layer, kind in enumerate(config["layer_types"]):
        prefix = f"model.layers.{layer}"
        width = config["global_head_dim" if kind == "full_attention" else "head_dim"]
        attention = attention_tensors(
            {**config, "head_dim": width}, f"{prefix}.self_attn", "o_proj", ("q_norm", "k_norm")
        )
        has_keys = layer < layers - config["num_kv_shared_layers"]
        yield from (each for each in attention if has_keys or not re.search(r"\.[kv]_(proj|norm)\.", each[0]))
        norms = (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        )
        yield from ((f"{prefix}.{norm}.weight", (hidden,)) for norm in (*norms, "post_per_layer_input_norm"))
        yield f"{prefix}.mlp.gate_proj.weight", (ffn, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (ffn, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, ffn)
        yield f"{prefix}.per_layer_input_gate.weight", (narrow, hidden)
        yield f"{prefix}.per_layer_projection.weight", (hidden, narrow)
        yield f"{prefix}.layer_scalar", (1,)
    yield "model.norm.weight", (hidden,)


TENSORS: dict[str, Callable[[dict[str, Any]], Named]] = {
    "gemma4_text": gemma4_tensors,
    "granitemoehybrid": granite_tensors,
    "lfm2": lfm2_tensors,
    "llama": decoder_tensors,
    "nemotron_h": nemotron_tensors,
    "qwen3": decoder_tensors,
    "qwen3_5_text": decoder_tensors,
    "qwen3_moe": decoder_tensors,
}
"""Tensors by `model_type`."""


def to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Converts f32 values to bf16 by truncation, which rounds towards zero."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def weights(shape: tuple[int, ...], rng: np.random.Generator) -> Iterator[bytes]:
    """Yields the bytes of a tensor in chunks: ones for a norm, normally distributed numbers for a matrix."""
    if len(shape) == 1:
        yield to_bf16(np.ones(shape, dtype=np.float32)).tobytes()
        return
    left = math.prod(shape)
    scale = np.float32(shape[-1] ** -0.5)
    while left > 0:
        count = min(left, CHUNK)
        yield to_bf16(rng.standard_normal(count, dtype=np.float32) * scale).tobytes()
        left -= count


def write_safetensors(config: dict[str, Any], file: Path) -> None:
    """Write the tensors as they are drawn, so that a model larger than memory fits."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors(config):
        start, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(1)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for _, shape in tensors(config):
            for chunk in weights(shape, rng):
                out.write(chunk)


def byte_characters() -> list[str]:
    """Returns the character of each byte in byte-level BPE (GPT-2's table)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = (byte for byte in range(256) if byte not in printable)
    stands_for = {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [stands_for.get(byte, chr(byte)) for byte in range(256)]


def write_tokenizer(config: dict[str, Any], directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    special = ["<s>", "</s>"]
    characters = byte_characters()
    filler = config["vocab_size"] - len(special) - len(characters)
    vocabulary = [*special, *characters, *(f"<unused {number}>" for number in range(filler))]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": token, **flags} for index, token in enumerate(special)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {token: index for index, token in enumerate(vocabulary)}, "merges": []},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": special[0], "eos_token": special[1]}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def write(config: dict[str, Any], directory: Path) -> None:
    """Write config, weights and tokenizer into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {**config, "dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1}
    write_safetensors(config, directory / "model.safetensors")
    write_tokenizer(config, directory)
    (directory / "config.json").write_text(json.dumps(config, indent=1))


def main() -> None:
    """Read the command line and write."""
    names = ", ".join(sorted(folder.parent.name for folder in SHAPES.glob("*/config.json")))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", help=f"{names}, or a config.json of {', '.join(TENSORS)}")
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    named = SHAPES / arguments.shape / "config.json"
    source = named if named.exists() else Path(arguments.shape)
    if not source.is_file():
        parser.error(f"shape is {arguments.shape!r}; it must be one of {names}, or a file")
    config = json.loads(source.read_text())
    if config["model_type"] not in TENSORS:
        parser.error(f"{source}: model_type is {config['model_type']!r}; it must be one of {', '.join(TENSORS)}")
    write(config, arguments.directory)


if __name__ == "__main__":
    main()
