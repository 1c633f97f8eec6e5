"""Zeros of dense checkpoints in `ferrule info`: their share, the formats that fit them, and damaged files."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from conftest import TINY
from ferrule import ModelFileError, model_info, quantize
from ferrule._api import zeros as module
from ferrule._api.zeros import find_zeros
from ferrule._cli import main

Prune = Callable[[np.ndarray], np.ndarray]
"""Returns which weights stay, given the magnitudes `[rows, inputs]`."""


def checkpoint(folder: Path, keeps: Prune) -> Path:
    """Copies the embedded model and sets weights of its layers to zero."""
    shutil.copytree(TINY, folder)
    file = folder / "model.safetensors"
    raw = bytearray(file.read_bytes())
    [length] = struct.unpack_from("<Q", raw)
    for name, tensor in json.loads(raw[8 : 8 + length]).items():
        if ".layers." in name and len(tensor["shape"]) == 2:
            start, end = (8 + length + offset for offset in tensor["data_offsets"])
            numbers = np.frombuffer(raw[start:end], np.uint16).reshape(tensor["shape"])
            # Zeros may have a sign.
            raw[start:end] = np.where(keeps(numbers & 0x7FFF), numbers, numbers & 0x8000).tobytes()
    file.write_bytes(raw)
    return folder


def largest(count: int, of: int) -> Prune:
    """Keeps the largest weights of each `of` consecutive inputs."""

    def keeps(magnitudes: np.ndarray) -> np.ndarray:
        groups = magnitudes.reshape(-1, of)
        ranks = np.argsort(np.argsort(groups, axis=1, kind="stable"), axis=1)
        return (ranks >= of - count).reshape(magnitudes.shape)

    return keeps


@pytest.mark.native
@pytest.mark.parametrize(
    ("keeps", "share", "sparsity", "formats"),
    [
        (largest(64, 128), 0.5, "0.5", ["int8_sparse"]),
        (largest(32, 128), 0.75, "0.5", ["int8_sparse"]),
        (largest(2, 4), 0.5, "2:4", ["int8_2of4", "int4_2of4"]),
        (largest(96, 128), 0.25, None, []),
    ],
)
def test_the_sparsity_that_fits_is_named(
    keeps: Prune,
    share: float,
    sparsity: str | None,
    formats: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = checkpoint(tmp_path / "model", keeps)
    zeros = model_info(folder)["zeros"]
    assert zeros["share"] == pytest.approx(share, abs=0.01)
    assert (zeros["sparsity"], list(zeros["saves"])) == (sparsity, formats)
    assert main(["info", str(folder)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f" zeros {share:.0%} of the weights in the layers" in text
    if sparsity is None:
        assert "too few for sparse formats" in text
        return
    assert f"ferrule quantize --sparsity {sparsity} --pruning magnitude keeps them" in text
    # The bytes are those that `quantize` saves, and no further weight becomes zero.
    for name, saved in zeros["saves"].items():
        dense = quantize(folder, tmp_path / f"{name}-dense", format=name[:4])
        sparse = quantize(folder, tmp_path / name, format=name[:4], sparsity=sparsity, pruning="magnitude")
        bytes_of = [(path / "model.safetensors").stat().st_size for path in (dense, sparse)]
        # In int4 some matrices have six bits, of which 2:4 saves others.
        assert saved == pytest.approx(bytes_of[0] - bytes_of[1], rel=0.01 if name[:4] == "int8" else 0.5)


@pytest.mark.native
def test_dense_models_have_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    zeros = model_info(TINY)["zeros"]
    assert zeros["share"] < 0.001
    assert zeros["sparsity"] is None
    assert main(["info", str(TINY)]) == 0
    assert "zeros" not in capsys.readouterr().out


def test_unevenly_spread_zeros_are_not_half_of_each_block(tmp_path: Path) -> None:
    def keeps(magnitudes: np.ndarray) -> np.ndarray:
        return np.arange(magnitudes.shape[1]) >= magnitudes.shape[1] // 2 + np.zeros_like(magnitudes)

    zeros = find_zeros(checkpoint(tmp_path / "model", keeps))
    assert zeros is not None
    assert zeros.share == pytest.approx(0.5, abs=0.1)
    assert zeros.missing > 0.1
    assert zeros.sparsity is None


def test_the_sample_is_bounded_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = find_zeros(TINY)
    monkeypatch.setattr(module, "SECONDS", 0.0)
    sample = find_zeros(TINY)
    assert whole is not None
    assert sample is not None
    assert sample.sampled < whole.sampled < whole.weights
    assert (sample.matrices, sample.weights) == (whole.matrices, whole.weights)


@pytest.mark.parametrize("length", [0, 5, 7, 1 << 40])
def test_damaged_headers_are_model_file_errors(length: int, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", length) + b'{"a.0.b.weight": 3}')
    with pytest.raises(ModelFileError, match="invalid safetensors header"):
        find_zeros(tmp_path)


@pytest.mark.parametrize(
    ("shape", "offset", "message"),
    [
        ([32, 128], 0, "truncated"),
        ([1 << 40, 1 << 40], 0, "truncated"),
        ([32, 128], 1 << 70, "truncated"),
        ([32.0, 128.0], 0, "invalid safetensors header"),
        ([32, 128], -9000, "invalid safetensors header"),
        ([32, 128], 0.5, "invalid safetensors header"),
    ],
)
def test_tensors_outside_of_their_file_are_model_file_errors(
    shape: list[float], offset: float, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "model.safetensors"
    header = json.dumps({"a.0.b.weight": {"dtype": "BF16", "shape": shape, "data_offsets": [offset, 8192]}}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(100))
    with pytest.raises(ModelFileError, match=message):
        find_zeros(tmp_path)


def test_only_the_files_of_the_model_are_read(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", largest(2, 4))
    found = find_zeros(folder)
    shutil.copy(TINY / "model.safetensors", folder / "consolidated.safetensors")
    (folder / "adapter_model.safetensors").write_bytes(b"damaged")
    assert find_zeros(folder) == found
