"""Chooses the file that an engine reads weights from: the checkpoint or a packed file in the cache.

The first load of a large model packs its weights into the cache; later loads map that file. Floating-point weights are
not cached, since packing does not shrink them.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ferrule._loading import ModelFiles, is_remote
from ferrule._loading.packed_cache import PackedCache, source_digest, weight_bytes
from ferrule._loading.verification import mark_used, verify
from ferrule._params.options import EngineOptions
from ferrule.errors import ModelFileError, ModelWriteError

SMALLEST = 32 << 20
"""Size in bytes below which a checkpoint is packed at each start, which takes about a second."""
FLOATS = ("f32", "bf16", "f16")

Progress = Callable[[int, int], None]


def weights_of(files: ModelFiles, name: str, options: EngineOptions, progress: Progress | None) -> Path:
    """Returns the path that an engine with these options loads: the packed file or the checkpoint.

    Writes the packed file if the model is large enough; if another process writes it already, waits for that. If it
    cannot be written (full disk, read-only directory), a RuntimeWarning is issued and the engine packs the weights in
    memory.

    With `verify_weights`, a damaged file in the cache is written again; any other damaged packed file is an error.

    Raises the errors of loading a checkpoint: ModelFileError, ConfigError, KeyboardInterrupt.
    """
    if files.packed is not None and options.verify_weights:
        verify(files.weights, threads=_threads(options))
    place = _place(files, name, options)
    if place is None:
        return files.weights
    spec, figures = files.spec_json, place.figures
    if not _is_usable(spec, place.path, options):
        if figures["weight_bytes"] > figures["memory"]["available"] and not options.allow_paging:
            return files.weights  # the engine refuses it with a better message
        try:
            with place.cache.writing(place.path):
                if not _is_usable(spec, place.path, options):  # another process may have written it meanwhile
                    _write(files, place, options, progress)
        except ModelWriteError as error:
            message = f"weights are packed in memory at each start, since the packed file cannot be written: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=3)
            return files.weights
    mark_used(place.cache, place.path)
    return place.path


def missing_memory(files: ModelFiles, name: str, options: EngineOptions) -> int:
    """Returns the number of bytes by which the weights of a model exceed the available memory; 0 if they fit.

    Reads headers only. With `allow_paging` the weights may exceed the memory, so nothing is missing.

    Raises ModelFileError, ConfigError.
    """
    if options.allow_paging:
        return 0
    spec, place, weights = files.spec_json, _place(files, name, options), files.weights
    if place is not None and _is_usable(spec, place.path, replace(options, verify_weights=False)):
        weights = place.path  # mapped, so that the page cache counts as available
    figures = _measure(spec, weights, options)
    return max(figures["weight_bytes"] - figures["memory"]["available"], 0)


@dataclass(frozen=True)
class _Place:
    """Packed file of a model in the cache, whether or not it has been written."""

    cache: PackedCache
    path: Path
    metadata: dict[str, str]
    figures: dict[str, Any]
    """Sizes and memory requirements of the checkpoint."""


def _place(files: ModelFiles, name: str, options: EngineOptions) -> _Place | None:
    """Returns the place of the packed weights of a model; None if the cache does not store them.

    Raises ModelFileError, ConfigError.
    """
    if files.packed is not None or not (options.allow_paging or weight_bytes(files.path) >= SMALLEST):
        return None
    cache = PackedCache.open(options.packed_cache_limit)
    if cache.limit == 0:
        return None
    spec = files.spec_json
    figures = _measure(spec, files.path, options)
    quantization: str = figures["quantization"]
    if quantization in FLOATS and not options.allow_paging:
        return None
    model = name if is_remote(name) else os.fspath(files.path.resolve())
    digest = source_digest(files.path, spec, quantization)
    path = cache.path_of(model, quantization, digest)
    return _Place(cache, path, {"model": model, "source": digest}, figures)


def _write(files: ModelFiles, place: _Place, options: EngineOptions, progress: Progress | None) -> None:
    """Packs the weights of a model into the cache.

    Raises ModelWriteError, ModelFileError, KeyboardInterrupt.
    """
    from ferrule import _native

    figures = place.figures
    place.cache.evict(figures["weight_bytes"] + figures["vector_bytes"] + figures["table_bytes"])
    spec, source, path = files.spec_json, os.fspath(files.path), os.fspath(place.path)
    _native.pack(spec, source, options.to_json(), path, place.metadata, progress=progress)


def _measure(spec: str, weights: Path, options: EngineOptions) -> dict[str, Any]:
    """Returns the sizes and the memory requirements of weights."""
    from ferrule import _native

    return json.loads(_native.measure(spec, os.fspath(weights), options.to_json()))


def _is_usable(spec: str, path: Path, options: EngineOptions) -> bool:
    """Whether a packed file exists and has all tensors of the spec; with `verify_weights`, checksums must match."""
    if not path.is_file():
        return False
    try:
        _measure(spec, path, options)
        if options.verify_weights:
            verify(path, threads=_threads(options))
    except ModelFileError:
        return False
    return True


def _threads(options: EngineOptions) -> int:
    from ferrule import _native

    return options.threads or _native.cpu_count()
