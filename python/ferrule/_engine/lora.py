"""Low-rank adapters (LoRA) of a loaded model, by name."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ferrule._engine.driver import Driver
from ferrule._loading import find_adapter, read_adapter_files
from ferrule._params.lora import LoRARequest, check_adapter_name, check_adapter_path
from ferrule.errors import EngineError, InvalidParameterError

if TYPE_CHECKING:
    from ferrule import _native


@dataclass(frozen=True)
class LoRAAdapter:
    """A loaded adapter."""

    name: str
    """Name that requests use."""
    path: str
    """Path that was given to `load`."""
    rank: int
    """Maximum rank of the adapter's matrices."""
    targets: list[str]
    """Modules that the adapter changes, by the last part of their names, sorted."""
    bytes: int
    """Memory of the adapter, in bytes."""
    base_model: str | None
    """Base model that the adapter's files name; it is not checked, only shapes are."""


class Adapters:
    """The adapters that requests may use.

    A running request keeps its adapter when the name is unloaded; the memory is freed when neither the name nor a
    request uses it.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        """Lock that lets only one of two requests with the same new adapter load it."""
        self._loaded: dict[str, tuple[LoRAAdapter, _native.LoraAdapter]] = {}
        self._closed = False
        _registries.add(self)

    def load(self, name: object, path: object) -> LoRAAdapter:
        """Loads an adapter under a new name.

        Raises InvalidParameterError, ModelNotFoundError, ModelFileError, ConfigError, UnsupportedModelError,
        InsufficientMemoryError, EngineError.
        """
        name, given = check_adapter_name("lora_name", name), check_adapter_path("lora_path", path)
        with self._lock:
            self._check_open()
            if name in self._loaded:
                loaded = self._loaded[name][0].path
                raise InvalidParameterError("lora_name", name, f"a new name (this name is loaded from {loaded!r})")
            return self._load(name, given)[0]

    def load_all(self, modules: object) -> None:
        """Loads the adapters of a mapping from names to paths.

        Raises the errors of `load`.
        """
        if modules is None:
            return
        if not isinstance(modules, Mapping):
            raise InvalidParameterError("lora_modules", modules, "a mapping from adapter names to paths")
        for name, path in cast("Mapping[object, object]", modules).items():
            self.load(name, path)

    def unload(self, name: object) -> None:
        """Unloads an adapter for new requests; running requests keep it.

        Raises InvalidParameterError if no adapter has that name.
        """
        checked = check_adapter_name("lora_name", name)
        if self._loaded.pop(checked, None) is None:
            raise self._unknown("lora_name", checked)

    def all(self) -> list[LoRAAdapter]:
        """Returns the loaded adapters, the oldest first."""
        return [adapter for adapter, _ in list(self._loaded.values())]

    def must_load(self, given: object) -> bool:
        """Returns whether `find` would load files."""
        return isinstance(given, LoRARequest) and given.lora_name not in self._loaded

    def find(self, given: object) -> _native.LoraAdapter | None:
        """Returns the adapter of a request, and loads it if necessary; None for the base model.

        Raises the errors of `load`.
        """
        if given is None:
            return None
        if not isinstance(given, (str, LoRARequest)):
            raise InvalidParameterError("lora_request", given, "the name of an adapter, a LoRARequest, or None")
        self._check_open()
        name = given if isinstance(given, str) else given.lora_name
        path = "" if isinstance(given, str) else os.fspath(given.lora_path)
        found = self._loaded.get(name) or (self._first_use(name, path) if path else None)
        if found is None:
            raise self._unknown("lora_request", name)
        adapter, native = found
        if path and path != adapter.path:
            requirement = f"without a path or with {adapter.path!r}, from which {name!r} was loaded"
            raise InvalidParameterError("lora_request", path, requirement)
        return native

    def close(self) -> None:
        """Unloads all adapters; later requests get an EngineError."""
        self._closed = True
        self._loaded.clear()

    def _first_use(self, name: str, path: str) -> tuple[LoRAAdapter, _native.LoraAdapter]:
        with self._lock:
            return self._loaded.get(name) or self._load(name, path)

    def _load(self, name: str, path: str) -> tuple[LoRAAdapter, _native.LoraAdapter]:
        files = read_adapter_files(find_adapter(path))
        native = self._driver.load_lora(os.fspath(files.directory), files.config.to_json())
        targets = sorted({module.rpartition(".")[2] for module in native.modules})
        adapter = LoRAAdapter(name, path, native.rank, targets, native.bytes, files.base_model)
        self._loaded[name] = adapter, native
        if (
            self._closed
        ):  # `close` ran meanwhile; the check comes last, so that either `close` or this drops the adapter
            self._loaded.clear()
        self._check_open()
        return adapter, native

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")

    def _unknown(self, field: str, name: str) -> InvalidParameterError:
        loaded = ", ".join(sorted(self._loaded)) or "none"
        return InvalidParameterError(field, name, f"the name of a loaded adapter (loaded: {loaded})")

    def after_fork(self) -> None:
        """Replaces the lock in a forked child, where a thread that holds it no longer exists."""
        self._lock = threading.Lock()


_registries: weakref.WeakSet[Adapters] = weakref.WeakSet()


def _after_fork() -> None:
    for registry in list(_registries):
        registry.after_fork()


os.register_at_fork(after_in_child=_after_fork)
