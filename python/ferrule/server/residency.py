"""`Residency`: which models are loaded. A model is loaded when a request first needs it, and unloaded when it is idle.

A lease keeps a model loaded. The last one to end starts the model's keep-alive time, after which it is unloaded. It is
unloaded earlier where another model needs its place or its memory; the least recently used idle model goes first.
Loads run one after another: each uses all threads, and the memory that it takes decides what the next one can have.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal, cast

from ferrule._api.answer_defaults import shown_defaults
from ferrule._api.async_llm import AsyncLLM
from ferrule._engine.workers import WORKERS
from ferrule._params.options import MAX_QUEUED_REQUESTS
from ferrule._params.sampling import SamplingParams
from ferrule.errors import EngineError, FerruleError, InsufficientMemoryError
from ferrule.server.errors import UNAVAILABLE, ApiError
from ferrule.server.request_record import current_record

LOGGER = logging.getLogger("ferrule.server")


@dataclass(frozen=True, eq=False)
class OnDemand:
    """A model that the server loads when a request first needs it."""

    load: Callable[[], AsyncLLM]
    """Loads the model; runs in a thread."""
    source: str
    """Path or name of the model."""
    adapters: Sequence[str] = ()
    """Names of the adapters that the model has once it is loaded."""
    missing_memory: Callable[[], int] = lambda: 0
    """Returns the number of bytes by which the model exceeds the available memory; runs in a thread."""
    loaded: AsyncLLM | None = None
    """The model if it is loaded from the start. It stays loaded, and is loaded again if it fails."""


class Entry:
    """A model of the server, loaded or not. `Residency` changes it."""

    def __init__(self, name: str, model: AsyncLLM | OnDemand) -> None:
        """Creates the entry; `name` is the first name of the model."""
        self.name = name
        self.on_demand = model if isinstance(model, OnDemand) else None
        """How to load the model; None for a model that was given loaded and cannot be loaded again."""
        loaded = model.loaded if isinstance(model, OnDemand) else model
        self.stays_loaded = loaded is not None
        """Whether the model is always to be loaded, rather than from a request to the end of its keep-alive time."""
        self.llm: AsyncLLM | None = None
        """The model; None unless it is loaded."""
        self.info: dict[str, Any] | None = None
        """Facts about the model; None until it is first loaded."""
        self.answer_defaults: dict[str, Any] | None = None
        """Sampling parameters of an answer for which a user sets none; None for a model of embeddings, and until the
        model is first loaded."""
        self.adapters: dict[str, str | PathLike[str]] = {}
        """Paths of the adapters that were loaded over HTTP, by name."""
        self.keep_alive = math.inf
        """Seconds for which the idle model stays loaded."""
        self.expires_at: float | None = None
        """Time of the event loop at which the idle model is unloaded; None while it is in use or stays loaded."""
        self.last_used = 0.0
        """Time of the event loop at which the last lease began or ended."""
        self.leases = self.waiting = 0
        """Number of leases, and of requests that wait for the model to be loaded."""
        self.loads = self.failed_loads = self.unloads = 0
        self.refusal: str | None = None
        """Message of a load for which the memory did not suffice although no other model was loaded on demand."""
        self.load_seconds = 0.0
        """Seconds of all loads."""
        self.loading: asyncio.Task[None] | None = None
        self.is_reading = False
        """Whether a load reads the model; before that it waits for its turn and for a place."""
        self.is_retiring = False
        """Whether the model takes no more requests, since another one needs its place."""
        self.timer: asyncio.TimerHandle | None = None
        """Unloads the idle model."""
        if loaded is not None:
            self.set(loaded)

    def set(self, llm: AsyncLLM) -> None:
        """Sets the loaded model."""
        self.llm, self.info = llm, llm.info()
        self.answer_defaults = shown_defaults(SamplingParams.with_model_defaults(), llm) if llm.generates else None

    @property
    def state(self) -> Literal["unloaded", "loading", "loaded"]:
        """Whether the model is loaded."""
        return "loaded" if self.llm is not None else "unloaded" if self.loading is None else "loading"

    @property
    def source(self) -> str:
        """Path or name of the model."""
        return self.on_demand.source if self.on_demand is not None else str((self.info or {})["model"])

    @property
    def adapter_names(self) -> list[str]:
        """Names of the adapters that the model has, or will have once it is loaded."""
        if self.llm is not None:
            return [adapter.name for adapter in self.llm.lora_adapters()]
        return [*(() if self.on_demand is None else self.on_demand.adapters), *self.adapters]

    @property
    def capacity(self) -> int:
        """Number of sequences that the engine runs and queues, or of requests that may wait for the first load."""
        if self.info is None:
            return MAX_QUEUED_REQUESTS
        return self.info["max_num_seqs"] + (self.info["max_queued_requests"] or 0)

    @property
    def is_idle(self) -> bool:
        """Whether no request uses the model or waits for it."""
        return not self.leases and not self.waiting

    @property
    def may_unload(self) -> bool:
        """Whether the model is loaded and idle, and need not stay loaded."""
        return self.llm is not None and not self.stays_loaded and self.is_idle

    @property
    def has_retired(self) -> bool:
        """Whether the model has been in use, and all requests that wait for it wait for its next load."""
        return self.llm is not None and self.is_retiring and not self.leases and self.loading is not None

    def stop_timer(self) -> None:
        """Keeps the model loaded beyond the end of its keep-alive time."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = self.expires_at = None


