"""Every tensor type is dequantized to bitwise the same numbers as by the `gguf` package."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from ferrule import _native
from gguf_files import File, Tensor

# Integer and double types, which are not weights, and types of intermediate results.
NO_WEIGHTS = {GGMLQuantizationType[name] for name in ("I8", "I16", "I32", "I64", "F64")}
REFUSED = {GGMLQuantizationType[name] for name in ("Q8_1", "Q8_K")}
WEIGHTS = sorted(set(GGMLQuantizationType) - NO_WEIGHTS - REFUSED)
BLOCKS = 600


def random_bytes(blocks: int, type_id: GGMLQuantizationType) -> NDArray[np.uint8]:
    """Returns random bytes as blocks of a type; some scales are infinite or NaN."""
    _, size = gguf.GGML_QUANT_SIZES[type_id]
    return np.random.default_rng(int(type_id)).integers(0, 256, (blocks, size), np.uint8)


def write(path: Path, type_id: GGMLQuantizationType, blocks: NDArray[np.uint8], rows: int = 4) -> str:
    inputs, _ = gguf.GGML_QUANT_SIZES[type_id]
    dimensions = [len(blocks) // rows * inputs, rows]
    return str(File(tensors=[Tensor("w", dimensions, int(type_id), blocks.tobytes())]).write(path))


def oracle(blocks: NDArray[np.uint8], type_id: GGMLQuantizationType) -> NDArray[np.float32]:
    with np.errstate(invalid="ignore", over="ignore"):
        if type_id != GGMLQuantizationType.Q1_0:
            return dequantize(blocks, type_id)
        # The package has only the size of this type; the values follow ggml's dequantize_row_q1_0.
        scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        return scales * (np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").astype(np.float32) * 2 - 1)


@pytest.mark.parametrize("type_id", WEIGHTS, ids=lambda type_id: type_id.name)
def test_dequantized_random_blocks_equal_reference(tmp_path: Path, type_id: GGMLQuantizationType) -> None:
    blocks = random_bytes(BLOCKS, type_id)
    file = _native.GgufFile(write(tmp_path / "model.gguf", type_id, blocks))
    inputs, _ = gguf.GGML_QUANT_SIZES[type_id]
    assert file.tensors == {"w": (type_id.name, (4, BLOCKS // 4 * inputs))}
    found = np.frombuffer(file.dequantize("w"), np.float32)
    expected = oracle(blocks, type_id).reshape(-1)
    assert found.size == expected.size
    # NaN is NaN in both; its payload may differ.
    both_nan = np.isnan(found) & np.isnan(expected)
    differ = (found.view(np.uint32) != expected.view(np.uint32)) & ~both_nan
    assert not differ.any(), (np.flatnonzero(differ)[:5], found[differ][:5], expected[differ][:5])
    assert np.isfinite(found).mean() > 0.5


@pytest.mark.parametrize("type_id", sorted(REFUSED), ids=lambda type_id: type_id.name)
def test_unsupported_types_are_rejected_by_name(tmp_path: Path, type_id: GGMLQuantizationType) -> None:
    path = write(tmp_path / "model.gguf", type_id, random_bytes(4, type_id))
    with pytest.raises(OSError, match=f'model.gguf.*"w".*{type_id.name}'):
        _native.GgufFile(path)


@pytest.mark.parametrize("type_id", sorted(NO_WEIGHTS), ids=lambda type_id: type_id.name)
def test_non_weight_types_are_listed_but_not_dequantized(tmp_path: Path, type_id: GGMLQuantizationType) -> None:
    file = _native.GgufFile(write(tmp_path / "model.gguf", type_id, random_bytes(8, type_id)))
    assert file.tensors == {"w": (type_id.name, (4, 2))}
    with pytest.raises(OSError, match=f'model.gguf.*"w".*{type_id.name}'):
        file.dequantize("w")
