"""`BatchWorkers`: engines in Ray actors, for `ferrule run-batch --ray`.

The file is read and written by the command's process, which gives each request to the actor that has room for it. A
request whose actor died goes to another one, so that a lost actor or host changes nothing in the output.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Self, cast

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ferrule.errors import EngineError, InvalidParameterError
from ferrule.ray.connection import connect
from ferrule.ray.paths import absolute, with_absolute_paths
from ferrule.server.batch_engine import BatchEngine
from ferrule.server.errors import ApiError

MAX_AT_ONCE = 1000
"""Maximum number of requests that an actor runs at once."""
MAX_ATTEMPTS = 5
"""Number of actors that may die with the same request, which then gets an error since it may be the cause. Also the
number of times that an actor may die while it loads the model."""
MAX_ATTEMPTS_TOGETHER = 2
"""Number of these attempts that run beside other retried requests; in the rest a request is the only one of them."""
DIED = ApiError(
    500, f"{MAX_ATTEMPTS} Ray actors died with this request; `ray list actors` shows why", code="engine_died"
)


class _Worker:
    """An engine in an actor; `ready` loads the engine at its first call."""

    def __init__(self, model: str | None, names: Sequence[str], options: Mapping[str, Any]) -> None:
        self._arguments = model, names, options
        self._engine: BatchEngine | None = None
        self._loading = asyncio.Lock()

    async def started(self) -> None:
        """Returns once the actor runs."""

    async def ready(self) -> int:
        """Loads the engine and returns the number of requests to run at once. Raises the errors of AsyncLLM."""
        async with self._loading:
            if self._engine is None:
                model, names, options = self._arguments
                self._engine = await asyncio.to_thread(BatchEngine, model, names, **options)
        return min(self._engine.at_once, MAX_AT_ONCE)

    async def send(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Returns status and body of the response to a request. Raises EngineError if the engine has failed."""
        await self.ready()  # a restarted actor has no engine yet
        return await cast("BatchEngine", self._engine).send(path, body)


