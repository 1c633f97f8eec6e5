"""The requests of an `AsyncLLM` that have not ended: who may come in, who is there, and when all are gone.

Any event loop and the engine's thread come here; nothing in here waits for a step.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import NamedTuple

from ferrule._engine.collector import Collector
from ferrule.errors import EngineError, InvalidParameterError, QueueFullError

LOOK_FOR_CLOSED = 0.1
"""Seconds between looks for event loops that were closed, when waiting for their requests: they tell nobody."""


class Load(NamedTuple):
    """How many sequences the engine has."""

    running: int
    waiting: int


class Registry:
    """Requests by name.

    At most `max_num_seqs` sequences run at once, and `limit` may wait beyond those for which there is a place; `load`
    asks the engine how many there are. Requests whose event loop was closed under them are let go whenever somebody
    comes here: what the engine says of them never arrives, and nobody else would do it.
    """

    def __init__(self, limit: int, max_num_seqs: int, load: Callable[[], Load]) -> None:
        self.refused = 0
        """Requests for which there was no room."""
        self._limit = limit
        self._max_num_seqs = max_num_seqs
        self._load = load
        self._lock = threading.Lock()
        self._collectors: dict[str, Collector] = {}
        self._sequences = 0
        self._encodings = 0
        self._failure: str | None = None
        self._draining = False
        self._idle: list[asyncio.Future[None]] = []
        self._release: Callable[[Collector], None] | None = None

    def on_abandoned(self, release: Callable[[Collector], None]) -> None:
        """Says how the engine hears of a request that was let go with its event loop."""
        self._release = release

    def admit(self, collector: Collector) -> None:
        """Lets a request in.

        Raises QueueFullError, InvalidParameterError for the name of another one, EngineError.
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
        """Lets a call in that encodes texts, and out again.

        Raises QueueFullError, EngineError.
        """
        with self._lock:
            self._check_open()
            most = self._limit + self._max_num_seqs
            if self._encodings >= most:
                self.refused += 1
                raise QueueFullError(
                    f"the queue is full: {self._encodings} calls wait to encode texts; max_queued_requests, "
                    f"{self._limit}, and max_num_seqs, {self._max_num_seqs}, allow {most}"
                )
            self._encodings += 1
        try:
            yield
        finally:
            with self._lock:
                self._encodings = max(self._encodings - 1, 0)  # a fork may have been between
                idle = self._take_idle()
            _resolve(idle)

    def remove(self, collector: Collector) -> None:
        """Lets a request go, if it is still there."""
        with self._lock:
            if self._collectors.get(collector.request_id) is not collector:
                return
            del self._collectors[collector.request_id]
            self._sequences -= collector.n
            idle = self._take_idle()
        _resolve(idle)

    def find(self, request_id: str) -> Collector | None:
        """The request of that name."""
        return self._collectors.get(request_id)

    def all(self) -> list[Collector]:
        """Those that are there now."""
        self._purge()
        with self._lock:
            return list(self._collectors.values())

    def drain(self) -> None:
        """From now on nobody comes in."""
        self._draining = True

    async def wait_until_idle(self) -> None:
        """Until nobody is there."""
        future = asyncio.get_running_loop().create_future()
        with self._lock:
            self._idle.append(future)
        try:
            while self.all() or self._encodings:
                await asyncio.wait([future], timeout=LOOK_FOR_CLOSED)
        finally:
            with self._lock:
                self._idle = [other for other in self._idle if other is not future]

    def fail(self, reason: str) -> list[Collector]:
        """Ends it all, for the first reason that is given; those that were still there, for whom it is over."""
        with self._lock:
            self._failure = self._failure or reason
            collectors = list(self._collectors.values())
            self._collectors.clear()
            self._sequences = 0
            idle, self._idle = self._idle, []
        _resolve(idle)
        return collectors

    def check_health(self) -> None:
        """Raises EngineError where it is all over."""
        if self._failure is not None:
            raise EngineError(self._failure)

    def after_fork(self) -> None:
        """In the child, to which neither the readers nor the engine's thread came along."""
        self._lock = threading.Lock()
        if self._collectors and self._failure is None:
            self._failure = "the process was forked while the engine ran; make a new AsyncLLM in the child"
        self._collectors, self._sequences, self._encodings, self._idle = {}, 0, 0, []

    def _check_open(self) -> None:
        self.check_health()
        if self._draining:
            raise EngineError("the engine is draining; it takes no new requests")

    def _take_idle(self) -> list[asyncio.Future[None]]:
        """Those that wait until nobody is there, if nobody is."""
        if self._collectors or self._encodings:
            return []
        idle, self._idle = self._idle, []
        return idle

    def _purge(self) -> None:
        # A copy of the values is one call of C code, and so whole whoever changes them.
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
        if self._sequences + n <= most:  # fewer are there than may be: the engine need not be asked
            return
        load = self._load()
        waiting = load.waiting + sum(each.n for each in self._collectors.values() if not each.added)
        # As the engine has it: those for whom there is a place wait for no more than the next step.
        if waiting + n > most - load.running:
            self.refused += 1
            raise QueueFullError(
                f"the queue is full: {waiting} requests wait; the limit is max_queued_requests, {self._limit}"
            )


def _resolve(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        try:
            future.get_loop().call_soon_threadsafe(_set, future)
        except RuntimeError:  # its loop is closed, and nobody waits there
            continue


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
