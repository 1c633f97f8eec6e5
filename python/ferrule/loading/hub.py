"""Models of the Hugging Face hub, through its own library: cache, HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN."""

from __future__ import annotations

from pathlib import Path

from ferrule.errors import ModelFileError, ModelNotFoundError

SMALL = ["*.json", "*.jinja", "*.txt"]
"""What says what a model is."""
WEIGHTS = ["*.safetensors"]
"""Never pickle: loading one runs code."""
IGNORED = ["[!0-9]*/*", "?[!_]*/*", "consolidated*"]
"""Other formats in subdirectories, but not those of sentence-transformers (`1_Pooling`), and the same weights once more
in Mistral's own layout."""


def fetch(repository: str, revision: str | None, *, weights: bool = True) -> Path:
    """The directory of a repository in the cache; what is not there yet is downloaded, of `weights` if they are wanted.

    Raises ModelNotFoundError, ModelFileError.
    """
    from huggingface_hub import (
        constants,
        errors,
        snapshot_download,  # pyright: ignore[reportUnknownVariableType]
    )

    wanted = repository if revision is None else f"{repository}@{revision}"
    tried = f"tried the directory {Path(repository).absolute()} and {constants.ENDPOINT}/{repository}"
    try:
        allowed = [*SMALL, *(WEIGHTS if weights else [])]
        directory = snapshot_download(repository, revision=revision, allow_patterns=allowed, ignore_patterns=IGNORED)
    except errors.GatedRepoError as error:
        raise ModelNotFoundError(
            f"{wanted}: access to it must be granted; ask for it at {constants.ENDPOINT}/{repository} "
            "and set HF_TOKEN to a token that has it"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFoundError(f"{wanted}: the repository has no such revision; {tried}") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"{wanted}: no such model, or a private one (then set HF_TOKEN to a token that may read it); {tried}"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        if constants.is_offline_mode():
            raise ModelNotFoundError(
                f"{wanted}: not whole in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE forbids the network"
            ) from error
        raise ModelNotFoundError(
            f"{wanted}: not whole in the cache {constants.HF_HUB_CACHE}, and the hub cannot be reached "
            f"({error.__cause__ or error}); {tried}"
        ) from error
    except Exception as error:  # the library's HTTP client and its transfer library have classes of their own
        raise ModelFileError(f"{wanted}: {type(error).__name__}: {error}") from error
    return Path(directory)
