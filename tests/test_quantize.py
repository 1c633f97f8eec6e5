"""`quantize`: what it writes, what it rejects, and what an interrupt leaves."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ferrule import (
    LLM,
    InvalidParameterError,
    ModelFileError,
    ModelWriteError,
    _native,
    quantize,
)
from ferrule._cli import main
from ferrule._loading import WEIGHTS, read_model_files
from ferrule._params.options import EngineOptions
from packed_models import GOLDEN, PROMPT, contents, copy_of, load

pytestmark = pytest.mark.native


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of a model's directory, which tests may change."""
    return copy_of(GOLDEN / "logits" / "llama", tmp_path / "llama")


def test_quantize_rejects_outputs_that_hold_other_files(model: Path, tmp_path: Path) -> None:
    """Quantize rejects its own input under any name, and a directory that is not a packed model."""
    before = contents(model)
    link = tmp_path / "link"
    link.symlink_to(model)
    for output in (model, link, model / ".." / model.name, tmp_path):
        for overwrite in (False, True):
            with pytest.raises(
                InvalidParameterError, match="output must be a directory other than the model's own and its parents"
            ):
                quantize(model, output, overwrite=overwrite)
    full = tmp_path / "full"
    full.mkdir()
    (full / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for overwrite in (False, True):
        requirement = r"output must be empty, or written by ferrule quantize \(it holds other files\)"
        with pytest.raises(InvalidParameterError, match=requirement):
            quantize(model, full, overwrite=overwrite)
        with pytest.raises(InvalidParameterError, match="output must be a directory, or a new path"):
            quantize(model, tmp_path / "file", overwrite=overwrite)
        with pytest.raises(InvalidParameterError, match=requirement):
            quantize(None, model, overwrite=overwrite)
    assert contents(model) == before
    assert contents(full) == {"notes.txt": b"mine"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full", "link", model.name]


def test_files_created_in_output_during_quantize_are_kept(model: Path, tmp_path: Path) -> None:
    for overwrite in (False, True):
        output = tmp_path / f"overwrite {overwrite}"

        def come(*_: int, output: Path = output) -> None:
            output.mkdir(exist_ok=True)
            (output / "notes.txt").write_text("mine")

        with pytest.raises(ModelWriteError, match="cannot be written: Directory not empty"):
            quantize(model, output, overwrite=overwrite, progress=come)
        assert contents(output) == {"notes.txt": b"mine"}
    assert len(list(tmp_path.iterdir())) == 3


def test_overwritten_model_is_kept_until_new_one_is_complete(model: Path, tmp_path: Path) -> None:
    """State after a process was killed between the two renames."""
    old = tmp_path / ".out.1-2.old"
    quantize(model, old)
    os.utime(old, (0, 0))
    seen: list[bool] = []
    quantize(model, tmp_path / "out", progress=lambda *_: seen.append(old.exists()))
    assert all(seen)
    assert not old.exists()


def test_quantize_rejects_mount_points(model: Path) -> None:
    with pytest.raises(
        InvalidParameterError, match="output must be a directory inside the mount point, since the output is renamed"
    ):
        quantize(model, "/dev/shm" if Path("/dev/shm").is_mount() else "/proc")


def test_overwrite_replaces_packed_model(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    assert quantize(model, output, format="int8") == output
    first = contents(output)
    requirement = r"output must be empty, unless overwrite is true \(it holds a packed model\)"
    with pytest.raises(InvalidParameterError, match=requirement):
        quantize(model, output, format="int4")
    assert contents(output) == first
    quantize(model, output, format="int4", overwrite=True)
    assert load(output)["quantization"] == "int4"
    assert sorted(path.name for path in tmp_path.iterdir()) == [model.name, "out"]
    with pytest.raises(InvalidParameterError, match=r"model must be an unpacked model .this one is packed as 'int4'."):
        quantize(output, tmp_path / "again")
    for unknown in ("int5", ""):
        message = f"format must be one of bf16, f16, int8, int4, got '{unknown}'"
        with pytest.raises(InvalidParameterError, match=message):
            quantize(model, tmp_path / "other", format=unknown)


def test_symlinks_leaving_the_model_are_rejected(model: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    (model / "vocab.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(ModelFileError, match=r"vocab.txt: a link to .*secret.txt, which is outside"):
        quantize(model, tmp_path / "out")
    (model / "vocab.txt").unlink()
    (model / "merges.txt").write_text("a b")
    (model / "vocab.txt").symlink_to("merges.txt")
    out = quantize(model, tmp_path / "out")
    assert (out / "vocab.txt").read_text() == "a b"
    assert not (out / "vocab.txt").is_symlink()


def test_hub_snapshot_is_packed_with_subfolders(model: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "0123"
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text('{"word_embedding_dimension": 64, "pooling_mode": "mean"}')
    modules = [{"type": "models.Transformer", "path": ""}, {"type": "models.Pooling", "path": "1_Pooling"}]
    (model / "modules.json").write_text(json.dumps(modules))
    for number, path in enumerate(path for path in model.rglob("*") if path.is_file()):
        blob = repository / "blobs" / str(number)
        shutil.copy(path, blob)
        link = snapshot / path.relative_to(model)
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(blob)
    out = quantize(snapshot, tmp_path / "out", format="int8")
    assert (out / "1_Pooling" / "config.json").is_file()
    with LLM(out) as llm, LLM(model, quantization="int8") as plain:
        prompt: Any = {"prompt_token_ids": PROMPT}
        assert (llm.embed(prompt)[0].outputs.embedding == plain.embed(prompt)[0].outputs.embedding).all()


def test_unwritable_output_is_reported(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelWriteError, match=r"file/out: cannot be written: File exists"):
        quantize(model, tmp_path / "file" / "out")


def test_quantize_command(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["quantize", str(model), "--format", "int8", "-o", str(out), "--threads", "1"]) == 0
    assert capsys.readouterr().err.startswith(f"{out}: int8, ")
    assert main(["quantize", str(model), "-o", str(out)]) == 2
    assert main(["quantize", str(model), "-o", str(model), "--overwrite"]) == 2
    assert main(["quantize", str(model)]) == 2
    assert main(["quantize", str(tmp_path / "none"), "-o", str(out)]) == 2
    assert main(["info", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["quantization"] == "int8"


class Stop(SystemExit):
    """Exception that a handler of SIGTERM may raise."""


@pytest.mark.parametrize("raised", [KeyboardInterrupt, Stop])
@pytest.mark.parametrize("calibration", [None, [[7, 8, 9]]], ids=["plain", "calibrated"])
def test_interrupt_in_progress_callback_ends_work(
    raised: type[BaseException], calibration: list[list[int]] | None, model: Path, tmp_path: Path
) -> None:
    calls = 0

    def progress(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        raise raised

    files, options = read_model_files(model), EngineOptions(quantization="int4", threads=1)
    arguments = (files.spec.to_json(), str(model), options.to_json(), str(tmp_path / "out"), {})
    with pytest.raises(raised):
        _native.pack(*arguments, calibration, progress)
    assert calls == 1
    assert not (tmp_path / "out").exists()


def test_other_exceptions_in_progress_callback_are_ignored(model: Path, tmp_path: Path) -> None:
    def progress(done: int, total: int) -> None:
        raise ValueError("a bar that is too long")

    quantize(model, tmp_path / "out", format="int4", progress=progress)
    with LLM(tmp_path / "out", threads=1) as llm:
        assert llm.info()["quantization"] == "int4"


@pytest.mark.parametrize("calibration", [None, [[7, 8, 9]]], ids=["plain", "calibrated"])
def test_packed_weights_are_not_packed_again(calibration: list[list[int]] | None, model: Path, tmp_path: Path) -> None:
    packed = quantize(model, tmp_path / "int4", format="int4") / WEIGHTS
    spec, options = read_model_files(model).spec.to_json(), EngineOptions(quantization="int4", threads=1).to_json()
    with pytest.raises(InvalidParameterError, match="model must be a checkpoint whose weights are not packed yet"):
        _native.pack(spec, str(packed), options, str(tmp_path / "out"), {}, calibration)
    assert not (tmp_path / "out").exists()
