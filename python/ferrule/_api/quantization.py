"""`quantize`: a model's directory with packed weights, which loads at once and everywhere."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from ferrule._api.calibration import TOKENS, Calibration, calibration_sequences
from ferrule._loading import EMBEDDED, PACKED_METHOD, WEIGHTS, ModelFiles, find_model, read_model_files
from ferrule._loading.gguf import is_gguf
from ferrule._loading.packed_cache import ABANDONED, source_digest
from ferrule._params.options import QUANTIZATIONS, EngineOptions
from ferrule.archs.config import read_json_object
from ferrule.errors import ConfigError, InvalidParameterError, ModelFileError, ModelNotFoundError, ModelWriteError

FORMATS = tuple(name for name in QUANTIZATIONS if name not in ("auto", "f32"))
"""What there is to choose from, widest first."""

_CONFIG = "config.json"
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*", "NOTICE*", "*/config.json", "*/*.jinja")
"""Everything that says what a model is, but for its weights; of the folders that sentence-transformers and chat
templates have beside it, too."""
_LARGEST_COPY = 1 << 30
_OLD = ".old"
"""The suffix of what was overwritten."""


def quantize(
    model: str | os.PathLike[str] | None,
    output: str | os.PathLike[str],
    *,
    format: str = "int4",  # noqa: A002  # the word of the command line
    revision: str | None = None,
    threads: int | None = None,
    overwrite: bool = False,
    calibrate: Calibration | None = None,
    calibration_tokens: int = TOKENS,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Writes a model with its weights packed as `format` into the directory `output`, and returns that.

    It holds configuration, tokenizer and chat template as they were, and loads as any model does, as `format` and
    nothing else. The weights are packed matrix by matrix: at no time are all of them in memory. The directory appears
    as a whole at the end or not at all; `overwrite` lets it take the place of one that `quantize` wrote before.
    `progress` is called with the bytes packed so far and in all.

    With `calibrate`, a file of text, of which `calibration_tokens` are read at the most, or sequences of token ids, the
    model runs over them, and integer formats make their errors where they cost least (GPTQ). That takes a layer in f32
    and the hidden states of these tokens in memory, and far longer. On one instruction set the same text gives the same
    bits.

    Raises InvalidParameterError for a format that there is not, and for a directory that is the model's own, or holds
    something else; ModelWriteError where it cannot be written, and as loading the model and `calibration_sequences` do.
    """
    if format not in FORMATS:
        raise InvalidParameterError("format", format, f"one of {', '.join(FORMATS)}")
    if calibrate is not None and not format.startswith("int"):
        raise InvalidParameterError("format", format, "int8 or int4 with calibrate")
    options = EngineOptions(quantization=format, threads=threads)
    files = read_model_files(find_model(model, revision))
    if files.packed is not None:
        requirement = f"an unpacked model (this one is packed as {files.packed!r})"
        raise InvalidParameterError("model", str(files.path), requirement)
    if is_gguf(files.path):
        requirement = "a directory or repository with config.json, not a GGUF file"
        raise InvalidParameterError("model", str(files.path), requirement)
    target = Path(output).expanduser().resolve()
    _check_target(target, files.path.resolve(), overwrite=overwrite)
    sequences = None if calibrate is None else calibration_sequences(calibrate, files, calibration_tokens)
    name = EMBEDDED if model is None else os.fspath(model)
    with _writing(target) as folder:
        _copy_small_files(files.path, folder)
        packed = {"quantization_config": {"quant_method": PACKED_METHOD, "format": format}}
        config = {**read_json_object(files.path / _CONFIG), **packed}
        (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        _pack(files, folder / WEIGHTS, name, options, calibration=sequences, progress=progress)
        _replace(target, folder, overwrite=overwrite)
    return target


def _pack(
    files: ModelFiles,
    path: Path,
    name: str,
    options: EngineOptions,
    *,
    calibration: list[list[int]] | None,
    progress: Callable[[int, int], None] | None,
) -> None:
    from ferrule import _native

    spec, source = files.spec.to_json(), os.fspath(files.path)
    metadata = {"model": name, "source": source_digest(files.path, spec, options.quantization)}
    _native.pack(spec, source, options.to_json(), os.fspath(path), metadata, calibration, progress)


def _check_target(target: Path, source: Path, *, overwrite: bool) -> None:
    """Refuses to write where anything would be lost."""
    if target == source or target in source.parents:
        requirement = "a directory other than the model's own, and not around it"
        raise InvalidParameterError("output", str(target), requirement)
    if not target.exists():
        return
    if target.is_mount():
        requirement = "a directory inside the mount point, since the output is renamed into place"
        raise InvalidParameterError("output", str(target), requirement)
    if not target.is_dir():
        raise InvalidParameterError("output", str(target), "a directory, or a new path (it is a file)")
    try:
        is_empty = not any(target.iterdir())
    except OSError as error:
        raise ModelWriteError(f"{target}: {error.strerror}") from error
    if is_empty:
        return
    ours = _is_ours(target)
    if not (ours and overwrite):
        holds = "a packed model already" if ours else "something else"
        limit = (
            "empty, or overwrite must be given" if ours else "empty: only what ferrule quantize wrote is overwritten"
        )
        raise InvalidParameterError("output", str(target), f"{limit} (it holds {holds})")


def _is_ours(directory: Path) -> bool:
    """Whether `quantize` wrote a directory."""
    try:
        return read_model_files(directory).packed is not None
    except (ConfigError, ModelFileError, ModelNotFoundError):
        return False


@contextmanager
def _writing(target: Path) -> Generator[Path]:
    """A directory beside `target`, to be filled; it is gone afterwards, whatever happened."""
    prefix = f".{target.name}."
    folder = target.with_name(f"{prefix}{os.getpid()}-{time.time_ns()}.tmp")
    lock: int | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target.parent, prefix)
        folder.mkdir()
        lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
    except ModelWriteError as error:
        # Of the place that the user named; the one where it happened is gone by then.
        raise ModelWriteError(str(error).replace(os.fspath(folder), os.fspath(target))) from error
    except OSError as error:
        if isinstance(error, ModelFileError):
            raise
        raise ModelWriteError(f"{target}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _remove_abandoned(parent: Path, prefix: str) -> None:
    """Removes what killed processes left of this directory."""
    for folder in parent.glob(f"{prefix}*.tmp"):
        try:
            if time.time() - folder.stat().st_mtime < ABANDONED:
                continue
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:  # gone meanwhile, or not ours
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held by whoever still writes it
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue
        finally:
            os.close(handle)


def _copy_small_files(source: Path, folder: Path) -> None:
    inside = (source.resolve(), *_blobs(source))
    for path in sorted({path for pattern in _COPIED for path in source.glob(pattern)}):
        name = path.relative_to(source)
        if name.name.endswith(".index.json") or name == Path(_CONFIG) or not path.is_file():
            continue
        real = path.resolve()
        if not any(real.is_relative_to(each) for each in inside):
            raise ModelFileError(f"{path}: a link to {real}, which is outside of the model's folder: not copied")
        if (size := real.stat().st_size) > _LARGEST_COPY:
            raise ModelFileError(f"{path}: has {size} bytes; the limit of what is copied is {_LARGEST_COPY}")
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(real, folder / name)


def _blobs(source: Path) -> list[Path]:
    """Where the links of a snapshot in the Hugging Face cache lead: `models--org--name/blobs`."""
    roots = [parent.parent for parent in source.resolve().parents if parent.name == "snapshots"]
    return [root / "blobs" for root in roots if root.name.startswith("models--")]


def _replace(target: Path, folder: Path, *, overwrite: bool) -> None:
    """Gives a filled directory its name, if nothing has taken that meanwhile.

    What is to be overwritten is first moved away, and put back where that fails. Where a process is killed between the
    two it lies beside, until another one is whole.
    """
    for path in [*folder.rglob("*"), folder]:
        _sync(path)
    replaces = overwrite and target.exists() and _is_ours(target)
    old = folder.with_suffix(_OLD)
    if replaces:
        target.rename(old)
    try:
        folder.rename(target)
    except BaseException:
        if replaces:
            old.rename(target)
        raise
    _sync(target.parent)
    for replaced in target.parent.glob(f".{target.name}.*{_OLD}"):
        shutil.rmtree(replaced, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
