"""Sizes of a GGUF file's weights, keys and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf

from adapters.interface import Loaded


def loaded(file: Path, version: str, kv_bits: float) -> Loaded:
    """Returns the sizes of a model that keeps the file's formats, with `kv_bits` bits for an element of the cache."""
    reader = gguf.GGUFReader(file)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    sizes = {name: int(tensor.n_bytes) for name, tensor in tensors.items()}
    keys_and_values = [tensor for name, tensor in tensors.items() if name.endswith(("attn_k.weight", "attn_v.weight"))]
    elements = sum(int(tensor.shape[1]) for tensor in keys_and_values)
    total = sum(sizes.values())
    return Loaded(
        version=version,
        total_bytes=total,
        token_bytes=total - unread_bytes(sizes, reader.fields),
        kv_bytes_per_token=round(elements * kv_bits / 8),
    )


def unread_bytes(sizes: dict[str, int], metadata: Any) -> int:
    """Bytes of the weights that a token does not read, by tensor: other experts, and all but a row of lookup tables."""
    architecture = metadata["general.architecture"].contents()

    def count(name: str) -> int:
        field = metadata.get(f"{architecture}.{name}")
        return int(field.contents()) if field is not None else 0

    experts = count("expert_count") or 1
    of_experts = sum(size for name, size in sizes.items() if "_exps." in name)
    untied = sizes["token_embd.weight"] if "output.weight" in sizes else 0
    unused = experts - (count("expert_used_count") or 1)
    return of_experts // experts * unused + untied + sizes.get("per_layer_token_embd.weight", 0)
