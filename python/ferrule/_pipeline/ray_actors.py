"""Workers of pipeline stages in actors of a Ray cluster (`distributed_executor_backend="ray"`).

A placement group reserves the CPUs of the workers: stages on different hosts if there are enough, and the workers of
one of several stages on one host if they fit. One actor of each host packs the weights there, unless they are packed
already, and checks that the memory of the host holds the parts of its actors together. Then each actor loads its part.
It connects to the engine and to the workers of its stage directly; Ray starts and ends the actors but transports no
step.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import ray
import ray.exceptions
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ferrule._loading import EMBEDDED, find_model, read_model_files
from ferrule._loading.packing import weights_of
from ferrule._params.options import EngineArgs
from ferrule._pipeline.connections import POLL_SECONDS, Destination, Listener, connect, end_unless_acknowledged
from ferrule._pipeline.stages import LOGGER, Stages
from ferrule.errors import ConfigError, EngineError, FerruleError

PLACEMENT_SECONDS = 600.0
"""Seconds within which the cluster must have room for the workers."""
PLACEMENT_POLL_SECONDS = 1
"""Seconds of a single wait for room, which Ctrl-C does not end. Ray reads an integer."""
REPORT_SECONDS = 60.0
"""Seconds between log records about the wait for room."""
CONNECTION_SECONDS = 600.0
"""Seconds within which the actors must start and connect."""
FAILURE_SECONDS = 120.0
"""Seconds in which Ray reports why an actor ended its connection. The error of a stage arrives at once, the loss of a
host after its health check."""


@dataclass(frozen=True)
class StageTask:
    """Arguments of an actor."""

    model: str | None
    """Name of the model, or its path, which is the same on all hosts; None for the embedded model."""
    args: EngineArgs
    spec: str
    """Description of the model that the engine has, as JSON."""
    worker: int
    """Index among all workers."""
    layers: tuple[int, int]
    """First layer, and the one after the last."""
    stage: tuple[int, int]
    """Index of the stage, and the number of stages."""
    destination: Destination
    """Address of the engine."""
    rank: int
    """Index among the workers of the stage."""
    group: list[Destination]
    """Address of each worker of the stage; empty for the only one."""


class StageActor:
    """Actor with one worker."""

    def __init__(self) -> None:
        self._listener: Listener | None = None
        self._model: tuple[str, str | None] | None = None
        """Description of the model as JSON, and path of its weights on this host."""

    def node(self) -> str:
        """Returns the id of the actor's host."""
        return ray.get_runtime_context().get_node_id()

    def listen(self) -> Destination:
        """Listens for the workers of higher ranks."""
        self._listener = _listener()
        return self._listener.destination

    def prepare(self, task: StageTask, of_host: Sequence[StageTask]) -> None:
        """Packs the weights on this host, and checks that its memory holds the parts of all workers of the host.

        Raises the errors of loading a model, InsufficientMemoryError.
        """
        from ferrule import _native

        spec, weights = self._find_model(task)
        ranks = task.args.tensor_parallel_size
        workers = [[each.layers, each.stage, (each.rank, ranks)] for each in of_host]
        _native.check_workers_memory(spec, weights, task.args.to_json(), workers)

    def run(self, task: StageTask, sharers: int) -> None:
        """Loads a worker's part and runs it until the engine closes the connection; `sharers` workers are on this host.

        Raises the errors of loading a model.
        """
        from ferrule import _native

        with ExitStack() as stack:
            connection = stack.enter_context(connect(task.destination, task.worker, CONNECTION_SECONDS))
            peers = [stack.enter_context(peer).fileno() for peer in self._connect_group(task)]
            spec, weights = self._find_model(task)
            part = (task.layers, task.stage, task.rank, peers)
            _native.serve_stage(spec, weights, task.args.to_json(), *part, sharers, connection.fileno())

    def _find_model(self, task: StageTask) -> tuple[str, str | None]:
        """Returns the description of the model as JSON and the path of its weights, which are packed if they were not.

        Raises the errors of loading a model.
        """
        if self._model is None:
            args = task.args
            files = read_model_files(find_model(task.model, args.revision)).extended(args.max_model_len)
            spec = files.spec_json
            if spec != task.spec:
                raise ConfigError(f"the configuration of {files.path} differs from that on the host of the engine")
            name = EMBEDDED if task.model is None else task.model
            weights = None if args.load_format == "dummy" else os.fspath(weights_of(files, name, args, None))
            self._model = spec, weights
        return self._model

    def _connect_group(self, task: StageTask) -> list[socket.socket]:
        """Connects to the workers of lower ranks and accepts those of higher ranks; returns the sockets in this order.

        Raises OSError, EngineError.
        """
        if self._listener is None:
            return []
        with self._listener as listener:
            lower, higher = task.group[: task.rank], range(task.rank + 1, len(task.group))
            peers = [connect(address, task.rank, CONNECTION_SECONDS) for address in lower]
            return peers + listener.accept(higher, CONNECTION_SECONDS, lambda: None)


