"""Write a Llama-shaped bf16 checkpoint of random numbers, to measure speed at sizes that nobody wants in git.

The directory has no tokenizer: feed ids. Weights are drawn so that hidden states stay of order one.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import TensorSpec, serialize_file


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int


SHAPES = {
    "llama-160m": Shape(hidden=768, layers=12, heads=12, kv_heads=12, head_dim=64, ffn=3072, vocab=32_000),
    "llama-1b": Shape(hidden=2048, layers=16, heads=32, kv_heads=8, head_dim=64, ffn=8192, vocab=128_256),
}


def matrices(shape: Shape) -> Iterator[tuple[str, int, int]]:
    """Name, outputs and inputs of every matrix."""
    yield "model.embed_tokens.weight", shape.vocab, shape.hidden
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.self_attn.q_proj.weight", shape.heads * shape.head_dim, shape.hidden
        yield f"{prefix}.self_attn.k_proj.weight", shape.kv_heads * shape.head_dim, shape.hidden
        yield f"{prefix}.self_attn.v_proj.weight", shape.kv_heads * shape.head_dim, shape.hidden
        yield f"{prefix}.self_attn.o_proj.weight", shape.hidden, shape.heads * shape.head_dim
        yield f"{prefix}.mlp.gate_proj.weight", shape.ffn, shape.hidden
        yield f"{prefix}.mlp.up_proj.weight", shape.ffn, shape.hidden
        yield f"{prefix}.mlp.down_proj.weight", shape.hidden, shape.ffn


def to_bf16(values: np.ndarray) -> np.ndarray:
    """The upper halves of f32 values: bf16, rounded towards zero."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def write(shape: Shape, directory: Path) -> None:
    """Write config.json and model.safetensors into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    tensors: dict[str, np.ndarray] = {}
    for name, rows, columns in matrices(shape):
        scale = np.float32(1 / np.sqrt(columns))
        tensors[name] = to_bf16(rng.standard_normal((rows, columns), dtype=np.float32) * scale)
    kinds = ("input", "post_attention")
    norms = [f"model.layers.{layer}.{kind}_layernorm.weight" for layer in range(shape.layers) for kind in kinds]
    for name in [*norms, "model.norm.weight"]:
        tensors[name] = to_bf16(np.ones(shape.hidden, dtype=np.float32))
    specs = {
        name: TensorSpec(dtype="bfloat16", shape=values.shape, data_ptr=values.ctypes.data, data_len=values.nbytes)
        for name, values in tensors.items()
    }
    serialize_file(specs, str(directory / "model.safetensors"), None)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocab,
        "max_position_embeddings": 8192,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        "tie_word_embeddings": True,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    write(SHAPES[arguments.shape], arguments.directory)
