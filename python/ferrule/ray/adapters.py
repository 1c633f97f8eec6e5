"""`MultiplexedModels`: a model whose LoRA adapters are loaded when a request first needs them.

Replicas have the same adapters by name, but each loads only those of the requests that the router sends to it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from ferrule._api.async_llm import AsyncLLM
from ferrule.errors import EngineError, FerruleError, InsufficientMemoryError
from ferrule.server.errors import ApiError
from ferrule.server.models import ModelName, Models, ServedModel


class MultiplexedModels(Models):
    """A loaded model under its names, and its adapters. A request for an adapter keeps it loaded."""

    def __init__(
        self,
        names: Sequence[str],
        llm: AsyncLLM,
        adapters: Mapping[str, str],
        *,
        max_loaded: int | None,
        listed: Sequence[str],
    ) -> None:
        """`adapters` are paths by name, of which at most `max_loaded` stay loaded; None for as many as fit into memory.

        `listed` are the names that the error for an unknown one lists.
        """
        super().__init__(dict.fromkeys(names, llm), listed=listed)
        self._adapters = AdapterPool(llm, adapters, max_loaded)

    def all(self) -> Iterable[ModelName]:
        """Yields the names of the model, then those of the adapters, loaded or not."""
        models = {each.name: each for each in super().all() if each.adapter is None}
        yield from models.values()
        for name in self._adapters.paths:
            if name not in models:
                yield ModelName(name, self.entries[0], name)

    @asynccontextmanager
    async def lease(self, name: str | None, keep_alive: float | None = None) -> AsyncGenerator[ServedModel]:
        """Keeps the adapter of a name loaded while the context is active; loads it first if necessary.

        Raises ApiError, EngineError.
        """
        async with AsyncExitStack() as leases:
            if (adapter := self.find(name).adapter) is not None:
                await leases.enter_async_context(self._adapters.lease(adapter))
            yield await leases.enter_async_context(super().lease(name, keep_alive))


class AdapterPool:
    """Loads the adapters of a model at their first use, and unloads the least recently used ones that are idle."""

    def __init__(self, llm: AsyncLLM, paths: Mapping[str, str], max_loaded: int | None) -> None:
        self.paths = paths
        """Paths of the adapters by name."""
        self._llm, self._max_loaded = llm, max_loaded
        self._leases: Counter[str] = Counter()
        self._loaded: dict[str, None] = {}
        """Loaded adapters, the least recently used first."""
        self._loading: dict[str, asyncio.Task[None]] = {}

    @asynccontextmanager
    async def lease(self, name: str) -> AsyncGenerator[None]:
        """Keeps an adapter loaded while the context is active; loads it first if necessary.

        Adapters in use may exceed the limit.

        Raises ApiError for an adapter that cannot be loaded, and EngineError.
        """
        self._leases[name] += 1
        try:
            if name not in self._loaded:
                if name not in self._loading:
                    self._loading[name] = asyncio.create_task(self._load(name))
                    self._loading[name].add_done_callback(_retrieve)
                await asyncio.shield(self._loading[name])  # other requests may wait for it too
            yield
        finally:
            self._leases[name] -= 1
            if name in self._loaded:
                self._loaded[name] = self._loaded.pop(name)  # most recently used
            await self._limit()

    async def _load(self, name: str) -> None:
        """Loads an adapter; unloads idle ones while the memory does not suffice.

        Raises ApiError, EngineError.
        """
        try:
            await self._limit()
            while True:
                try:
                    await self._llm.load_lora_adapter(name, self.paths[name])
                    break
                except InsufficientMemoryError:
                    if not await self._unload_one():
                        raise
            self._loaded[name] = None
        except EngineError:
            raise
        except FerruleError as error:
            message = f"{name} could not be loaded: {error}"
            raise ApiError(500, message, code="model_load_failed", param="model") from error
        finally:
            del self._loading[name]

    async def _limit(self) -> None:
        """Unloads idle adapters that exceed the limit."""
        if self._max_loaded is not None:
            while len(self._loaded) + len(self._loading) > self._max_loaded and await self._unload_one():
                pass

    async def _unload_one(self) -> bool:
        """Unloads the least recently used idle adapter. Returns whether there was one."""
        idle = next((name for name in self._loaded if not self._leases[name]), None)
        if idle is None:
            return False
        del self._loaded[idle]
        await self._llm.unload_lora_adapter(idle)
        return True


def _retrieve(loading: asyncio.Task[None]) -> None:
    """Retrieves the error of a load, which asyncio would log where no request waits for it any more."""
    if not loading.cancelled():
        loading.exception()