class StageActors(Stages):
    """Workers in actors of the Ray cluster that this process is connected to, or connects to now."""

    def __init__(self, args: EngineArgs, model: str | None, spec: str, layers: Sequence[tuple[int, int]]) -> None:
        """Starts an actor for each worker and waits until it has connected.

        Raises EngineError if the cluster cannot be reached, has no room for the workers, cannot start them, or ends
        meanwhile; PipelineStageError, and the errors of loading a model.
        """
        _connect_to_cluster()
        with _ray_errors("the Ray cluster failed"):
            super().__init__(args.threads or _cpus_of_worker(args.workers), args.tensor_parallel_size)
            self._actors: list[Any] = []
            self._runs: list[Any] = []
            self._in_bundle = _workers_in_bundle(_cpus_of_hosts(), args, self.threads)
            bundle: dict[str, float] = {"CPU": self.threads * self._in_bundle}
            bundles = [bundle] * (args.workers // self._in_bundle)
            self._group: Any = placement_group(bundles, strategy="SPREAD")
            try:
                self._start(replace(args, threads=self.threads, progress=None), model, spec, layers)
            except BaseException:
                self.close()
                raise

    def failure(self, worker: int) -> FerruleError:
        """Returns the error with which an actor ended."""
        return self._failure(worker, self._runs[worker])

    def _failure(self, worker: int, call: object) -> FerruleError:
        """Returns the error with which a call of an actor ended."""
        try:
            cast("Any", ray).get(call, timeout=FAILURE_SECONDS)
            reason = "its actor ended"
        except ray.exceptions.RayTaskError as error:
            cause: object = getattr(error, "cause", None)
            if isinstance(cause, FerruleError):
                return cause
            reason = repr(cause)
        except ray.exceptions.RayError as error:
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return self.loss(worker, f" failed while it loaded: {reason}")

    def end(self) -> None:
        """Ends the actors and frees their CPUs."""
        if ray.is_initialized():
            # The cluster may have ended, and with it the actors.
            for actor in self._actors:
                with suppress(Exception):
                    cast("Any", ray).kill(actor)
            with suppress(Exception):
                remove_placement_group(self._group)
        self._actors.clear()

    def _start(self, args: EngineArgs, model: str | None, spec: str, layers: Sequence[tuple[int, int]]) -> None:
        api: Any = ray
        wanted = f"{args.workers} workers with {self.threads} CPUs each"
        self._wait_for_room(wanted)
        with _listener() as listener:
            for worker in range(args.workers):
                bundle = worker // self._in_bundle
                place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
                remote = api.remote(StageActor).options(num_cpus=self.threads, scheduling_strategy=place)
                self._actors.append(remote.remote())
            with _ray_errors(f"the actors of {wanted} could not be started"):
                nodes: list[str] = api.get([actor.node.remote() for actor in self._actors], timeout=CONNECTION_SECONDS)
                listening = [actor.listen.remote() for actor in self._actors if self.ranks > 1]
                addresses: list[Destination] = api.get(listening, timeout=CONNECTION_SECONDS)
            of_hosts: dict[str, list[StageTask]] = {}
            for worker, node in enumerate(nodes):
                stage, rank = divmod(worker, self.ranks)
                group = addresses[stage * self.ranks :][: self.ranks]
                part = (layers[stage], (stage, len(layers)))
                task = StageTask(model, args, spec, worker, *part, listener.destination, rank, group)
                of_hosts.setdefault(node, []).append(task)
            self._prepare(of_hosts.values())
            tasks = {task.worker: (task, len(of_host)) for of_host in of_hosts.values() for task in of_host}
            self._runs = [actor.run.remote(*tasks[worker]) for worker, actor in enumerate(self._actors)]
            self.sockets = listener.accept(range(args.workers), CONNECTION_SECONDS, self._check)
        for connection in self.sockets:
            end_unless_acknowledged(connection)

    def _prepare(self, of_hosts: Iterable[list[StageTask]]) -> None:
        """Waits until the first actor of each host has checked that the host can load its workers.

        Raises the errors of loading a model, InsufficientMemoryError, PipelineStageError.
        """
        calls: dict[object, int] = {}
        for of_host in of_hosts:
            first = of_host[0]
            calls[self._actors[first.worker].prepare.remote(first, of_host)] = first.worker
        while calls:
            ended, _ = cast("Any", ray).wait(list(calls), timeout=POLL_SECONDS)
            for call in ended:
                worker = calls.pop(call)
                try:
                    cast("Any", ray).get(call)
                except ray.exceptions.RayError:
                    raise self._failure(worker, call) from None

    def _wait_for_room(self, wanted: str) -> None:
        """Waits until the cluster has reserved the CPUs of the workers; Ctrl-C ends the wait.

        Raises EngineError.
        """
        start = time.monotonic()
        next_report = start
        while not self._group.wait(PLACEMENT_POLL_SECONDS):
            now = time.monotonic()
            if now - start >= PLACEMENT_SECONDS:
                raise EngineError(
                    f"the Ray cluster had no room for {wanted} within {PLACEMENT_SECONDS:.0f} s ({_resources()}); "
                    "set threads, the CPUs of a worker, or the number of workers to a smaller number"
                )
            if now >= next_report:
                LOGGER.warning(
                    "waiting at most %.0f s for room in the Ray cluster for %s (%s)",
                    start + PLACEMENT_SECONDS - now,
                    wanted,
                    _resources(),
                )
                next_report = now + REPORT_SECONDS

    def _check(self) -> None:
        """Raises the error of a worker that has ended."""
        ended, _ = cast("Any", ray).wait(self._runs, timeout=0)
        if ended:
            raise self.failure(self._runs.index(ended[0]))


def _connect_to_cluster() -> None:
    """Connects this process to the cluster of RAY_ADDRESS or of this machine, unless it is connected.

    Raises EngineError.
    """
    if ray.is_initialized():
        return
    with _ray_errors("cannot connect to a Ray cluster"):
        cast("Any", ray).init(address="auto", log_to_driver=False, logging_level=logging.ERROR)


@contextmanager
def _ray_errors(problem: str) -> Generator[None]:
    """Raises an EngineError that begins with `problem` for an error of Ray, which is its cause."""
    try:
        yield
    except FerruleError:
        raise
    except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError) as error:
        raise EngineError(f"{problem}: {error}") from error


