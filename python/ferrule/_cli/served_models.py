"""Models of `ferrule serve`: their names in requests, and how they are loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ferrule._cli.model import check_model, download, load_progress
from ferrule._loading import EMBEDDED, find_model, read_model_files
from ferrule._loading.packing import missing_memory
from ferrule._loading.resolve import catalogued, is_repository
from ferrule._params.options import EngineArgs, worker_count

if TYPE_CHECKING:
    from ferrule._api.async_llm import AsyncLLM
    from ferrule.server import OnDemand, ServerSettings


def models_by_name(model: str | None, served_names: Sequence[str], aliases: Sequence[str]) -> dict[str, str | None]:
    """Returns the models by their names in requests.

    Raises click.UsageError.
    """
    models: dict[str, str | None] = {}
    if model is not None or not aliases:
        found = None if model is None else check_model(model)
        models.update(dict.fromkeys(served_names or (EMBEDDED if model is None else short_name(model),), found))
    elif served_names:
        raise click.UsageError("--served-model-name requires MODEL; the names of --model are NAME=MODEL")
    for alias in aliases:
        name, path = pair("--model", alias, "NAME=MODEL")
        if name in models:
            raise click.UsageError(f"--model must have different names, got {name!r} twice")
        models[name] = check_model(path)
    return models


def short_name(model: str) -> str:
    """Returns the name of a model in requests: that of the catalogue, org/repo, or the last part of a path."""
    if (entry := catalogued(model)) is not None:
        return entry.name
    if is_repository(model):
        return model
    path = Path(model).expanduser().absolute()
    return path.stem if path.suffix.lower() == ".gguf" else path.name or model


def pair(option: str, given: str, form: str) -> tuple[str, str]:
    """Returns the name and the value of an option such as `NAME=PATH`.

    Raises click.UsageError.
    """
    name, separator, value = given.partition("=")
    if not (name and separator and value):
        raise click.UsageError(f"{option} must be {form}, got {given!r}")
    return name, value


def on_demand_models(model: str | None, aliases: Sequence[str]) -> set[str]:
    """Returns the models that are loaded when a request first needs them: those of --model, except MODEL itself."""
    return {path for _, path in (pair("--model", alias, "NAME=MODEL") for alias in aliases)} - {model}


def load_models(
    models: Mapping[str, str | None],
    keywords: Mapping[str, Any],
    settings: ServerSettings,
    *,
    on_demand: Set[str] = frozenset(),
    quiet: bool = False,
) -> dict[str, AsyncLLM | OnDemand]:
    """Loads each model once, even if it has several names; those of `on_demand` later, when a request needs them.

    The server loads a model over several workers again if one of them is lost.

    Progress bars are shown if stderr is a terminal; not with `quiet`.

    Raises FerruleError, such as InvalidParameterError for parsers that cannot be derived from a model's chat template.
    """
    from ferrule.server import OnDemand

    loaded: dict[str | None, AsyncLLM | OnDemand] = {}
    adapters = tuple(keywords.get("lora_modules", ()))
    has_workers = worker_count(keywords) > 1
    for path in models.values():
        if path in loaded:
            continue
        load = partial(_load_model, path, keywords, settings, quiet=quiet)
        model = None if path in on_demand else load()
        if model is not None and not has_workers:
            loaded[path] = model
            continue
        # Workers may be on other machines, and a load compares their parts with the memory.
        missing = (lambda: 0) if has_workers else partial(_missing_memory, path, keywords, quiet=quiet)
        loaded[path] = OnDemand(load, path or EMBEDDED, adapters, missing, model)
    return {name: loaded[path] for name, path in models.items()}


def _load_model(path: str | None, keywords: Mapping[str, Any], settings: ServerSettings, *, quiet: bool) -> AsyncLLM:
    """Downloads and loads a model and checks that it has the parsers of the settings.

    Raises FerruleError.
    """
    from ferrule._api.async_llm import AsyncLLM

    download(path, keywords.get("revision"), quiet=quiet)
    with load_progress(quiet=quiet) as progress:
        llm = AsyncLLM(path, progress=progress, **keywords)
    if llm.generates:
        llm.message_format(settings.tool_call_parser, settings.reasoning_parser, chat_template=settings.chat_template)
    return llm


def _missing_memory(path: str | None, keywords: Mapping[str, Any], *, quiet: bool) -> int:
    """Downloads a model; returns the number of bytes by which its weights exceed the available memory.

    Raises FerruleError.
    """
    args = EngineArgs(path, **keywords)
    download(path, args.revision, quiet=quiet)
    files = read_model_files(find_model(path, args.revision)).extended(args.max_model_len)
    return missing_memory(files, str(path), args.for_packed(files.packed, files.path))
