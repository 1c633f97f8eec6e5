"""Selects a GGUF model in a folder or repository, which has one for each quantization, some in several parts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from ferrule.errors import ModelFileError, ModelNotFoundError

_PART = re.compile(r"-\d{5}-of-\d{5}$", re.ASCII)
_PROJECTORS = "mmproj"
"""File name prefix of vision and audio projectors, which are not models."""
MOST_LISTED = 40
"""Maximum number of models that a message lists."""


def models_in(files: Iterable[str]) -> dict[str, list[str]]:
    """Returns the parts of each model, in order, by the model's name without `-00001-of-00003.gguf`."""
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        path = PurePosixPath(file)
        if path.suffix.lower() == ".gguf" and not path.name.lower().startswith(_PROJECTORS):
            models.setdefault(_PART.sub("", file[: -len(path.suffix)]), []).append(file)
    return models


def choose_model(files: Iterable[str], quantization: str, of: str) -> list[str]:
    """Returns the parts of the model with a quantization suffix (case-insensitive) or with this file name.

    If several match, the shortest name wins: `model-Q4_K_M` rather than `model-UD-Q4_K_M`.

    Raises ModelNotFoundError, which lists the models of the folder or repository `of`.
    """
    models = models_in(files)
    wanted = quantization.lower()
    ending = re.compile(rf"(?:^|.*[-._/]){re.escape(wanted)}$")
    exact = [
        name for name in models if wanted.removesuffix(".gguf") in (name.lower(), PurePosixPath(name).name.lower())
    ]
    found = exact or [name for name in models if ending.fullmatch(name.lower())]
    shortest = min(found, key=len, default="")
    before = shortest[: len(shortest) - len(wanted)].lower()
    if found and all(name.lower().startswith(before) for name in found):
        return models[shortest]
    if found:
        raise ModelNotFoundError(
            f"{of}:{quantization}: several files match ({_listed(found)}); give a longer part of the name"
        )
    raise ModelNotFoundError(f"{of}:{quantization}: no such file; available: {_listed(models)}")


def only_model(directory: Path) -> Path | None:
    """Returns the GGUF file of a directory, or its first part; None without GGUF files.

    Raises ModelFileError if there are several models.
    """
    models = models_in(file.name for file in directory.iterdir())
    if not models:
        return None
    if len(models) > 1:
        raise ModelFileError(f"{directory}: has several GGUF models; give the path of one of them: {_listed(models)}")
    (parts,) = models.values()
    return directory / parts[0]


def _listed(names: Iterable[str]) -> str:
    listed = sorted(f"{name}.gguf" for name in names)
    more = f" and {len(listed) - MOST_LISTED} more" if len(listed) > MOST_LISTED else ""
    return ", ".join(listed[:MOST_LISTED]) + more if listed else "no GGUF files"
