"""`Models`: the models of a server by name. A model may have several names; adapters have names too.

A model is given loaded, or as `OnDemand`, which is loaded when a request first needs it (`residency.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from ferrule._api.async_llm import AsyncLLM
from ferrule._validation import shown
from ferrule.errors import EngineError
from ferrule.server.errors import ApiError
from ferrule.server.residency import Entry, OnDemand, Residency

UNKNOWN_MAX_NUM_SEQS = 16
"""Sequences that a model is assumed to run at once before it is first loaded."""


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A loaded model or an adapter under one of its names, for a request that holds a lease."""

    name: str
    llm: AsyncLLM
    entry: Entry
    models: Models
    """All models of the server."""
    adapter: str | None = None
    """Name of the LoRA adapter; None for the model itself."""

    def check_loaded(self) -> None:
        """Raises ApiError for an adapter that was unloaded meanwhile."""
        if self.adapter is not None and all(each.name != self.adapter for each in self.llm.lora_adapters()):
            raise self.models.unknown(self.name)

    @property
    def info(self) -> dict[str, Any]:
        """The result of `AsyncLLM.info`."""
        return self.entry.info or {}

    def token_bytes(self, token_id: int) -> list[int] | None:
        """Returns the bytes of a token; None for a token without bytes."""
        found = self.llm.token_bytes(token_id)
        return None if found is None else list(found)

    @contextmanager
    def hold(self) -> Generator[None]:
        """Keeps the model loaded while the context is active, also after the lease of the request has ended."""
        with self.models.residency.hold(self.entry):
            yield


class ModelName(NamedTuple):
    """A valid name in requests: that of a model, loaded or not, or of an adapter."""

    name: str
    entry: Entry
    adapter: str | None = None


class Models:
    """The models by name, in order. The first serves requests that name no model.

    The server may start before it has models: until `ready`, requests are answered with 503. Two names may refer to one
    AsyncLLM or OnDemand.
    """

    def __init__(
        self, models: Mapping[str, AsyncLLM | OnDemand] | None = None, *, listed: Sequence[str] | None = None
    ) -> None:
        """Sets the models, if they are given.

        `listed` are the names that the error for an unknown one lists: those of all servers behind a router. The
        default is the names of this server.
        """
        self._models: dict[str, ModelName] = {}
        self.residency = Residency()
        """Loads and unloads the models."""
        self.created = int(time.time())
        """Time of creation, in seconds since 1970."""
        self.draining = False
        """Whether the server is shutting down and refuses new requests."""
        self._listed = listed
        if models is not None:
            self.set(models)

    @property
    def ready(self) -> bool:
        """Whether requests are served. Models that are loaded on demand need not be loaded for that."""
        return bool(self._models)

    @property
    def capacity(self) -> int:
        """Number of sequences that all engines together run and queue."""
        return sum(entry.capacity for entry in self.entries)

    @property
    def max_num_seqs(self) -> int:
        """Largest number of sequences that an engine runs at once."""
        known = [entry.info["max_num_seqs"] for entry in self.entries if entry.info is not None]
        return max(known, default=UNKNOWN_MAX_NUM_SEQS)

    @property
    def entries(self) -> list[Entry]:
        """Each model once."""
        return self.residency.entries

    def set(self, models: Mapping[str, AsyncLLM | OnDemand]) -> None:
        """Sets the models."""
        entries: dict[int, Entry] = {}
        for name, model in models.items():
            if id(model) not in entries:
                entries[id(model)] = Entry(name, model)
        self._models = {name: ModelName(name, entries[id(model)]) for name, model in models.items()}
        self.residency.entries = list(entries.values())

    def engines(self) -> list[ServedModel]:
        """Returns each loaded model once, under the first of its names."""
        return [ServedModel(entry.name, entry.llm, entry, self) for entry in self.entries if entry.llm is not None]

    def all(self) -> Iterable[ModelName]:
        """Yields all names: the models', then their adapters'."""
        yield from self._models.values()
        for entry in self.entries:
            for adapter in entry.adapter_names:
                if adapter not in self._models:
                    yield ModelName(adapter, entry, adapter)

    def find(self, name: str | None) -> ModelName:
        """Returns the model of a name, which need not be loaded; the first model for None.

        Raises ApiError.
        """
        if not self._models:
            raise ApiError(503, "the models are still loading", code="loading")
        if name is None:
            return next(iter(self._models.values()))
        for each in self.all():
            if each.name == name:
                return each
        raise self.unknown(name)

    @asynccontextmanager
    async def lease(self, name: str | None, keep_alive: float | None = None) -> AsyncGenerator[ServedModel]:
        """Keeps the model of a name loaded while the context is active; loads it first if necessary.

        `keep_alive` is the number of seconds for which it stays loaded afterwards; None keeps its present value.

        Raises ApiError, EngineError.
        """
        found = self.find(name)
        async with self.residency.lease(found.entry, keep_alive) as llm:
            yield self.served(found, llm)

    def served(self, found: ModelName, llm: AsyncLLM) -> ServedModel:
        """Returns a loaded model under one of its names."""
        return ServedModel(found.name, llm, found.entry, self, found.adapter)

    def unknown(self, name: str) -> ApiError:
        """Returns the error for a name that no model has."""
        known = ", ".join(self._listed or [each.name for each in self.all()])
        message = f"unknown model {shown(name)}; choose one of: {known}"
        return ApiError(404, message, code="model_not_found", param="model")

    async def drain(self, timeout: float) -> None:
        """Refuses new requests; running ones have `timeout` seconds to finish and are then aborted."""
        self.draining = True
        self.residency.stop_loading()
        await asyncio.gather(*(served.llm.drain(timeout) for served in self.engines()))

    async def aclose(self) -> None:
        """Closes the models that were loaded on demand; the others belong to those who have given them."""
        await self.residency.aclose()

    async def check_health(self) -> None:
        """Raises ApiError while the models load, while the server drains, or where an engine has failed.

        Models that are loaded on demand need not be loaded.
        """
        if self.draining:
            raise ApiError(503, "the server is shutting down and accepts no new requests", code="draining")
        if not self._models:
            raise ApiError(503, "the models are still loading", code="loading")
        failed: list[str] = []
        for entry in self.entries:
            try:
                await self.residency.check_health(entry)
            except EngineError as error:
                failed.append(f"{entry.name}: {error}")
        if failed:
            raise ApiError(503, "; ".join(failed), code="engine_unavailable")
