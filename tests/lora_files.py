"""LoRA adapters for tests: random matrices for modules of a golden model, in PEFT's layout."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from ferrule._loading import read_model_files
from ferrule.archs.spec import Tensor

GOLDEN = Path(__file__).parent / "golden"
BASES = GOLDEN / "logits"
ADAPTERS = GOLDEN / "adapters"
TENSORS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
Array = npt.NDArray[np.float32]

NOT_LINEAR = (
    "norm",
    "embedding.weight",
    "tables.",
    "positions",
    "token_types",
    "sinks",
    "router",
    ".experts.",
    "scalar.weight",
    "kernel.",
    "_log.",
    "_bias.weight",
    "skip.",
    "bonus.",
    "_mix.weight",
    "low_rank.",
    ".altup.",
    ".side.",
)
"""Parts of the roles of tensors that are no linear layers, or that adapters cannot change."""
CONFIG_OF_PEFT: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "base",
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layers_to_transform": None,
    "lora_dropout": 0.0,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "use_dora": False,
    "use_rslora": False,
}


def linear_modules(model: Path) -> dict[str, Tensor]:
    """Returns the modules of a model that an adapter can change, and how each is stored."""
    tensors = read_model_files(model).spec.tensors
    found: dict[str, Tensor] = {}
    for role, tensor in tensors.items():
        is_linear = role.endswith(".weight") and not any(part in role for part in NOT_LINEAR)
        if is_linear:
            found.update((name.removesuffix(".weight"), tensor) for name in tensor.names)
    return found


def base_tensors(model: Path) -> dict[str, Array]:
    """Reads all tensors of a golden model as f32; most are stored in bf16, the upper half of an f32. Integers stay."""
    file = model / "model.safetensors"
    header, raw = read_header(file), file.read_bytes()
    data = raw[8 + int.from_bytes(raw[:8], "little") :]
    tensors: dict[str, Array] = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        if entry["dtype"] in ("F32", "I64"):
            stored = np.frombuffer(data[begin:end], dtype={"F32": "<f4", "I64": "<i8"}[entry["dtype"]])
            tensors[name] = stored.reshape(entry["shape"])
            continue
        assert entry["dtype"] == "BF16"
        halves = np.frombuffer(data[begin:end], dtype="<u2").astype(np.uint32) << 16
        tensors[name] = halves.view(np.float32).reshape(entry["shape"])
    return tensors


def shapes(model: Path) -> dict[str, tuple[int, int]]:
    """Returns outputs and inputs of every module that an adapter can change."""
    header = read_header(model / "model.safetensors")
    modules = linear_modules(model)
    found: dict[str, tuple[int, int]] = {}
    for module, tensor in modules.items():
        rows, columns = header[f"{module}.weight"]["shape"]
        found[module] = (columns, rows) if tensor.transposed else (rows, columns)
    return found


def read_header(file: Path) -> dict[str, Any]:
    """Reads the header of a safetensors file."""
    raw = file.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    header.pop("__metadata__", None)
    return header


def random_matrices(model: Path, modules: Iterable[str], rank: int, seed: int) -> dict[str, Array]:
    """Returns random matrices A and B of each module, under PEFT's names."""
    numbers, sizes = np.random.default_rng(seed), shapes(model)
    matrices: dict[str, Array] = {}
    for module in modules:
        outputs, inputs = sizes[module]
        a = numbers.standard_normal((rank, inputs)) / math.sqrt(inputs)
        b = numbers.standard_normal((outputs, rank)) / math.sqrt(rank)
        matrices[f"base_model.model.{module}.lora_A.weight"] = a.astype(np.float32)
        matrices[f"base_model.model.{module}.lora_B.weight"] = b.astype(np.float32)
    return matrices


def write_adapter(folder: Path, matrices: Mapping[str, Array], rank: int, alpha: float, **changes: Any) -> Path:
    """Writes an adapter's directory; its targets are the modules with matrices."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in matrices}
    config = {**CONFIG_OF_PEFT, "r": rank, "lora_alpha": alpha, "target_modules": sorted(names), **changes}
    (folder / CONFIG).write_text(json.dumps(config))
    save_file(dict(matrices), folder / TENSORS)
    return folder


def random_adapter(folder: Path, model: Path, *, rank: int = 4, seed: int = 0, alpha: float = 1.0) -> Path:
    """Writes a random adapter for all modules that support one."""
    return write_adapter(folder, random_matrices(model, linear_modules(model), rank, seed), rank, alpha)


def merge(model: Path, matrices: Mapping[str, Array], scale: float, folder: Path) -> Path:
    """Writes the model whose weights are W + scale * B A."""
    shutil.copytree(model, folder)
    tensors = base_tensors(model)
    for module, tensor in linear_modules(model).items():
        name = f"base_model.model.{module}"
        if f"{name}.lora_A.weight" in matrices:
            update = scale * (matrices[f"{name}.lora_B.weight"] @ matrices[f"{name}.lora_A.weight"])
            tensors[f"{module}.weight"] += update.T if tensor.transposed else update
    (folder / "model.safetensors").chmod(0o644)
    save_file(tensors, folder / "model.safetensors")
    return folder
