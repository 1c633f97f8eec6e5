"""Dequantize a GGUF file to f32, so that all formats are made of the same weights; `rotate` changes its basis.

A file that is quantized has its weights on a grid, from which a format with the same grid loses nothing more.
`rotate` multiplies the residual stream of a llama model by a random orthogonal matrix, after the weights of norms are
multiplied into the matrices that follow. The function stays equal, and the weights leave the grid. A tied lm_head
becomes a separate matrix, since the weights of the last norm are multiplied into it only.
"""

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize
from numpy.typing import NDArray

Floats = NDArray[np.float32]
READERS = {
    "attn_q": "attn_norm",
    "attn_k": "attn_norm",
    "attn_v": "attn_norm",
    "ffn_gate": "ffn_norm",
    "ffn_up": "ffn_norm",
}
"""Matrices that read the residual stream, by the norm before them."""
WRITERS = ("attn_output", "ffn_down")
"""Matrices that write to the residual stream."""
ARCHITECTURE, FILE_TYPE, F32_FILE = "general.architecture", "general.file_type", 0


def write_exact(source: Path, target: Path, *, rotates: bool) -> None:
    """Write the file with all tensors in f32, with `rotates` in a random basis."""
    reader = GGUFReader(source)
    tensors = {each.name: dequantize(each.data, each.tensor_type).reshape(each.shape[::-1]) for each in reader.tensors}
    fields = {name: each for name, each in reader.fields.items() if not name.startswith("GGUF.")}
    architecture = fields.pop(ARCHITECTURE).contents()
    if rotates:
        if architecture != "llama":
            raise ValueError(f"rotation supports the architecture 'llama', got {architecture!r}")
        tensors = rotate(tensors)
    unfinished = target.with_suffix(".unfinished")
    writer = GGUFWriter(unfinished, architecture)
    for name, each in fields.items():
        value = F32_FILE if name == FILE_TYPE else each.contents()
        inner = each.types[-1] if each.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, each.types[0], sub_type=inner)
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor, np.float32), raw_dtype=GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(target)


def rotate(tensors: dict[str, Floats], seed: int = 0) -> dict[str, Floats]:
    """Return the tensors of a llama model in a random orthogonal basis of the residual stream."""
    embedding = tensors["token_embd.weight"]
    width = embedding.shape[1]
    basis = np.linalg.qr(np.random.default_rng(seed).standard_normal((width, width)))[0]
    out: dict[str, Floats] = {}

    def read(weights: Floats, norm: str) -> Floats:
        return ((weights * tensors[norm]).astype(np.float64) @ basis).astype(np.float32)

    for name, weights in tensors.items():
        block, _, kind = name.removesuffix(".weight").rpartition(".")
        if kind.endswith("norm"):
            out[name] = np.ones_like(weights)
        elif kind in READERS:
            out[name] = read(weights, f"{block}.{READERS[kind]}.weight")
        elif kind in WRITERS:
            out[name] = (basis.T @ weights.astype(np.float64)).astype(np.float32)
        elif name == "token_embd.weight":
            out[name] = (weights.astype(np.float64) @ basis).astype(np.float32)
        elif name != "output.weight":
            raise ValueError(f"rotation does not support the tensor {name}")
    out["output.weight"] = read(tensors.get("output.weight", embedding), "output_norm.weight")
    return out
