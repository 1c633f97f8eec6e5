"""Downloaded models of all sources: the hub's cache, and models from packages."""

from __future__ import annotations

from collections.abc import Iterable

from ferrule._loading.catalogue import catalogue, find_entry
from ferrule._loading.hub_cache import Download, find_in_hub, hub_models, remove_from_hub
from ferrule._loading.packages import packaged_models, remove_packaged


def downloads() -> list[Download]:
    """Returns all downloaded models, most recently used first.

    Raises ConfigError, ModelFileError for an invalid catalogue of the user.
    """
    return sorted([*hub_models(), *packaged_models()], key=lambda each: -each.last_used)


def find_downloads(name: str, among: Iterable[Download]) -> list[Download]:
    """Returns the downloads that match a name of the catalogue or of the hub.

    `org/repo` matches all models of the repository, `org/repo:Q4` the model that this name loads.

    Raises ConfigError, ModelFileError for an invalid catalogue of the user.
    """
    entry = find_entry(name)
    if entry is None:
        return find_in_hub(name, among)
    if entry.packages:
        return [each for each in among if each.name == entry.name]
    if entry.repository is None:  # a local path is never removed
        return []
    return find_in_hub(f"{entry.repository}:{entry.file}" if entry.file else entry.repository, among)


def remove_downloads(removed: Iterable[Download]) -> None:
    """Removes models from the caches; programs that have a file open can still read it.

    Raises OSError.
    """
    removed, entries = list(removed), catalogue()
    packaged = [entry for each in removed if (entry := entries.get(each.name)) is not None and entry.packages]
    for entry in packaged:
        remove_packaged(entry)
    names = {entry.name for entry in packaged}
    remove_from_hub(each for each in removed if each.name not in names)
