"""Resolves the name of a model or adapter to its directory or file."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import cast

from ferrule._loading.gguf import is_gguf
from ferrule._loading.gguf_files import only_model
from ferrule.errors import InvalidParameterError, ModelFileError, ModelNotFoundError

EMBEDDED = "tiny"
"""Name of the embedded model, which is the default model."""
CONFIG = "config.json"

_REPOSITORY = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([\w./-]+))?", re.ASCII)
"""Pattern of `org/repo` with an optional quantization of its GGUF files."""


def find_model(model: str | os.PathLike[str] | None, revision: str | None = None, *, weights: bool = True) -> Path:
    """Returns the directory or GGUF file of a model: embedded, local, or downloaded from the hub.

    Without `weights` only configuration files are downloaded. `org/repo:Q4_K_M` is the GGUF file with that
    quantization, which is downloaded only with `weights`.

    Raises ModelNotFoundError, which lists the tried locations; ModelFileError for an unreadable path.
    """
    name, path = _named("model", EMBEDDED if model is None else model)
    if name == EMBEDDED:
        path = Path(__file__).parent.parent / "models" / EMBEDDED
    if is_repository(name):
        return _fetched(name, revision, weights=weights)
    if revision is not None:
        raise InvalidParameterError(
            "revision", revision, f"left out for {name!r}; only models of the hub have revisions"
        )
    if is_gguf(path) and path.exists():
        return path
    directory = _local(
        path,
        name,
        "config.json and the weights, or a GGUF file",
        f"omit the model, or give {EMBEDDED!r}, for the one that ships with ferrule",
    )
    if (directory / CONFIG).exists() or (directory / CONFIG).is_symlink():
        return directory
    return only_model(directory) or directory


def _fetched(name: str, revision: str | None, *, weights: bool) -> Path:
    from ferrule._loading.hub import fetch, fetch_gguf, gguf_models

    match = _REPOSITORY.fullmatch(name)
    assert match is not None  # noqa: S101  # checked by the caller
    repository, quantization = match.groups()
    if quantization is not None:
        return fetch_gguf(repository, quantization, revision, weights=weights)
    directory = fetch(repository, revision, weights=weights)
    if not (directory / CONFIG).exists() and (models := gguf_models(repository, revision)):
        raise ModelNotFoundError(
            f"{name}: has GGUF files and no {CONFIG}; select one by its quantization, as in {name}:Q4_K_M: "
            f"{', '.join(models)}"
        )
    return directory


def find_adapter(adapter: str | os.PathLike[str]) -> Path:
    """Returns the directory of an adapter: local, or downloaded from the hub.

    Raises the errors of `find_model`.
    """
    name, path = _named("lora_path", adapter)
    if is_repository(name):
        from ferrule._loading.hub import fetch

        return fetch(name, None)
    return _local(
        path, name, "adapter_config.json and the tensors", "give a directory that PEFT's save_pretrained wrote"
    )


def _named(field: str, given: object) -> tuple[str, Path]:
    """Returns a name as text and as a path."""
    try:
        name: object = os.fspath(cast("os.PathLike[str]", given))
    except TypeError:
        name = None
    if not isinstance(name, str):  # a path may be bytes too
        raise InvalidParameterError(field, given, "a string or a path")
    if "\0" in name or not name:
        raise ModelNotFoundError(f"invalid model name: {name!r}")
    try:
        return name, Path(name).expanduser()
    except RuntimeError as error:  # ~user with an unknown user
        raise ModelNotFoundError(f"{name!r}: {error}") from None


def is_repository(name: str) -> bool:
    """Whether a name is a repository on the hub: org/repo with an optional quantization, and not a local path."""
    return _REPOSITORY.fullmatch(name) is not None and not Path(name).exists()


def _local(path: Path, name: str, content: str, advice: str) -> Path:
    try:
        if path.is_dir():
            os.scandir(path).close()
            return path
        exists = path.exists()
    except OSError as error:
        raise ModelFileError(f"{path}: {error.strerror}") from error
    if exists:
        raise ModelFileError(f"{path}: must be a directory with {content}, got a file")
    raise ModelNotFoundError(
        f"{name!r} not found: no directory {path.absolute()}, and the name is not org/repo; {advice}"
    )
