"""Layouts of tensors that stack all experts: how config.json is read, and what is refused."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from archs.specs import folder_of
from ferrule import LLM
from ferrule._loading import read_model_files
from ferrule.archs.spec import Tensor
from lora_files import Array, base_tensors, read_header


@pytest.mark.native
@pytest.mark.parametrize("folder", [folder_of("gpt_oss"), folder_of("granitemoe")])
def test_stacked_experts_may_be_two_dimensional(folder: Path, tmp_path: Path) -> None:
    """Stacked experts may be `[experts * rows, columns]`, transposed or not, as in DBRX."""
    joined = tmp_path / "joined"
    shutil.copytree(folder, joined)
    file = joined / "model.safetensors"
    file.chmod(0o644)
    header, raw = read_header(file), file.read_bytes()
    spec = read_model_files(folder).spec
    stacked = {name for tensor in spec.tensors.values() if tensor.stack is not None for name in tensor.names}
    for name in stacked:
        experts, rows, *columns = header[name]["shape"]
        header[name]["shape"] = [experts * rows, *columns]
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + int.from_bytes(raw[:8], "little") :])
    with LLM(folder, quantization="f32") as apart, LLM(joined, quantization="f32") as together:
        ids = list(range(7, 40))
        assert (apart.logits(ids) == together.logits(ids)).all()


STACKED = ["gemma4_moe", "granitemoe_swa", "llama4", "mistral4", "qwen3_5_moe"]
"""Cases whose files have stacked experts."""
ONE_BY_ONE = [
    *(
        "bailing_hybrid",
        "deepseek_v4",
        "exaone_moe_windows",
        "glm_moe_dsa",
        "hy_v3",
        "jamba",
        "kimi_linear",
        "lfm2_moe",
    ),
    *("mimo_v2_flash", "minimax", "minimax_m3", "mixtral_sliding", "nemotron_h", "phimoe", "qwen3_5_moe_text"),
    *("qwen3_next",),
]


@pytest.mark.native
@pytest.mark.parametrize("case", [*STACKED, *ONE_BY_ONE])
def test_experts_may_be_stacked_or_one_by_one(case: str, tmp_path: Path) -> None:
    """The results are the same."""
    folder = folder_of(case)
    tensors = base_tensors(folder)
    other = in_other_layout(folder, tensors)
    assert other.keys() != tensors.keys()
    assert any(name.endswith(".experts.down_proj") for name in other) == (case in ONE_BY_ONE)
    shutil.copyfile(folder / "config.json", tmp_path / "config.json")
    save_file(other, tmp_path / "model.safetensors")
    ids = list(range(7, 40))
    with LLM(folder, quantization="f32") as usual, LLM(tmp_path, quantization="f32") as changed:
        assert (usual.logits(ids) == changed.logits(ids)).all()


def in_other_layout(folder: Path, tensors: dict[str, Array]) -> dict[str, Array]:
    """Returns the tensors of a checkpoint with stacked experts apart, or with experts that are apart stacked."""
    moved: set[str] = set()
    added: dict[str, Array] = {}
    for role, tensor in read_model_files(folder).spec.tensors.items():
        if ".experts." not in role or tensor.alternative is None:
            continue
        # Names of wrapped models begin with another module.
        places = {place.names[0].removeprefix("model."): place for place in (tensor, tensor.alternative)}
        end, name = next((end, name) for end in places for name in tensors if name.endswith(end))
        moved.add(name)
        matrix = slice_of(tensors[name], places.pop(end))
        ((other_end, other),) = places.items()
        target = name.removesuffix(end) + other_end
        if other.stack is None:
            added[target] = np.ascontiguousarray(matrix)
            continue
        first, rows = (0, len(matrix)) if other.part is None else (other.part.first, other.part.stride)
        stacked = added.setdefault(target, np.zeros((other.stack.of, rows, matrix.shape[1]), np.float32))
        stacked[other.stack.index, first : first + len(matrix)] = matrix
    return {name: array for name, array in tensors.items() if name not in moved} | added


def slice_of(array: Array, tensor: Tensor) -> Array:
    """Returns the matrix of a role, `[outputs, inputs]`."""
    matrix = array if tensor.stack is None else array[tensor.stack.index]
    matrix = matrix.T if tensor.transposed else matrix
    return matrix if tensor.part is None else matrix[tensor.part.first : tensor.part.first + tensor.part.rows]
