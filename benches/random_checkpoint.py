"""Write a bf16 checkpoint of random numbers, to measure speed at sizes that are too large for git.

Weights are not repeated, as in a trained model, and a row of K weights has the variance 1 / K, so that hidden states
stay of order one. The tokenizer has a token for each byte, and fills the vocabulary with tokens that do not occur in
text. It is for programs that require a tokenizer; benchmarks should use token ids.
"""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

SHAPES = Path(__file__).resolve().parents[1] / "python" / "ferrule" / "shapes"
MODEL_TYPES = ("llama", "qwen3", "qwen3_moe")
CHUNK = 1 << 24
"""Number of weights to draw at a time."""


def tensors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Returns name and shape of every tensor: [outputs, inputs] for matrices, [width] for norms."""
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    width = config["head_dim"]
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (keys, hidden)
        if config["model_type"] in ("qwen3", "qwen3_moe"):
            yield f"{prefix}.self_attn.q_norm.weight", (width,)
            yield f"{prefix}.self_attn.k_norm.weight", (width,)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, queries)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        networks, inner = [f"{prefix}.mlp"], ffn
        if config["model_type"] == "qwen3_moe":
            yield f"{prefix}.mlp.gate.weight", (config["num_experts"], hidden)
            networks = [f"{prefix}.mlp.experts.{expert}" for expert in range(config["num_experts"])]
            inner = config["moe_intermediate_size"]
        for network in networks:
            yield f"{network}.gate_proj.weight", (inner, hidden)
            yield f"{network}.up_proj.weight", (inner, hidden)
            yield f"{network}.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)


def to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Converts f32 values to bf16 by truncation, which rounds towards zero."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def weights(shape: tuple[int, ...], rng: np.random.Generator) -> Iterator[bytes]:
    """Yields the bytes of a tensor in chunks: ones for a norm, normally distributed numbers for a matrix."""
    if len(shape) == 1:
        yield to_bf16(np.ones(shape, dtype=np.float32)).tobytes()
        return
    left = shape[0] * shape[1]
    scale = np.float32(shape[1] ** -0.5)
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
    parser.add_argument("shape", help=f"{names}, or a config.json of {', '.join(MODEL_TYPES)}")
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    named = SHAPES / arguments.shape / "config.json"
    source = named if named.exists() else Path(arguments.shape)
    if not source.is_file():
        parser.error(f"shape is {arguments.shape!r}; it must be one of {names}, or a file")
    config = json.loads(source.read_text())
    if config["model_type"] not in MODEL_TYPES:
        parser.error(f"{source}: model_type is {config['model_type']!r}; it must be one of {', '.join(MODEL_TYPES)}")
    write(config, arguments.directory)


if __name__ == "__main__":
    main()
