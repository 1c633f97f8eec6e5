"""Write a model of llama-1b's widths whose weights have heavy tails: `python heavy_tailed_model.py DIR`.

Two layers of random weights, Student's t with three degrees of freedom, scaled to keep their inputs' variance; the
embedded model's tokenizer and vocabulary, so that both models read the same text. The scale of lm_head gives
next-token distributions about as peaked as those of a trained model.
"""

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import TensorSpec, serialize_file
from tiny_llama import Floats

import ferrule

TINY = Path(ferrule.__file__).parent / "models" / "tiny"
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 2048, 8192, 2, 32, 8
FREEDOM = 3.0
LOGIT_SCALE = 3.0
"""Standard deviation of a row of logits."""


def student(rng: np.random.Generator, outputs: int, inputs: int, scale: float = 1.0) -> Floats:
    """Return a random matrix [outputs, inputs] that maps variance-1 inputs to outputs of variance `scale` squared."""
    drawn = rng.standard_t(FREEDOM, (outputs, inputs))
    return (drawn * (scale / np.sqrt(inputs * FREEDOM / (FREEDOM - 2)))).astype(np.float32)


def weights(vocab: int) -> dict[str, Floats]:
    """Return all tensors of the model by name."""
    rng = np.random.default_rng(0)
    kv = HIDDEN // HEADS * KV_HEADS
    network = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}.items()
    tensors = {
        "model.embed_tokens.weight": rng.standard_normal((vocab, HIDDEN)).astype(np.float32),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": student(rng, vocab, HIDDEN, LOGIT_SCALE),
    }
    attention = {"q": HIDDEN, "k": kv, "v": kv, "o": HIDDEN}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for name, outputs in attention.items():
            tensors[f"{at}self_attn.{name}_proj.weight"] = student(rng, outputs, HIDDEN)
        for name, (outputs, inputs) in network:
            tensors[f"{at}mlp.{name}_proj.weight"] = student(rng, outputs, inputs)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{name}.weight"] = np.ones(HIDDEN, np.float32)
    return tensors


def narrowed(values: Floats) -> NDArray[np.uint16]:
    """Convert to the bits of bf16, a dtype that NumPy lacks, rounding half up."""
    return ((values.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)


def main() -> None:
    """Write the model's directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    directory: Path = parser.parse_args().directory
    directory.mkdir(parents=True)
    config = json.loads((TINY / "config.json").read_text())
    config |= {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, directory)
    tensors = {name: narrowed(values) for name, values in weights(config["vocab_size"]).items()}
    specs = {
        name: TensorSpec(dtype="bfloat16", shape=values.shape, data_ptr=values.ctypes.data, data_len=values.nbytes)
        for name, values in tensors.items()
    }
    serialize_file(specs, directory / "model.safetensors")


if __name__ == "__main__":
    main()
