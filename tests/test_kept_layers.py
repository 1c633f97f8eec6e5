"""Calibration that was interrupted: the same call continues after the layers that are finished."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ferrule import Recipe, quantize
from ferrule._api.kept_layers import folders
from ferrule._cli import main
from ferrule._loading import WEIGHTS, read_model_files

pytestmark = pytest.mark.native

GOLDEN = Path(__file__).parent / "golden" / "logits"
VARIANTS = GOLDEN.parent / "variants"


def sequences(model: Path) -> list[list[int]]:
    random = np.random.default_rng(5)
    return random.integers(3, read_model_files(model).spec.vocab_size, (5, 40)).tolist()


def interrupt_at(share: float) -> Callable[[int, int], None]:
    def progress(done: int, total: int) -> None:
        if done > share * total:
            raise KeyboardInterrupt

    return progress


def interrupted(model: Path, output: Path, share: float = 0.8, **options: Any) -> list[Path]:
    """Interrupts a calibration, and returns the files of its finished layers."""
    with pytest.raises(KeyboardInterrupt) as error:
        quantize(model, output, calibrate=sequences(model), progress=interrupt_at(share), **options)
    assert not output.exists()
    [folder] = folders(output)
    assert any(str(folder) in note for note in error.value.__notes__)
    return sorted(folder.iterdir())


@pytest.mark.parametrize(
    ("model", "options"),
    [
        *((GOLDEN / name, {}) for name in ("llama", "mixtral")),
        *((VARIANTS / name, {}) for name in ("gemma3n", "deepseek_v4", "zamba2")),
        (GOLDEN / "llama", {"format": "int8", "sparsity": "2:4"}),
        (GOLDEN / "llama", {"recipe": Recipe({"*.q_proj": "trellis3", "*.up_proj": "int3"}, base="int8")}),
    ],
    ids=["llama", "mixtral", "gemma3n", "deepseek_v4", "zamba2", "sparse", "recipe"],
)
def test_continued_calibration_gives_the_same_file(model: Path, options: dict[str, Any], tmp_path: Path) -> None:
    whole = quantize(model, tmp_path / "whole", calibrate=sequences(model), **options)
    layers = interrupted(model, tmp_path / "out", **options)
    assert layers
    assert len(layers) < len(read_model_files(model).spec.layers)
    states = {path: path.stat().st_mtime_ns for path in layers}
    seen: list[dict[Path, int]] = []

    def progress(_done: int, _total: int) -> None:
        seen.append({path: path.stat().st_mtime_ns for path in layers})

    out = quantize(model, tmp_path / "out", calibrate=sequences(model), progress=progress, **options)
    assert (out / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()
    assert all(state == states for state in seen), "finished layers are not written again"
    assert not folders(out)


def test_damaged_layers_are_calibrated_again(tmp_path: Path) -> None:
    model = GOLDEN / "llama"
    whole = quantize(model, tmp_path / "whole", calibrate=sequences(model))
    first, *_ = interrupted(model, tmp_path / "out")
    content = bytearray(first.read_bytes())
    content[-len(content) // 4] ^= 1
    first.write_bytes(content)
    out = quantize(model, tmp_path / "out", calibrate=sequences(model))
    assert (out / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()


def test_layers_of_another_calibration_are_removed_by_a_complete_one(tmp_path: Path) -> None:
    model = GOLDEN / "llama"
    [folder] = {path.parent for path in interrupted(model, tmp_path / "out")}
    other = sequences(model)[:4]
    with pytest.raises(KeyboardInterrupt):
        quantize(model, tmp_path / "out", calibrate=other, progress=interrupt_at(0))
    assert folders(tmp_path / "out") == [folder]
    quantize(model, tmp_path / "out", calibrate=other)
    assert not folders(tmp_path / "out")


def test_folders_of_other_outputs_are_left_alone(tmp_path: Path) -> None:
    model, digest = GOLDEN / "llama", "0123456789abcdef"
    names = (f".a.b.{digest}.layers", f".a1.{digest}.layers", ".a.notes.layers", ".a.b.1-2.old", f".a.{digest}.layers")
    for name in names:
        (tmp_path / name).mkdir()
    for output in ("a", "a[1]"):
        quantize(model, tmp_path / output, calibrate=sequences(model))
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*names[:-1], "a", "a[1]"}


def test_layers_that_cannot_be_written_are_not_kept(tmp_path: Path) -> None:
    model = GOLDEN / "llama"
    whole = quantize(model, tmp_path / "whole", calibrate=sequences(model))

    def progress(_done: int, _total: int) -> None:
        for folder in folders(tmp_path / "out"):
            shutil.rmtree(folder)

    out = quantize(model, tmp_path / "out", calibrate=sequences(model), progress=progress)
    assert (out / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()


def test_layers_that_another_process_writes_are_left_alone(tmp_path: Path) -> None:
    model = GOLDEN / "llama"
    [folder] = {path.parent for path in interrupted(model, tmp_path / "out")}
    before = sorted(folder.iterdir())
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for calibrate in (sequences(model), sequences(model)[:4]):
            quantize(model, tmp_path / "out", calibrate=calibrate, overwrite=True)
            assert sorted(folder.iterdir()) == before
    finally:
        os.close(handle)


def test_a_killed_process_leaves_its_finished_layers(tmp_path: Path) -> None:
    model = GOLDEN / "llama"
    program = (
        "import os, signal, sys; from ferrule import quantize\n"
        "kill = lambda done, total: done > 0.8 * total and os.kill(os.getpid(), signal.SIGKILL)\n"
        f"quantize({str(model)!r}, sys.argv[1], calibrate={sequences(model)}, progress=kill)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "out")], check=False, timeout=300)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    [folder] = folders(tmp_path / "out")
    assert list(folder.glob("*.safetensors"))
    whole = quantize(model, tmp_path / "whole", calibrate=sequences(model))
    out = quantize(model, tmp_path / "out", calibrate=sequences(model))
    assert (out / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()
    assert not folders(out)


def test_command_names_the_layers_that_it_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, output = GOLDEN / "llama", tmp_path / "out"

    def stopped(*_: object, **__: object) -> None:
        quantize(model, output, calibrate=sequences(model), progress=interrupt_at(0.8))

    monkeypatch.setattr("ferrule._cli.quantize.quantize", stopped)
    assert main(["quantize", str(model), "-o", str(output)]) == 130
    [folder] = folders(output)
    assert f"{folder} keeps 2 finished layers; the same command continues after that" in capsys.readouterr().err
