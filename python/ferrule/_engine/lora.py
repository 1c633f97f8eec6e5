"""The low-rank adapters of a loaded model: by name, and each request with its own."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, cast

from ferrule._engine.driver import Driver
from ferrule._loading import find_adapter, read_adapter_files
from ferrule._validation import shown
from ferrule.errors import EngineError, InvalidParameterError

if TYPE_CHECKING:
    from ferrule import _native

MAX_NAME_LENGTH = 256
"""Characters of an adapter's name."""


@dataclass(frozen=True)
class LoRARequest:
    """An adapter for a request, by name and path: loaded when it is first asked for, as in vLLM.

    Raises InvalidParameterError.
    """

    lora_name: str
    lora_int_id: int = 0
    """vLLM's number; here an adapter is known by its name alone."""
    lora_path: str | os.PathLike[str] = ""
    """A directory or `org/repo`; needed where no adapter of that name is loaded."""

    def __post_init__(self) -> None:
        _check_name("lora_name", self.lora_name)
        if not isinstance(cast("object", self.lora_int_id), int):
            raise InvalidParameterError(
                f"lora_int_id is {shown(self.lora_int_id)}; it must be a whole number (a path goes to lora_path)"
            )
        _check_path("lora_path", self.lora_path)


LoRA: TypeAlias = str | LoRARequest
"""An adapter for a request: the name of one that is loaded, or name and path."""


@dataclass(frozen=True)
class LoRAAdapter:
    """An adapter that is loaded."""

    name: str
    path: str
    """As it was given."""
    rank: int
    """The largest of its matrices."""
    targets: list[str]
    """What it changes: the last parts of modules' names, sorted."""
    bytes: int
    """Of memory."""
    base_model: str | None
    """What its authors called the model that it is for; whether that is this one, only its shapes can tell."""


class Adapters:
    """The adapters that requests may name.

    A request that was let in keeps its adapter to its end, whatever happens to the name; the memory is free once
    neither name nor request holds it.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        """Held while one is loaded, so that two requests with the same new name load it once."""
        self._loaded: dict[str, tuple[LoRAAdapter, _native.LoraAdapter]] = {}
        self._closed = False
        _registries.add(self)

    def load(self, name: object, path: object) -> LoRAAdapter:
        """Loads an adapter under a name that no other has.

        Raises InvalidParameterError, ModelNotFoundError, ModelFileError, ConfigError, UnsupportedModelError,
        InsufficientMemoryError, EngineError.
        """
        name, given = _check_name("lora_name", name), _check_path("lora_path", path)
        with self._lock:
            self._check_open()
            if name in self._loaded:
                raise InvalidParameterError(
                    f"lora_name is {name!r}; an adapter of that name is loaded, from {self._loaded[name][0].path!r}"
                )
            return self._load(name, given)[0]

    def load_all(self, modules: object) -> None:
        """Loads the adapters of a mapping from names to paths; as `load`."""
        if modules is None:
            return
        if not isinstance(modules, Mapping):
            raise InvalidParameterError(
                f"lora_modules is {shown(modules)}; it must be a mapping from names of adapters to paths"
            )
        for name, path in cast("Mapping[object, object]", modules).items():
            self.load(name, path)

    def unload(self, name: object) -> None:
        """Takes an adapter's name away. New requests cannot have it; those that have it go on.

        Raises InvalidParameterError where no adapter has that name.
        """
        checked = _check_name("lora_name", name)
        if self._loaded.pop(checked, None) is None:
            raise self._unknown("lora_name", checked)

    def all(self) -> list[LoRAAdapter]:
        """Those that are loaded, the oldest first."""
        return [adapter for adapter, _ in list(self._loaded.values())]

    def must_load(self, given: object) -> bool:
        """Whether `find` would take its time."""
        return isinstance(given, LoRARequest) and given.lora_name not in self._loaded

    def find(self, given: object) -> _native.LoraAdapter | None:
        """The adapter that a request asks for, loaded if need be; None for the base.

        Raises as `load`.
        """
        if given is None:
            return None
        if not isinstance(given, (str, LoRARequest)):
            limit = "the name of an adapter, a LoRARequest, or None"
            raise InvalidParameterError(f"lora_request is {shown(given)}; it must be {limit}")
        self._check_open()
        name = given if isinstance(given, str) else given.lora_name
        path = "" if isinstance(given, str) else os.fspath(given.lora_path)
        found = self._loaded.get(name) or (self._first_use(name, path) if path else None)
        if found is None:
            raise self._unknown("lora_request", name)
        adapter, native = found
        if path and path != adapter.path:
            raise InvalidParameterError(
                f"lora_request names the adapter {name!r} with the path {path!r}; it was loaded from {adapter.path!r}"
            )
        return native

    def close(self) -> None:
        """Lets go of all; later requests get an EngineError."""
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
        if self._closed:  # meanwhile; looked at last, so that one of the two, this or `close`, lets go of it
            self._loaded.clear()
        self._check_open()
        return adapter, native

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")

    def _unknown(self, field: str, name: str) -> InvalidParameterError:
        known = ", ".join(sorted(self._loaded)) or "none"
        return InvalidParameterError(f"{field} is {shown(name)}; it must be the name of a loaded adapter ({known})")

    def after_fork(self) -> None:
        """In the child: a lock held by a thread that was not copied would never open."""
        self._lock = threading.Lock()


def _check_name(field: str, name: object) -> str:
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_LENGTH:
        limit = f"a string of 1 to {MAX_NAME_LENGTH} characters"
        raise InvalidParameterError(f"{field} is {shown(name)}; it must be {limit}")
    return name


def _check_path(field: str, path: object) -> str:
    given = os.fspath(cast("os.PathLike[str]", path)) if isinstance(path, os.PathLike) else path
    if not isinstance(given, str):
        raise InvalidParameterError(f"{field} is {shown(given)}; it must be a string or a path")
    return given


_registries: weakref.WeakSet[Adapters] = weakref.WeakSet()


def _after_fork() -> None:
    for registry in list(_registries):
        registry.after_fork()


os.register_at_fork(after_in_child=_after_fork)
