"""Chooses the file that an engine reads weights from: the checkpoint or a packed file in the cache.

The first load of a large model packs its weights into the cache; later loads map that file. Floating-point weights are
not cached, since packing does not shrink them.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
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

    Writes the packed file if the model is large enough. If it cannot be written (full disk, read-only directory), a
    RuntimeWarning is issued and the engine packs the weights in memory.

    With `verify_weights`, a damaged file in the cache is written again; any other damaged packed file is an error.

    Raises the errors of loading a checkpoint: ModelFileError, ConfigError, KeyboardInterrupt.
    """
    if files.packed is not None and options.verify_weights:
        verify(files.weights, threads=_threads(options))
    if files.packed is not None or not (options.allow_paging or weight_bytes(files.path) >= SMALLEST):
        return files.weights
    cache = PackedCache.open(options.packed_cache_limit)
    if cache.limit == 0:
        return files.weights
    from ferrule import _native

    spec, source = files.spec.to_json(), os.fspath(files.path)
    figures: dict[str, Any] = json.loads(_native.measure(spec, source, options.to_json()))
    quantization: str = figures["quantization"]
    if quantization in FLOATS and not options.allow_paging:
        return files.weights
    model = name if is_remote(name) else os.fspath(files.path.resolve())
    digest = source_digest(files.path, spec, quantization)
    path = cache.path_of(model, quantization, digest)
    if not _is_usable(spec, path, options):
        if figures["weight_bytes"] > figures["memory"]["available"] and not options.allow_paging:
            return files.weights  # the engine refuses it with a better message
        try:
            cache.prepare(figures["weight_bytes"] + figures["vector_bytes"] + figures["table_bytes"])
            metadata = {"model": model, "source": digest}
            _native.pack(spec, source, options.to_json(), os.fspath(path), metadata, progress=progress)
        except ModelWriteError as error:
            message = f"weights are packed in memory at each start, since the packed file cannot be written: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=3)
            return files.weights
    mark_used(cache, path)
    return path


def _is_usable(spec: str, path: Path, options: EngineOptions) -> bool:
    """Whether a packed file exists and has all tensors of the spec; with `verify_weights`, checksums must match."""
    from ferrule import _native

    if not path.is_file():
        return False
    try:
        _native.measure(spec, os.fspath(path), options.to_json())
        if options.verify_weights:
            verify(path, threads=_threads(options))
    except ModelFileError:
        return False
    return True


def _threads(options: EngineOptions) -> int:
    from ferrule import _native

    return options.threads or _native.cpu_count()