def _nodes() -> list[dict[str, Any]]:
    """Returns the description of each host of the cluster that is alive."""
    nodes: list[dict[str, Any]] = cast("Any", ray).nodes()
    return [node for node in nodes if node["Alive"]]


def _resources() -> str:
    """Describes the CPUs of the cluster."""
    api: Any = ray
    total, free = (found.get("CPU", 0.0) for found in (api.cluster_resources(), api.available_resources()))
    return f"it has {total:g} CPUs, {free:g} of them free; hosts: {len(_nodes())}"


def _listener() -> Listener:
    """Listens on the address by which the cluster knows this host, which the other hosts can reach.

    Raises EngineError.
    """
    own = ray.get_runtime_context().get_node_id()
    addresses = [str(node["NodeManagerAddress"]) for node in _nodes() if node["NodeID"] == own]
    if not addresses:
        raise EngineError(f"the Ray cluster does not list the host of this process (node {own})")
    try:
        return Listener(addresses[0])
    except OSError as error:
        raise EngineError(f"cannot listen for workers on {addresses[0]}: {error.strerror}") from error


def _cpus_of_hosts() -> list[int]:
    """Returns the number of CPUs of each host of the cluster, in descending order."""
    return sorted((int(node["Resources"].get("CPU", 0)) for node in _nodes()), reverse=True)


def _workers_in_bundle(cpus: Sequence[int], args: EngineArgs, threads: int) -> int:
    """Returns the number of workers in a bundle of the placement group, which is on one host.

    If hosts with `cpus` have room for all stages, a bundle has the workers of a stage, which exchange outputs in each
    layer; else one worker. The workers of a single stage are spread, because hosts divide the model only so.
    """
    stages, ranks = args.pipeline_parallel_size, args.tensor_parallel_size
    fits = sum(count // (threads * ranks) for count in cpus) >= stages
    return ranks if stages > 1 and fits else 1


def _cpus_of_worker(workers: int) -> int:
    """Returns the CPUs of each worker if the workers share the largest hosts of the cluster evenly."""
    hosts = [count for count in _cpus_of_hosts()[:workers] if count > 0]
    return max(hosts[-1] // -(-workers // len(hosts)), 1) if hosts else 1
