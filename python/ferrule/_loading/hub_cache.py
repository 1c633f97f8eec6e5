"""Models in huggingface_hub's cache, which other programs share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from ferrule._loading.gguf_files import choose_model, models_in
from ferrule.errors import ModelNotFoundError

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo


@dataclass(frozen=True)
class Download:
    """A downloaded model: a whole repository, or one of its GGUF models."""

    name: str
    """Name under which the model loads: `org/repo`, `org/repo:Q4_K_M`, or a name of the catalogue."""
    repository: str
    """Repository of the hub, or the source of packages."""
    bytes: int
    last_used: float
    """Time of last access in seconds since 1970, if the file system records it."""
    files: tuple[str, ...] = field(default=(), repr=False)
    """Parts of a GGUF model, or the path of a model from packages; empty for a whole repository."""


def hub_models() -> list[Download]:
    """Returns the models in the cache of the hub."""
    return [each for repository in _repositories() for each in _downloads(repository)]


def find_in_hub(name: str, among: Iterable[Download]) -> list[Download]:
    """Returns the downloads that match a name: all of `org/repo`, or the model that `org/repo:Q4` loads."""
    repository, _, quantization = name.partition(":")
    there = [each for each in among if each.repository == repository]
    if not quantization:
        return there
    try:
        parts = choose_model([file for each in there for file in each.files], quantization, repository)
    except ModelNotFoundError:
        return []
    return [each for each in there if set(each.files) == set(parts)]


def remove_from_hub(removed: Iterable[Download]) -> None:
    """Removes models from the cache; a repository whose last model is removed is removed completely.

    Programs that have a file open can still read it.

    Raises OSError.
    """
    from huggingface_hub import scan_cache_dir

    by_repository: dict[str, list[Download]] = {}
    for each in removed:
        by_repository.setdefault(each.repository, []).append(each)
    repositories = {repository.repo_id: repository for repository in _repositories()}
    for name, gone in by_repository.items():
        if name not in repositories:  # another process removed it
            continue
        repository = repositories[name]
        left = {each.name for each in _downloads(repository)} - {each.name for each in gone}
        if left:
            _remove_files(repository, {file for each in gone for file in each.files})
        else:
            commits = [revision.commit_hash for revision in repository.revisions]
            scan_cache_dir().delete_revisions(*commits).execute()


def _repositories() -> list[CachedRepoInfo]:
    from huggingface_hub import errors, scan_cache_dir

    try:
        repositories = scan_cache_dir().repos
    except errors.CacheNotFound:
        return []
    return [repository for repository in repositories if repository.repo_type == "model"]


def _downloads(repository: CachedRepoInfo) -> list[Download]:
    """Returns one download for a repository with safetensors files, else one for each GGUF model."""
    files = {_path(file.file_path): file for revision in repository.revisions for file in revision.files}
    if any(name.endswith(".safetensors") for name in files):
        name = repository.repo_id
        return [Download(name, name, repository.size_on_disk, repository.last_accessed)]
    models = models_in(files)
    return [
        Download(
            f"{repository.repo_id}:{_quantization(model, files)}",
            repository.repo_id,
            sum(files[part].size_on_disk for part in parts),
            max(files[part].blob_last_accessed for part in parts),
            tuple(parts),
        )
        for model, parts in models.items()
    ]


def _path(path: Path) -> str:
    """Returns the path within the repository of a file in `snapshots/<commit>/`."""
    parts = path.parts
    return PurePosixPath(*parts[len(parts) - parts[::-1].index("snapshots") + 1 :]).as_posix()


def _quantization(model: str, files: Iterable[str]) -> str:
    """Returns the shortest suffix that identifies a GGUF model among the files, or else its whole name."""
    files = list(files)
    name = PurePosixPath(model).name
    for short in (name.rsplit("-", 1)[-1], name):
        try:
            if choose_model(files, short, "") == models_in(files)[model]:
                return short
        except ModelNotFoundError:
            continue
    return model


def _remove_files(repository: CachedRepoInfo, names: set[str]) -> None:
    every = [file for revision in repository.revisions for file in revision.files]
    gone = [file for file in every if _path(file.file_path) in names]
    kept = {file.blob_path for file in every if file not in gone}
    for file in gone:
        file.file_path.unlink(missing_ok=True)
        if file.blob_path not in kept:
            file.blob_path.unlink(missing_ok=True)
