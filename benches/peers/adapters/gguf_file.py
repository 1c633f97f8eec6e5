"""Conversion of a Llama or Qwen3 checkpoint to GGUF, and quantization by llama.cpp.

`python -m adapters.gguf_file CHECKPOINT DIRECTORY` writes a file of each type.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
import numpy.typing as npt

FILE_TYPES = {
    "BF16": llama_cpp.LLAMA_FTYPE_MOSTLY_BF16,
    "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "IQ4_NL": llama_cpp.LLAMA_FTYPE_MOSTLY_IQ4_NL,
    "IQ4_XS": llama_cpp.LLAMA_FTYPE_MOSTLY_IQ4_XS,
    "Q4_K_S": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_S,
    "Q4_K_M": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
}
ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen3": gguf.MODEL_ARCH.QWEN3}


def stored_tensors(file: Path) -> Iterator[tuple[str, npt.NDArray[np.uint16]]]:
    """Yields name and bf16 numbers, as u16, of each tensor of a safetensors file; NumPy does not support bf16."""
    data = np.memmap(file, np.uint8, "r")
    (length,) = struct.unpack("<Q", data[:8].tobytes())
    for name, entry in json.loads(data[8 : 8 + length].tobytes()).items():
        if name != "__metadata__":
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            yield name, data[start:end].view(np.uint16).reshape(entry["shape"])


def rotated_in_pairs(weight: npt.NDArray[np.uint16], heads: int) -> npt.NDArray[np.uint16]:
    """Reorders rows of q or k for llama.cpp, which rotates adjacent rows instead of halves."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_bf16(checkpoint: Path, file: Path) -> None:
    """Write an unquantized GGUF file without a tokenizer, since benchmarks use token ids."""
    config = json.loads((checkpoint / "config.json").read_text())
    kind, layers = config["model_type"], config["num_hidden_layers"]
    architecture = ARCHITECTURES[kind]
    names = gguf.get_tensor_name_map(architecture, layers)
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_file_type(FILE_TYPES["BF16"])
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(layers)
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, values in stored_tensors(checkpoint / "model.safetensors"):
        module = name.removesuffix(".weight")
        target = f"{names.get_name(module)}.weight"
        projection = module.rpartition(".")[2]
        if values.ndim == 1:
            writer.add_tensor(target, (values.astype(np.uint32) << 16).view(np.float32))
            continue
        rotated = kind == "llama" and projection in heads
        ordered = rotated_in_pairs(values, heads[projection]) if rotated else values
        writer.add_tensor(target, ordered.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantized(checkpoint: Path, work: Path, name: str, threads: int) -> Path:
    """Returns the GGUF file of a format, which is created unless it exists."""
    if name not in FILE_TYPES:
        raise ValueError(f"format is {name!r}; it must be one of {', '.join(FILE_TYPES)}")
    source = work / "BF16.gguf"
    if not source.exists():
        unfinished = source.with_suffix(".unfinished")
        write_bf16(checkpoint, unfinished)
        unfinished.rename(source)
    file = work / f"{name}.gguf"
    if not file.exists():
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = FILE_TYPES[name]
        params.nthread = threads
        unfinished = file.with_suffix(".unfinished")
        if llama_cpp.llama_model_quantize(str(source).encode(), str(unfinished).encode(), params) != 0:
            raise RuntimeError(f"llama.cpp could not quantize {source} to {name}")
        unfinished.rename(file)
    return file


def tensor_bytes(file: Path) -> dict[str, int]:
    """Returns the bytes of each tensor of a GGUF file."""
    return {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(file).tensors}


def main() -> None:
    """Write every type."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    for name in FILE_TYPES:
        print(quantized(arguments.checkpoint, arguments.directory, name, os.cpu_count() or 1))


if __name__ == "__main__":
    main()
