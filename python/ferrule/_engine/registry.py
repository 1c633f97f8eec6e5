"""Registry of the unfinished requests of an `AsyncLLM`: admission, lookup and draining.

Any event loop and the engine thread may use it; no method waits for a step.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from copy import copy
from typing import NamedTuple

from ferrule._engine.collector import Collector
from ferrule.errors import EngineError, InvalidParameterError, QueueFullError

CLOSED_LOOP_CHECK_SECONDS = 0.1
"""Seconds between checks for closed event loops in `wait_until_idle`, since a closed loop sends no notification."""


class Load(NamedTuple):
    """Number of running and of waiting sequences of the engine."""

    running: int
    waiting: int


class Registry:
    """Unfinished requests by id, with admission control.

    At most `max_num_seqs` sequences run at once, and `limit` more may wait; `load` returns the engine's current
    numbers. Requests whose event loop was closed are removed at the next call, since their output cannot be delivered.
    """

    def __init__(self, limit: int, max_num_seqs: int, load: Callable[[], Load]) -> None:
        self.refused = 0
        """Number of requests refused because the queue was full."""
        self._limit = limit
        self._max_num_seqs = max_num_seqs
        self._load = load
        self._lock = threading.Lock()
        self._collectors: dict[str, Collector] = {}
        self._sequences = 0
        self._encodings = 0
        self._failure: EngineError | None = None
        self._draining = False
        self._idle: list[asyncio.Future[None]] = []
        self._release: Callable[[Collector], None] | None = None

    def on_closed_loop(self, release: Callable[[Collector], None]) -> None:
        """Sets the function that releases a request in the engine when its event loop was closed."""
        self._release = release

    def admit(self, collector: Collector) -> None:
        """Adds a request.

        Raises QueueFullError, InvalidParameterError if its id is in use, EngineError.
        """
        self._purge()
        with self._lock:
            self._check_open()
            if collector.request_id in self._collectors:
                raise InvalidParameterError("request_id", collector.request_id, "an id that no running request has")
            self._check_room(collector.n)
            self._collectors[collector.request_id] = collector
            self._sequences += collector.n

    @contextmanager
    def encoding(self) -> Generator[None]:
        """Counts a call that encodes texts while the context is active.

        Raises QueueFullError, EngineError.
        """
        with self._lock:
            self._check_open()
            most = self._limit + self._max_num_seqs
            if self._encodings >= most:
                self.refused += 1
                raise QueueFullError(
                    f"the request queue is full ({self._encodings} encoding calls; "
                    f"the limit is max_queued_requests {self._limit} + max_num_seqs {self._max_num_seqs})"
                )
            self._encodings += 1
        try:
            yield
        finally:
            with self._lock:
                self._encodings = max(self._encodings - 1, 0)  # a fork resets the number
                idle = self._take_idle()
            _resolve(idle)

    def remove(self, collector: Collector) -> None:
        """Removes a request, if it is registered."""
        with self._lock:
            if self._collectors.get(collector.request_id) is not collector:
                return
            del self._collectors[collector.request_id]
            self._sequences -= collector.n
            idle = self._take_idle()
        _resolve(idle)

    def find(self, request_id: str) -> Collector | None:
        """Returns the request with this id; None if there is none."""
        return self._collectors.get(request_id)

    def all(self) -> list[Collector]:
        """Returns the unfinished requests."""
        self._purge()
        with self._lock:
            return list(self._collectors.values())

    def drain(self) -> None:
        """Refuses new requests from now on."""
        self._draining = True

    async def wait_until_idle(self) -> None:
        """Waits until all requests have finished."""
        future = asyncio.get_running_loop().create_future()
        with self._lock:
            self._idle.append(future)
        try:
            while self.all() or self._encodings:
                await asyncio.wait([future], timeout=CLOSED_LOOP_CHECK_SECONDS)
        finally:
            with self._lock:
                self._idle = [other for other in self._idle if other is not future]

    def fail(self, error: EngineError) -> list[Collector]:
        """Removes and returns all requests; later requests are refused with a copy of the error of the first call."""
        with self._lock:
            self._failure = self._failure or copy(error)
            collectors = list(self._collectors.values())
            self._collectors.clear()
            self._sequences = 0
            idle, self._idle = self._idle, []
        _resolve(idle)
        return collectors

    def check_health(self) -> None:
        """Raises EngineError if the engine has failed or is closed."""
        if self._failure is not None:
            raise copy(self._failure)

    def after_fork(self) -> None:
        """Clears the registry in a forked child, which has neither the readers nor the engine thread."""
        self._lock = threading.Lock()
        if self._collectors and self._failure is None:
            reason = "the process was forked while the engine ran; create a new AsyncLLM in the child process"
            self._failure = EngineError(reason)
        self._collectors, self._sequences, self._encodings, self._idle = {}, 0, 0, []

    def _check_open(self) -> None:
        self.check_health()
        if self._draining:
            raise EngineError("the engine is draining and accepts no new requests")

    def _take_idle(self) -> list[asyncio.Future[None]]:
        """Returns and clears the futures of `wait_until_idle` if no request is left; else returns an empty list."""
        if self._collectors or self._encodings:
            return []
        idle, self._idle = self._idle, []
        return idle

    def _purge(self) -> None:
        # Copying the values is one call of C code, during which no other thread can change the dict.
        for collector in list(self._collectors.values()):
            if collector.loop.is_closed():
                self.remove(collector)
                if self._release is not None:
                    self._release(collector)

    def _check_room(self, n: int) -> None:
        most = self._limit + self._max_num_seqs
        if n > most:
            requirement = f"at most {most} (max_queued_requests {self._limit} + max_num_seqs {self._max_num_seqs})"
            raise InvalidParameterError("n", n, requirement)
        if self._sequences + n <= most:  # surely below the limit, whatever the engine's load is
            return
        load = self._load()
        waiting = load.waiting + sum(each.n for each in self._collectors.values() if not each.added)
        # Sequences that fit into the running batch do not count as waiting, as in the engine.
        if waiting + n > most - load.running:
            self.refused += 1
            raise QueueFullError(
                f"the request queue is full ({waiting} waiting; the limit is max_queued_requests {self._limit})"
            )


def _resolve(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        try:
            future.get_loop().call_soon_threadsafe(_set, future)
        except RuntimeError:  # the loop is closed
            continue


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