class BatchWorkers:
    """Engines on the hosts of a cluster, for `run_batch`. Use it as a context manager in an event loop.

    A host with `threads=None` has one actor with a thread for each of its CPUs; otherwise it has as many actors of
    that number of threads as it has CPUs for.

    Raises InvalidParameterError for an address without a cluster, a cluster without CPUs, and for more threads than any
    host has CPUs.
    """

    at_once = 1 << 20
    """Number of requests to send at once: no limit, since requests wait for a place in an actor."""

    def __init__(self, address: str, model: str | None, names: Sequence[str], **options: Any) -> None:
        threads: int | None = options.pop("threads", None)
        connect(address)
        try:
            places = _actors_of(address, cast("list[dict[str, Any]]", ray.nodes()), threads)
        except InvalidParameterError:
            cast("Any", ray).shutdown()
            raise
        self._places: asyncio.Queue[int | None] = asyncio.Queue()
        """Index of an actor for each request that could begin; None after a failure."""
        self._restarting: set[int] = set()
        """Actors that died and are not ready yet."""
        self._suspects = asyncio.Lock()
        """Held by the request that runs although MAX_ATTEMPTS_TOGETHER actors died with it."""
        self._failure: Exception | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        worker: Any = ray.remote(_Worker)
        self._actors: list[Any] = [
            worker.options(
                num_cpus=cpus,
                max_restarts=-1,
                max_concurrency=MAX_AT_ONCE + 1,  # `ready` is called beside requests
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True),
            ).remote(absolute(model), names, {**with_absolute_paths(options), "threads": cpus})
            for node, cpus in places
        ]

    async def send(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Returns status and body of the response to a request; status 500 if several actors died with it.

        Raises EngineError if an engine has failed or an actor died several times while it loaded the model, and the
        errors of AsyncLLM if an actor cannot load the model.
        """
        answer = await self._attempts(path, body, MAX_ATTEMPTS_TOGETHER)
        if answer is None:
            # One at a time: otherwise a request that ends its actor would end the same requests beside it each time.
            async with self._suspects:
                answer = await self._attempts(path, body, MAX_ATTEMPTS - MAX_ATTEMPTS_TOGETHER)
        return (DIED.status_code, json.dumps(DIED.body()).encode()) if answer is None else answer

    async def __aenter__(self) -> Self:
        for actor in range(len(self._actors)):
            self._start(self._add_places(actor))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        cast("Any", ray).shutdown()  # it ends the actors

    async def _attempts(self, path: str, body: bytes, count: int) -> tuple[int, bytes] | None:
        """Sends a request to actors until one of them answers; None if `count` actors died with it.

        Ray has the same error for an actor that died and is restarted as for one that cannot be reached.
        """
        for _ in range(count):
            actor = await self._place()
            try:
                answer = await self._actors[actor].send.remote(path, body)
            except RayTaskError as error:
                raise self._fail(error) from error
            except RayError:  # the actor died, or the host of its response
                self._restarting.add(actor)
                self._start(self._return_place(actor))
            else:
                self._places.put_nowait(actor)
                return answer
        return None

    async def _place(self) -> int:
        """Waits for a place in an actor that is not being restarted."""
        while True:
            actor = await self._places.get()
            if actor is None:
                self._places.put_nowait(None)  # for the next request
                raise cast("Exception", self._failure)
            if actor not in self._restarting:
                return actor
            self._start(self._return_place(actor))

    async def _add_places(self, actor: int) -> None:
        """Adds the places of an actor once it has loaded the model."""
        for _ in range(await self._ready(actor)):
            self._places.put_nowait(actor)

    async def _return_place(self, actor: int) -> None:
        """Returns a place of an actor that died, once it is ready again."""
        await self._ready(actor)
        self._restarting.discard(actor)
        self._places.put_nowait(actor)

    async def _ready(self, actor: int) -> int:
        """Returns the number of places of an actor once it has loaded the model."""
        worker, deaths = self._actors[actor], 0
        while True:
            try:
                # It waits for a restart for as long as necessary, so that `ready` only fails if the actor then dies.
                await worker.started.options(max_task_retries=-1).remote()
            except RayError as error:
                raise self._fail(error) from error
            try:
                return await worker.ready.remote()
            except RayTaskError as error:
                raise self._fail(error) from error
            except RayError as error:
                deaths += 1
                if deaths == MAX_ATTEMPTS:
                    raise self._fail(error, f"died {deaths} times while it loaded the model") from error

    def _fail(self, error: RayError, event: str = "failed") -> Exception:
        """Ends all requests; returns the exception of the actor, or an EngineError if it cannot be restarted."""
        cause: object = cast("Any", error).cause if isinstance(error, RayTaskError) else None
        self._failure = cause if isinstance(cause, Exception) else EngineError(f"a Ray actor {event}: {error}")
        self._places.put_nowait(None)
        return self._failure

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # `_fail` has passed it to the requests


def _actors_of(address: str, nodes: Sequence[Mapping[str, Any]], threads: int | None) -> list[tuple[str, int]]:
    """Returns host and number of threads of each actor in the cluster at an address.

    Raises InvalidParameterError if no host has enough CPUs.
    """
    cpus = {node["NodeID"]: int(node["Resources"].get("CPU", 0)) for node in nodes if node["Alive"]}
    actors = [(node, threads or count) for node, count in cpus.items() for _ in range(_fitting(count, threads))]
    if not actors:
        most = max(cpus.values(), default=0)
        if most == 0:
            raise InvalidParameterError("ray", address, "the address of a Ray cluster with CPUs")
        raise InvalidParameterError("threads", threads, f"at most {most}, the CPUs of the largest host of the cluster")
    return actors


def _fitting(cpus: int, threads: int | None) -> int:
    return min(cpus, 1) if threads is None else cpus // threads
