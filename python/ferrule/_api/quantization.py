"""`quantize`: writes a model directory with packed weights, which loads without conversion."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ferrule._api.calibration import TOKENS, Calibration, calibration_sequences
from ferrule._api.kept_layers import kept_layers
from ferrule._api.pruning import checked_pruning
from ferrule._api.recipe import Recipe
from ferrule._loading import EMBEDDED, PACKED_METHOD, WEIGHTS, ModelFiles, find_model, read_model_files
from ferrule._loading.gguf import is_gguf
from ferrule._loading.gguf_directory import write_small_files
from ferrule._loading.model_files import GGUF_FORM
from ferrule._loading.packed_cache import source_digest
from ferrule._loading.temporary import temporary_directory
from ferrule._params.options import QUANTIZATIONS, EngineOptions
from ferrule.archs.config import read_json_object
from ferrule.errors import ConfigError, InvalidParameterError, ModelFileError, ModelNotFoundError, ModelWriteError

FORMATS = tuple(name for name in QUANTIZATIONS if name not in ("auto", "f32"))
"""Formats that `quantize` can write, widest first."""

_CONFIG = "config.json"
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*", "NOTICE*", "*/config.json", "*/*.jinja")
"""Patterns of the files to copy: everything except weights, including the directories of sentence-transformers and of
chat templates."""
_MAX_COPY_BYTES = 1 << 30
"""Maximum size of a file to copy."""
_OLD = ".old"
"""Suffix of a directory that is being overwritten."""


def quantize(
    model: str | os.PathLike[str] | None,
    output: str | os.PathLike[str],
    *,
    format: str | None = None,  # noqa: A002  # same name as on the command line
    recipe: Recipe | str | os.PathLike[str] | None = None,
    revision: str | None = None,
    threads: int | None = None,
    overwrite: bool = False,
    calibrate: Calibration | None = None,
    calibration_tokens: int = TOKENS,
    sparsity: float | str | None = None,
    pruning: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Writes a model with weights packed as `format` (default int4) into the directory `output`, and returns its path.

    A `recipe`, or the path of its TOML file, gives the format of each matrix instead, such as that of `allocate_bits`;
    the directory then loads as the recipe's base.

    The directory includes the configuration, tokenizer and chat template of the model, of a GGUF file those that its
    metadata has. It loads like any other model, but only as `format`. Weights are packed one matrix at a time, so that
    they need not fit into memory. The directory is written atomically; `overwrite` replaces a directory that `quantize`
    wrote before. With `calibrate`, finished layers are kept beside `output` until all are: the same call continues
    after them if it was interrupted. `progress` is called with the bytes packed so far and the bytes in total.

    `calibrate` is a text file, of which at most `calibration_tokens` tokens are read, or a list of token id sequences,
    such as that of `generate_calibration`. The model runs over them, and GPTQ reduces the error of the integer formats.
    Calibration takes much longer, and needs memory for one layer in full precision, the Hessian of a linear layer, and
    the hidden states of the tokens in the exact and the quantized model. The result is bitwise reproducible on one
    instruction set.

    `sparsity`, a share of zeros or "2:4", sets weights of the linear layers to zero. `pruning` chooses them: sparsegpt,
    wanda or magnitude (default sparsegpt with `calibrate`, else magnitude). Embeddings, the lm_head, routers, norms and
    biases stay as they are, and so do matrices whose inputs are not whole blocks of the format. int8 and int4 become
    sparse formats, which store half of the weights: int4 needs "2:4", int8 "2:4" or a share from 0.5. bf16 and
    f16 stay as large as they are.

    Raises InvalidParameterError for an unknown format, sparsity or method, for a sparsity that fits no matrix, for a
    format beside a recipe, and if `output` is the model's own directory or holds other files;
    ConfigError for an invalid recipe; ModelWriteError if the directory cannot be written; and the errors of loading a
    model and of reading `calibrate`.
    """
    if isinstance(recipe, str | os.PathLike):
        recipe = Recipe.read(recipe)
    if recipe is not None and format is not None:
        raise InvalidParameterError("format", format, "None with recipe, which has a base")
    if format is None:
        format = "int4" if recipe is None else recipe.base  # noqa: A001
    calibrates = calibrate is not None
    if recipe is not None and sparsity is not None:
        raise InvalidParameterError("sparsity", sparsity, "None with recipe")
    pruned = checked_pruning(sparsity, pruning, format=format, calibrates=calibrates)
    files, target = checked_paths(
        model,
        output,
        format=format,
        revision=revision,
        overwrite=overwrite,
        calibrates=calibrates and pruned is None,
    )
    options = EngineOptions(quantization=format, threads=threads)
    sequences = None if calibrate is None else calibration_sequences(calibrate, files, calibration_tokens)
    name = EMBEDDED if model is None else os.fspath(model)
    with _writing(target) as folder:
        packed: dict[str, Any] = {"quant_method": PACKED_METHOD, "format": format}
        if is_gguf(files.path):
            config, form = write_small_files(files, folder)
            packed[GGUF_FORM] = form.to_json()
        else:
            _copy_small_files(files.path, folder)
            config = read_json_object(files.path / _CONFIG)
        config = {**config, "quantization_config": packed}
        (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        packing = _Packing(files, name, options, sequences, recipe, pruned)
        keeping = nullcontext() if sequences is None else kept_layers(target, packing.digest())
        with keeping as kept:
            packing.write(folder / WEIGHTS, kept, progress)
            _replace(target, folder, overwrite=overwrite)
    return target


def unpacked_files(model: str | os.PathLike[str] | None, revision: str | None) -> ModelFiles:
    """Returns the files of a model whose weights can be packed.

    Raises InvalidParameterError for a packed model, and the errors of loading one.
    """
    files = read_model_files(find_model(model, revision))
    if files.packed is not None:
        requirement = f"an unpacked model (this one is packed as {files.packed!r})"
        raise InvalidParameterError("model", str(files.path), requirement)
    return files


def checked_paths(
    model: str | os.PathLike[str] | None,
    output: str | os.PathLike[str],
    *,
    format: str,  # noqa: A002  # that of `quantize`
    revision: str | None,
    overwrite: bool,
    calibrates: bool,
) -> tuple[ModelFiles, Path]:
    """Returns the files of a model and the resolved output directory, after all checks that read no weights.

    Raises InvalidParameterError for a format, model or directory that `quantize` refuses, and the errors of loading a
    model.
    """
    if format not in FORMATS:
        raise InvalidParameterError("format", format, f"one of {', '.join(FORMATS)}")
    if calibrates and not format.startswith("int"):
        raise InvalidParameterError("format", format, "int8 or int4 with calibrate")
    files = unpacked_files(model, revision)
    target = Path(output).expanduser().resolve()
    _check_target(target, files.path.resolve(), overwrite=overwrite)
    return files, target


def pruned_share(path: Path) -> str:
    """Returns how many matrices of a packed model were pruned, and why the first of the others was not."""
    from ferrule import _native

    return _native.PackedFile(str(path / WEIGHTS)).metadata["pruned"]


@dataclass(frozen=True)
class _Packing:
    """Everything that determines the weights of a packed model."""

    files: ModelFiles
    name: str
    options: EngineOptions
    calibration: list[list[int]] | None
    recipe: Recipe | None
    pruning: tuple[str, str] | None

    def write(self, path: Path, kept: Path | None, progress: Callable[[int, int], None] | None) -> None:
        """Packs the weights into a file; `kept` has the layers that an interrupted call has finished."""
        from ferrule import _native

        spec, source = self.files.spec_json, os.fspath(self.files.path)
        metadata = {"model": self.name, "source": self._source()}
        if self.pruning is not None:
            metadata |= dict(zip(("sparsity", "pruning"), self.pruning, strict=True))
        rules = None if self.recipe is None else (self.recipe.name, list(self.recipe.formats.items()))
        _native.pack(
            spec,
            source,
            self.options.to_json(),
            os.fspath(path),
            metadata,
            self.calibration,
            progress,
            rules,
            self.pruning,
            None if kept is None else os.fspath(kept),
        )

    def digest(self) -> str:
        """Returns the digest of everything that determines the weights."""
        from ferrule import _native

        formats = None if self.recipe is None else list(self.recipe.formats.items())
        what = (self._source(), _native.isa(), formats, self.pruning, self.calibration)
        return hashlib.blake2b(json.dumps(what).encode(), digest_size=8).hexdigest()

    def _source(self) -> str:
        return source_digest(self.files.path, self.files.spec_json, self.options.quantization)


def _check_target(target: Path, source: Path, *, overwrite: bool) -> None:
    """Raises InvalidParameterError if writing to `target` would lose data."""
    if target == source or target in source.parents:
        requirement = "a directory other than the model's own and its parents"
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
    is_packed = _is_packed_model(target)
    if not (is_packed and overwrite):
        requirement = (
            "empty, unless overwrite is true (it holds a packed model)"
            if is_packed
            else "empty, or written by ferrule quantize (it holds other files)"
        )
        raise InvalidParameterError("output", str(target), requirement)


def _is_packed_model(directory: Path) -> bool:
    """Whether a directory is a model that `quantize` wrote."""
    try:
        return read_model_files(directory).packed is not None
    except (ConfigError, ModelFileError, ModelNotFoundError):
        return False


@contextmanager
def _writing(target: Path) -> Generator[Path]:
    """Yields a temporary directory beside `target`. Raises ModelWriteError in place of OSError."""
    folder: Path | None = None
    try:
        with temporary_directory(target) as folder:
            yield folder
    except ModelWriteError as error:
        # Name the path that the user gave; the temporary one no longer exists.
        raise ModelWriteError(str(error).replace(os.fspath(folder or target), os.fspath(target))) from error
    except OSError as error:
        if isinstance(error, ModelFileError):
            raise
        raise ModelWriteError(f"{target}: cannot be written: {error.strerror or error}") from error


def _copy_small_files(source: Path, folder: Path) -> None:
    inside = (source.resolve(), *_blobs(source))
    for path in sorted({path for pattern in _COPIED for path in source.glob(pattern)}):
        name = path.relative_to(source)
        if name.name.endswith(".index.json") or name == Path(_CONFIG) or not path.is_file():
            continue
        real = path.resolve()
        if not any(real.is_relative_to(each) for each in inside):
            raise ModelFileError(f"{path}: a link to {real}, which is outside the model directory; it is not copied")
        if (size := real.stat().st_size) > _MAX_COPY_BYTES:
            raise ModelFileError(f"{path} has {size} bytes, more than the limit of {_MAX_COPY_BYTES} for copied files")
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(real, folder / name)


def _blobs(source: Path) -> list[Path]:
    """Returns the target directory of links in a Hugging Face cache snapshot: `models--org--name/blobs`."""
    roots = [parent.parent for parent in source.resolve().parents if parent.name == "snapshots"]
    return [root / "blobs" for root in roots if root.name.startswith("models--")]


def _replace(target: Path, folder: Path, *, overwrite: bool) -> None:
    """Renames the temporary directory to `target`, unless something else was created there meanwhile.

    A directory to overwrite is renamed first, and renamed back if that fails. If the process is killed in between, it
    remains under that name until a later call succeeds.
    """
    for path in [*folder.rglob("*"), folder]:
        _sync(path)
    replaces = overwrite and target.exists() and _is_packed_model(target)
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
    # As `temporary_directory` names them.
    pattern = re.compile(rf"\.{re.escape(target.name)}\.\d+-\d+{re.escape(_OLD)}")
    for replaced in target.parent.iterdir():
        if pattern.fullmatch(replaced.name):
            shutil.rmtree(replaced, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