class Residency:
    """Loads and unloads the models of a server. Its methods run in one event loop."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.keep_alive = math.inf
        """Seconds for which an idle model stays loaded unless a request says otherwise."""
        self.max_loaded: int | None = None
        """Maximum number of models loaded on demand; None for as many as fit into memory."""
        self._closed = False
        self._turn = asyncio.Lock()
        """Held during a load."""
        self._released = asyncio.Event()
        """Set when a model becomes idle."""
        self._unloading: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def lease(self, entry: Entry, keep_alive: float | None = None) -> AsyncGenerator[AsyncLLM]:
        """Keeps a model loaded while the context is active; loads it first if necessary.

        `keep_alive` replaces the model's keep-alive time until it is unloaded.

        Raises ApiError for a model that cannot be loaded, and where the request's deadline passes meanwhile;
        EngineError for a model that has failed and cannot be loaded again.
        """
        llm = await self._loaded(entry)
        with self.hold(entry):
            if keep_alive is not None and not entry.stays_loaded:
                entry.keep_alive = keep_alive
            yield llm

    @contextmanager
    def hold(self, entry: Entry) -> Generator[None]:
        """Keeps a loaded model loaded while the context is active."""
        entry.leases += 1
        entry.last_used = asyncio.get_running_loop().time()
        entry.stop_timer()
        try:
            yield
        finally:
            entry.leases -= 1
            if not entry.leases:
                self._start_timer(entry)

    async def unload(self, entry: Entry) -> None:
        """Unloads a model, at once if it is idle, else when its last lease ends."""
        entry.keep_alive = 0.0
        if entry.may_unload:
            await asyncio.wait([self._unload(entry)])

    async def check_health(self, entry: Entry) -> None:
        """Raises EngineError for a model that has failed.

        If it can be loaded again, it is unloaded instead; a model that stays loaded is also loaded again, and
        EngineError is raised until that is done.
        """
        await self._unload_failed(entry)
        if entry.stays_loaded and entry.llm is None:
            self._begin_load(entry)
            raise EngineError("the engine failed, and the model is being loaded again")

    def stop_loading(self) -> None:
        """Ends all loads. Requests that wait for them fail, and so do later ones that need a load."""
        self._closed = True
        for entry in self.entries:
            if entry.loading is not None:
                entry.loading.cancel()

    async def aclose(self) -> None:
        """Closes the models that were loaded on demand."""
        self.stop_loading()
        loading = [entry.loading for entry in self.entries if entry.loading is not None]
        await asyncio.gather(*loading, return_exceptions=True)
        for entry in self.entries:
            if entry.on_demand is not None and entry.llm is not None:
                self._unload(entry)
        if self._unloading:
            await asyncio.wait(self._unloading)

    async def _loaded(self, entry: Entry) -> AsyncLLM:
        """Returns a model once it is loaded. The caller must hold it before it awaits anything."""
        while True:
            if entry.on_demand is not None:
                await self._unload_failed(entry)  # returns without a pause
            if entry.llm is not None and not entry.is_retiring:
                return entry.llm
            loading = self._begin_load(entry)
            if loading is None:
                raise ApiError(UNAVAILABLE, "the server is shutting down and loads no models", code="draining")
            await self._wait(entry, loading)
            if entry.llm is not None:  # even if it retires: it becomes idle only with the requests that have waited
                return entry.llm

    async def _unload_failed(self, entry: Entry) -> None:
        """Unloads a model that has failed, if it can be loaded again. Requests that still use it have got its error.

        Raises EngineError if it cannot be loaded again.
        """
        if entry.llm is None:
            return
        try:
            await entry.llm.check_health()
        except EngineError as error:
            if entry.on_demand is None:
                raise
            LOGGER.error("engine failed", extra={"fields": {"model": entry.name, "reason": str(error)}})
            self._unload(entry)

    def _begin_load(self, entry: Entry) -> asyncio.Task[None] | None:
        """Returns the load of a model, which begins now unless it has begun; None after `stop_loading`."""
        if self._closed or entry.on_demand is None:
            return None
        if entry.loading is None:
            entry.loading = asyncio.create_task(self._load(entry, entry.on_demand))
            entry.loading.add_done_callback(_retrieve)
        return entry.loading

    async def _wait(self, entry: Entry, loading: asyncio.Task[None]) -> None:
        """Waits for a load, which does not end with the requests that wait for it once it reads the model.

        Raises ApiError.
        """
        record = current_record.get()
        done: set[asyncio.Task[None]] = set()
        entry.waiting += 1
        try:
            done, _ = await asyncio.wait([loading], timeout=None if record is None else record.remaining)
        finally:
            entry.waiting -= 1
            if not entry.waiting and not entry.is_reading:
                loading.cancel()
            if not done and not entry.waiting and not entry.leases:  # the last client has left
                self._start_timer(entry)
        if not done:
            raise ApiError(UNAVAILABLE, "the request exceeded its timeout", code="deadline_exceeded")
        if not loading.cancelled():
            loading.result()

    async def _load(self, entry: Entry, on_demand: OnDemand) -> None:
        """Loads a model, unless it is still loaded when its turn comes.

        Raises ApiError.
        """
        try:
            async with self._turn:
                if entry.llm is None:
                    begun = time.perf_counter()  # first, since the check may download the model
                    await self._check_fits(entry, on_demand)
                    await self._make_room(entry)
                    entry.keep_alive = self.keep_alive
                    entry.set(await self._read(entry, on_demand))
                    seconds = time.perf_counter() - begun
                    entry.loads += 1
                    entry.load_seconds += seconds
                    fields = {"model": entry.name, "seconds": round(seconds, 3)}
                    LOGGER.info("model loaded", extra={"fields": fields})
        except Exception as error:
            entry.failed_loads += 1
            raise _load_error(entry, error) from error
        finally:
            entry.loading = None
        if not entry.leases and not entry.waiting:  # all clients have disconnected
            self._start_timer(entry)

    async def _check_fits(self, entry: Entry, on_demand: OnDemand) -> None:
        """Raises InsufficientMemoryError for a model that does not fit alone: others are not unloaded in vain.

        That is a model that exceeds the available memory by more than this process holds, or one that did not fit
        where no other one was loaded. If no other one is loaded, it is tried again, since memory may have become free.
        """
        if not self._loaded_on_demand():
            return
        if entry.refusal is not None:
            raise InsufficientMemoryError(entry.refusal)
        held = resident_bytes()  # first, since other models may be unloaded meanwhile
        missing = await WORKERS.run(on_demand.missing_memory)
        if missing > held:
            raise InsufficientMemoryError(
                f"the weights of the model exceed the available memory by {missing} bytes, and unloading all other "
                f"models would free at most {held} bytes"
            )

    async def _make_room(self, entry: Entry) -> None:
        """Waits until a model may be loaded; one that stays loaded does not count in the limit."""
        await self._until_unloaded()
        limit = None if entry.stays_loaded else self.max_loaded
        while limit is not None and len(self._loaded_on_demand()) >= limit:
            await self._unload_one()

    async def _read(self, entry: Entry, on_demand: OnDemand) -> AsyncLLM:
        """Reads a model; unloads others while the memory does not suffice."""
        while True:
            entry.is_reading = True
            try:
                llm = await WORKERS.run(on_demand.load)
                await _restore_adapters(llm, entry)
                entry.refusal = None
                return llm
            except InsufficientMemoryError as error:
                if not self._loaded_on_demand():
                    entry.refusal = str(error)
                    raise
            finally:
                entry.is_reading = False
            await self._unload_one()

    async def _unload_one(self) -> None:
        """Waits until there is one loaded model less; unloads the least recently used one that is idle.

        Where all are in use, the least recently used one takes no more requests, which wait for the end of the load.
        """
        loaded = self._loaded_on_demand()
        retiring = None
        try:
            while len(self._loaded_on_demand()) == len(loaded):
                idle = [entry for entry in loaded if entry.may_unload or entry.has_retired]
                if idle:
                    self._unload(_least_recently_used(idle))
                    break
                if retiring is None:
                    retiring = _least_recently_used(loaded)
                    retiring.is_retiring = True
                self._released.clear()
                await self._released.wait()
        finally:
            if retiring is not None:
                retiring.is_retiring = False
        await self._until_unloaded()

    async def _until_unloaded(self) -> None:
        """Waits until the memory of unloaded models is free."""
        if self._unloading:
            await asyncio.wait(self._unloading)

    def _loaded_on_demand(self) -> list[Entry]:
        return [entry for entry in self.entries if not entry.stays_loaded and entry.llm is not None]

    def _unload(self, entry: Entry) -> asyncio.Task[None]:
        """Removes a loaded model from its entry at once and closes it in a thread."""
        llm = cast("AsyncLLM", entry.llm)
        task = asyncio.create_task(WORKERS.run(llm.close))
        self._unloading.add(task)
        task.add_done_callback(self._unloading.discard)
        entry.llm = None
        entry.stop_timer()
        entry.unloads += 1
        LOGGER.info("model unloaded", extra={"fields": {"model": entry.name}})
        return task

    def _start_timer(self, entry: Entry) -> None:
        """Starts the keep-alive time of a model that has become idle."""
        loop = asyncio.get_running_loop()
        entry.stop_timer()
        entry.last_used = loop.time()
        self._released.set()
        if self._closed or not entry.may_unload or entry.keep_alive == math.inf:
            return
        if entry.keep_alive <= 0:
            self._unload(entry)
            return
        entry.expires_at = entry.last_used + entry.keep_alive
        entry.timer = loop.call_at(entry.expires_at, self._unload, entry)


def resident_bytes() -> int:
    """Returns the number of bytes of this process in memory, mapped weights included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _least_recently_used(entries: Sequence[Entry]) -> Entry:
    return min(entries, key=lambda entry: entry.last_used)


def _retrieve(loading: asyncio.Task[None]) -> None:
    """Retrieves the error of a load, which asyncio would log where no request waits for it any more."""
    if not loading.cancelled():
        loading.exception()


async def _restore_adapters(llm: AsyncLLM, entry: Entry) -> None:
    """Loads the adapters again that were loaded over HTTP; one that cannot be loaded is dropped."""
    for name, path in list(entry.adapters.items()):
        try:
            await llm.load_lora_adapter(name, path)
        except FerruleError as error:
            del entry.adapters[name]
            LOGGER.warning("adapter dropped", extra={"fields": {"adapter": name, "reason": str(error)}})


def _load_error(entry: Entry, error: Exception) -> ApiError:
    """Logs a failed load and returns the error for the requests that wait for it."""
    if not isinstance(error, FerruleError):  # a bug, or a failing disk: the log has its place
        LOGGER.error("internal error", exc_info=error)
    reason = str(error) if isinstance(error, FerruleError) else "see the log of the server"
    LOGGER.error("model failed to load", extra={"fields": {"model": entry.name, "reason": reason}})
    return ApiError(500, f"{entry.name} could not be loaded: {reason}", code="model_load_failed", param="model")
