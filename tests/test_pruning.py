"""Pruning: exact numbers of zeros, what stays as it is, and the loss of each method."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest

from conftest import TINY
from ferrule import LLM, InvalidParameterError, _native, quantize
from ferrule._cli import main
from ferrule._loading import WEIGHTS
from test_calibration import SCORED, SEEN, stdlib_text

pytestmark = pytest.mark.native

GOLDEN = Path(__file__).parent / "golden" / "logits"


def matrices(path: Path) -> dict[str, np.ndarray]:
    """Returns the floating-point matrices of a packed file, by role: `[columns, 16]` for each sixteen rows."""
    raw = (path / WEIGHTS).read_bytes()
    [length] = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__")
    data = raw[8 + length :]
    found: dict[str, np.ndarray] = {}
    for name, tensor in header.items():
        role, _, kind = name.rpartition(".")
        if kind in ("bf16", "f32"):
            numbers = np.frombuffer(data[slice(*tensor["data_offsets"])], np.uint16 if kind == "bf16" else np.uint32)
            found[role.rpartition(".")[0]] = numbers.reshape(-1, 16)
    return found


@pytest.mark.parametrize("sparsity", [0.5, "2:4", 0.75])
def test_each_row_has_the_zeros_that_were_requested(sparsity: float | str, tmp_path: Path) -> None:
    plain = matrices(quantize(TINY, tmp_path / "plain", format="bf16"))
    pruned = matrices(quantize(TINY, tmp_path / "pruned", format="bf16", sparsity=sparsity))
    assert plain.keys() == pruned.keys()
    share = 0.5 if sparsity == "2:4" else sparsity
    for role, numbers in pruned.items():
        if not role.startswith("layers."):
            assert (numbers == plain[role]).all(), role
            continue
        # Columns are whole groups of 128, and rows whole panels.
        groups = (numbers & 0x7FFF == 0).reshape(-1, 4 if sparsity == "2:4" else 128, 16)
        assert (groups.sum(1) == share * groups.shape[1]).all(), role
        kept = numbers & 0x7FFF != 0
        assert (numbers[kept] == plain[role][kept]).all(), role
    metadata = _native.PackedFile(str(tmp_path / "pruned" / WEIGHTS)).metadata
    assert (metadata["sparsity"], metadata["pruning"]) == (str(sparsity), "magnitude")


def test_routers_stay_as_they_are(tmp_path: Path) -> None:
    plain = matrices(quantize(GOLDEN / "mixtral", tmp_path / "plain", format="bf16"))
    pruned = matrices(quantize(GOLDEN / "mixtral", tmp_path / "pruned", format="bf16", sparsity=0.5))
    changed = {role for role, numbers in pruned.items() if (numbers != plain[role]).any()}
    assert {role for role in plain if "router" in role}.isdisjoint(changed)
    assert {role for role in plain if role.startswith("layers.") and "router" not in role} == changed


def test_calibration_reduces_divergence(tmp_path: Path) -> None:
    text = tmp_path / "seen.txt"
    text.write_text(stdlib_text(SEEN))
    with LLM(TINY, quantization="f32") as reference:
        ids = reference.tokenize(stdlib_text(SCORED), add_special_tokens=False)
        windows = [ids[start : start + 256] for start in range(0, len(ids) - 256, 2048)][:8]

        def divergence(pruning: str) -> float:
            calibrate = None if pruning == "magnitude" else text
            out = tmp_path / pruning
            packed = quantize(
                TINY, out, format="bf16", sparsity=0.5, pruning=pruning, calibrate=calibrate, calibration_tokens=8192
            )
            with LLM(packed, kv_cache_dtype="f32") as llm:
                return llm.compare(reference, windows, window=256, stride=127, min_context=129).kld.mean

        magnitude, wanda, sparsegpt = map(divergence, ("magnitude", "wanda", "sparsegpt"))
    assert sparsegpt < 0.8 * wanda
    assert wanda < magnitude


@pytest.mark.parametrize(
    ("quantization", "sparsity", "names"),
    [("int8", 0.5, {"int8_sparse"}), ("int8", "2:4", {"int8_2of4"}), ("int4", "2:4", {"int4_2of4", "int8_2of4"})],
)
def test_sparse_formats(quantization: str, sparsity: float | str, names: set[str], tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    sequences = random.integers(3, 2000, (4, 128)).tolist()
    dense = quantize(TINY, tmp_path / "dense", format=quantization)
    found = quantize(TINY, tmp_path / "sparse", format=quantization, sparsity=sparsity, calibrate=sequences)
    tensors = _native.PackedFile(str(found / WEIGHTS)).tensors
    formats = {name.rpartition(".")[2] for name in tensors if name.startswith("layers.") and ".0." in name}
    assert {name for name in formats if "_" in name} == names
    assert (found / WEIGHTS).stat().st_size < 0.85 * (dense / WEIGHTS).stat().st_size
    with LLM(found, threads=1) as llm, LLM(dense, threads=1) as other:
        logits, exact = llm.logits(list(range(7, 40))), other.logits(list(range(7, 40)))
        assert llm.info()["weight_bytes"] < other.info()["weight_bytes"]
    assert np.isfinite(logits).all()
    # Calibration on random tokens is poor, but half of the weights have most of the effect.
    assert np.corrcoef(logits.ravel(), exact.ravel())[0, 1] > 0.8


INVALID = [
    ({"sparsity": 0.5}, "sparsity must be 2:4 with int4, which has no other sparse format, got 0.5"),
    (
        {"sparsity": 0.4, "format": "int8"},
        "sparsity must be 2:4 or >= 0.5 with int8, whose sparse format stores half of the weights, got 0.4",
    ),
    ({"sparsity": 0.99, "format": "bf16"}, "sparsity must be 2:4 or a share of zeros from 0.05 to 0.95, got 0.99"),
    ({"sparsity": "4:8", "format": "f16"}, "sparsity must be 2:4 or a share of zeros from 0.05 to 0.95, got '4:8'"),
    ({"sparsity": (2, 4)}, "sparsity must be 2:4 or a share of zeros from 0.05 to 0.95, got (2, 4)"),
    ({"sparsity": "nan"}, "sparsity must be 2:4 or a share of zeros from 0.05 to 0.95, got 'nan'"),
    ({"pruning": "magnitude"}, "pruning must be None without sparsity, got 'magnitude'"),
    (
        {"sparsity": "2:4", "format": "bf16", "pruning": "other"},
        "pruning must be one of sparsegpt, wanda, magnitude, got 'other'",
    ),
    (
        {"sparsity": "2:4", "format": "bf16", "pruning": "wanda"},
        "pruning must be magnitude without calibrate, got 'wanda'",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), INVALID)
def test_invalid_arguments(arguments: dict[str, str | float], message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError) as error:
        quantize(GOLDEN / "llama", tmp_path / "out", **arguments)  # type: ignore[arg-type]
    assert str(error.value) == message
    assert not any(tmp_path.iterdir())


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    model = str(GOLDEN / "llama")
    assert main(["quantize", model, "--format", "bf16", "--sparsity", "2:4", "-o", str(out)]) == 0
    shown = capsys.readouterr().err
    assert "bf16, 2:4 sparse (magnitude)" in shown
    assert re.search(r"^(\d+) of \1 matrices pruned$", shown, re.MULTILINE)
    assert main(["quantize", model, "--sparsity", "0.5", "-o", str(out)]) == 2
    assert "--sparsity needs --format" in capsys.readouterr().err
    assert main(["quantize", model, "--format", "bf16", "--pruning", "wanda", "-o", str(out)]) == 2
    assert "--pruning needs --sparsity" in capsys.readouterr().err


def test_matrices_that_do_not_fit_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = str(GOLDEN / "llama"), tmp_path / "out"
    width = json.loads((GOLDEN / "llama" / "config.json").read_text())["hidden_size"]
    assert width % 128
    reason = f"because its {width} inputs are not a multiple of 128, as int8_sparse needs"
    message = rf"sparsity must be one that fits .* in int8: layers\.0\..*{reason}"
    with pytest.raises(InvalidParameterError, match=message):
        quantize(model, out, format="int8", sparsity=0.5)
    assert not out.exists()
    assert main(["quantize", model, "--format", "int8", "--sparsity", "2:4", "-o", str(out)]) == 0
    shown = capsys.readouterr().err
    [(pruned, matrices)] = re.findall(r"^(\d+) of (\d+) matrices pruned \(\d+ of \d+ weights\)", shown, re.MULTILINE)
    assert 0 < int(pruned) < int(matrices)
    assert "the first that is not: layers.0.ffn.down, because its 160 inputs are not a multiple of 64" in shown
