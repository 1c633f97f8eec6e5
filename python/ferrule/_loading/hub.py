"""Downloads from the Hugging Face hub with huggingface_hub, its cache and its environment variables."""

from __future__ import annotations

import threading
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

from ferrule._loading.gguf_files import choose_model, models_in
from ferrule.errors import ModelFileError, ModelNotFoundError

SMALL = ["*.json", "*.jinja", "*.txt"]
"""Configuration and tokenizer files."""
WEIGHTS = ["*.safetensors"]
"""Weight files. Pickle files are excluded, since loading a pickle runs code."""
IGNORED = ["[!0-9]*/*", "?[!_]*/*", "consolidated*"]
"""Excluded files: subdirectories with other formats (not sentence-transformers' `1_Pooling`), and copies in Mistral's
layout."""


def fetch(repository: str, revision: str | None, *, weights: bool = True) -> Path:
    """Downloads a repository, without `weights` only its configuration, and returns its directory in the cache.

    Raises ModelNotFoundError, ModelFileError.
    """
    with _explained(repository, revision):
        return _snapshot(repository, revision, [*SMALL, *(WEIGHTS if weights else [])], IGNORED)


def fetch_gguf(repository: str, quantization: str, revision: str | None, *, weights: bool = True) -> Path:
    """Downloads a GGUF model with this quantization and returns its file, or its first part.

    Without `weights` nothing is downloaded, since a GGUF holds everything in one file.

    Raises ModelNotFoundError, which lists the available files; ModelFileError.
    """
    from huggingface_hub import constants

    parts = choose_model(_files(repository, revision), quantization, repository)
    directory = _cached(repository, revision)
    if weights and not constants.HF_HUB_OFFLINE:
        with _explained(repository, revision):
            directory = _snapshot(repository, revision, parts)
    for part in parts:
        if directory is None or not (directory / part).exists():
            raise ModelNotFoundError(
                f"{repository}:{quantization}: {part} is not in the cache {constants.HF_HUB_CACHE}; download it first "
                f"(ferrule pull {repository}:{quantization}), since a GGUF file holds its own configuration"
            )
    assert directory is not None  # noqa: S101  # there are parts
    return directory / parts[0]


def gguf_models(repository: str, revision: str | None) -> list[str]:
    """Returns the first file of each GGUF model of a repository.

    Raises ModelNotFoundError, ModelFileError.
    """
    return [parts[0] for parts in models_in(_files(repository, revision)).values()]


def _snapshot(repository: str, revision: str | None, allowed: list[str], ignored: list[str] | None = None) -> Path:
    """Downloads files in a thread, so that Ctrl-C interrupts a file in progress.

    The library alone would finish the file first. Complete files stay in the cache.
    """
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]
    from huggingface_hub.utils import tqdm

    interrupted = threading.Event()

    class Bar(tqdm):
        def update(self, n: float | None = 1) -> bool | None:
            if interrupted.is_set():
                raise InterruptedError("the download was interrupted")
            return super().update(n)

    done: Future[str] = Future()

    def download() -> None:
        try:
            path = snapshot_download(
                repository, revision=revision, allow_patterns=allowed, ignore_patterns=ignored, tqdm_class=Bar
            )
            done.set_result(path)
        except BaseException as error:  # the waiting thread raises it
            done.set_exception(error)

    threading.Thread(target=download, name="ferrule-download", daemon=True).start()
    try:
        return Path(done.result())
    except KeyboardInterrupt:
        interrupted.set()
        raise


def _files(repository: str, revision: str | None) -> list[str]:
    """Returns the paths of a repository's files; in offline mode those in the cache."""
    from huggingface_hub import HfApi, constants

    if not constants.HF_HUB_OFFLINE:
        with _explained(repository, revision):
            return HfApi().list_repo_files(repository, revision=revision)
    directory = _cached(repository, revision)
    files = [] if directory is None else [file for file in directory.rglob("*") if file.is_file()]
    return [file.relative_to(directory).as_posix() for file in files if directory is not None]


def _cached(repository: str, revision: str | None) -> Path | None:
    """Returns the directory of a repository's files in the cache; None if the cache has none."""
    from huggingface_hub import errors, snapshot_download  # pyright: ignore[reportUnknownVariableType]

    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=[], local_files_only=True))
    except errors.LocalEntryNotFoundError:
        return None


@contextmanager
def _explained(repository: str, revision: str | None) -> Generator[None]:
    """Converts the library's exceptions to errors that list the tried locations."""
    from huggingface_hub import constants, errors

    wanted = repository if revision is None else f"{repository}@{revision}"
    tried = f"tried the directory {Path(repository).absolute()} and {constants.ENDPOINT}/{repository}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise ModelNotFoundError(
            f"{wanted}: access to this model is restricted; request it at {constants.ENDPOINT}/{repository} "
            "and set HF_TOKEN to a token of your account"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFoundError(f"{wanted}: the repository does not have this revision; {tried}") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"{wanted}: model not found; if it is private, set HF_TOKEN to a token with access; {tried}"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            raise ModelNotFoundError(
                f"{wanted}: incomplete or missing in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE "
                "disables the network"
            ) from error
        raise ModelNotFoundError(
            f"{wanted}: incomplete or missing in the cache {constants.HF_HUB_CACHE}, and the hub is unreachable "
            f"({error.__cause__ or error}); {tried}"
        ) from error
    except ModelNotFoundError:
        raise
    except Exception as error:  # the HTTP client and the transfer library raise other classes
        raise ModelFileError(f"{wanted}: {type(error).__name__}: {error}") from error
