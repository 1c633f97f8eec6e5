"""GGUF files that the `gguf` package wrote: their contents, and inference with them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors import safe_open
from safetensors.numpy import save_file

from ferrule import _native
from ferrule._loading.model_files import read_model_files
from ferrule._params.options import EngineOptions
from ferrule.errors import ModelFileError
from gguf_files import File, Tensor, floats

GOLDEN = Path(__file__).parent / "golden" / "logits" / "llama"

Floats = npt.NDArray[np.float32]


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def numbers(file: _native.GgufFile, name: str) -> Floats:
    _, shape = file.tensors[name]
    return np.frombuffer(file.dequantize(name), np.float32).reshape(shape)


METADATA: dict[str, Any] = {
    "a.uint8": 200,
    "a.int8": -5,
    "a.uint16": 60_000,
    "a.int16": -300,
    "a.uint32": 4_000_000_000,
    "a.int32": -70_000,
    "a.uint64": 2**64 - 1,
    "a.int64": -(2**63),
    "a.float32": 0.5,
    "a.float64": 0.1,
    "a.bool": True,
    "a.string": "naïve 🖊",
}
ARRAYS: dict[str, list[Any]] = {
    "b.tokens": ["<s>", "▁the", "é", ""],
    "b.scores": [-1.5, 0.0, 2.0],
    "b.types": [1, 2, 3],
    "b.flags": [True, False],
    "b.one": [7],
}


def test_metadata_values_and_types(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    for key, value in METADATA.items():
        getattr(writer, f"add_{key.removeprefix('a.')}")(key, value)
    for key, values in ARRAYS.items():
        writer.add_array(key, values)
    finish(writer)
    file = _native.GgufFile(str(tmp_path / "model.gguf"))
    assert file.metadata == {"general.architecture": "llama"} | METADATA | ARRAYS
    assert all(type(file.metadata[key]) is type(value) for key, value in METADATA.items())
    assert file.metadata["b.flags"][1] is False
    assert file.parts == [tmp_path / "model.gguf"]
    assert file.tensors == {}


def test_tensor_shapes_and_values(tmp_path: Path) -> None:
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_custom_alignment(256)
    writer.add_tensor("f32", matrix)
    writer.add_tensor("f16", -matrix.astype(np.float16))
    writer.add_tensor("cube", np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    finish(writer)
    file = _native.GgufFile(str(tmp_path / "model.gguf"))
    assert file.tensors == {"cube": ("F32", (2, 3, 4)), "f16": ("F16", (2, 3)), "f32": ("F32", (2, 3))}
    np.testing.assert_array_equal(numbers(file, "f32"), matrix)
    np.testing.assert_array_equal(numbers(file, "f16"), -matrix)
    np.testing.assert_array_equal(numbers(file, "cube").ravel(), np.arange(24))
    with pytest.raises(ModelFileError, match='no tensor "f33"; the nearest name is "f'):
        file.dequantize("f33")


def test_any_split_file_opens_all(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama", split_max_tensors=2)
    for index in range(5):
        writer.add_tensor(f"w{index}", np.full(3, index, np.float32))
    finish(writer)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"model-{part:05}-of-00003.gguf" for part in (1, 2, 3)]
    for name in names:
        file = _native.GgufFile(str(tmp_path / name))
        assert [path.name for path in file.parts] == names
        assert file.metadata["general.architecture"] == "llama"
        assert [numbers(file, f"w{index}")[0] for index in range(5)] == [0, 1, 2, 3, 4]


def write_f32(path: Path, weights: dict[str, Floats]) -> dict[str, Floats]:
    tensors = [Tensor(name, weight.shape[::-1], data=weight.tobytes()) for name, weight in weights.items()]
    File(tensors=tensors).write(path)
    return weights


def write_q8_0(path: Path, weights: dict[str, Floats]) -> dict[str, Floats]:
    """Returns matrices in blocks, and their dequantized values."""
    kind = GGMLQuantizationType.Q8_0
    blocks = {name: quantize(weight, kind) for name, weight in weights.items() if weight.ndim == 2}
    tensors = [
        Tensor(name, weight.shape[::-1], int(kind), blocks[name].tobytes()) if name in blocks else floats(name, *weight)
        for name, weight in weights.items()
    ]
    File(tensors=tensors).write(path)
    return {name: dequantize(blocks[name], kind) if name in blocks else weights[name] for name in weights}


def random_weights() -> dict[str, Floats]:
    """Tensors in the shapes of a small model."""
    random = np.random.default_rng(6)
    with safe_open(GOLDEN / "model.safetensors", framework="np") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


@pytest.mark.native
@pytest.mark.parametrize("write", [write_f32, write_q8_0])
def test_gguf_logits_equal_safetensors(
    tmp_path: Path, write: Callable[[Path, dict[str, Floats]], dict[str, Floats]]
) -> None:
    """The tensor names are those of the directory, which the engine does not depend on."""
    same = write(tmp_path / "model.gguf", random_weights())
    save_file(same, tmp_path / "model.safetensors")
    spec = read_model_files(GOLDEN).spec.to_json()
    options = EngineOptions(quantization="f32", threads=1, max_num_seqs=1).to_json()
    logits: list[bytearray] = []
    for path in (tmp_path, tmp_path / "model.gguf"):
        engine = _native.Engine(spec, str(path), options)
        logits.append(engine.logits([1, 5, 9, 2]))
        engine.close()
        measured = json.loads(_native.measure(spec, str(path), options))
        assert measured["checkpoint_bytes"] > 0
    assert np.isfinite(np.frombuffer(logits[0], np.float32)).all()
    assert logits[0] == logits[1]
