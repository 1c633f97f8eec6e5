"""Runs the engine for any number of threads: whoever waits for tokens, and finds none there, steps for all.

One lock guards the engine. A plain lock in a `with` statement is let go whatever happens, Ctrl-C at any moment
included. A step's outputs pass from the engine into a queue within one call of C code, and from there into each
caller's inbox by assignments that may be repeated: an interrupt of one thread loses nothing that belongs to another.
"""

from __future__ import annotations

import atexit
import itertools
import operator
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ferrule.errors import EngineError

if TYPE_CHECKING:
    from ferrule._native import Engine, StepOutput


class Inbox:
    """The requests of one call, and what they got."""

    def __init__(self) -> None:
        self.request_ids: list[int] = []
        """Grows as requests are added, so that none is lost when adding them is interrupted."""
        self.items: dict[tuple[int, int], StepOutput] = {}
        """By step and request."""
        self.finished: set[int] = set()


_STEP = operator.methodcaller("step")
_drivers: weakref.WeakSet[Driver] = weakref.WeakSet()
_exiting = threading.Event()


class Driver:
    """Shares an engine between threads."""

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine | None = engine
        self._gone = "the engine is closed"
        self._closing = False
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._undelivered: deque[tuple[int, Sequence[StepOutput]]] = deque()
        self._inboxes: dict[int, Inbox] = {}
        _drivers.add(self)

    def submit(self, inbox: Inbox, requests: Iterable[tuple[list[int], str]]) -> None:
        """Adds requests, as prompt and parameters, in order.

        Raises what Engine.add_request does; `release` the inbox in any case.
        """
        with self._lock:
            inbox.request_ids.extend(itertools.starmap(self._alive().add_request, requests))
            for request_id in inbox.request_ids:
                self._inboxes[request_id] = inbox

    def receive(self, inbox: Inbox) -> list[StepOutput]:
        """What the inbox's requests got since the last call, in order; waits until there is something.

        Raises EngineError, KeyboardInterrupt.
        """
        try:
            while True:
                with self._lock:
                    self._deliver()
                    if not inbox.items:
                        self._step()
                    if inbox.items:
                        return [inbox.items.pop(key) for key in sorted(inbox.items)]
        except EngineError:
            if _exiting.is_set() and threading.current_thread().daemon:
                # Nobody is left to tell. The interpreter is about to go, and this thread with it.
                threading.Event().wait()
            raise

    def abort(self, request_id: int) -> None:
        """Ends a request; nothing more arrives for it."""
        with self._lock:
            inbox = self._inboxes.pop(request_id, None)
            if self._engine is not None:
                self._engine.abort(request_id)
            if inbox is not None:
                inbox.finished.add(request_id)

    def release(self, inbox: Inbox) -> None:
        """Ends what is left of an inbox's requests."""
        for request_id in inbox.request_ids:
            if request_id not in inbox.finished:
                self.abort(request_id)

    def logits(self, token_ids: list[int]) -> bytearray:
        """The logits after each token, float32 `[len(token_ids), vocab_size]`."""
        with self._lock:
            return self._alive().logits(token_ids)

    def info(self) -> str:
        """What is loaded, as JSON."""
        with self._lock:
            return self._alive().info()

    def close(self) -> None:
        """Frees the engine once a running step is over; whoever still waits gets an EngineError."""
        # Who steps takes the lock again and again, and might keep it from us for a whole prompt.
        self._closing = True
        with self._lock:
            self._engine = None

    def _alive(self) -> Engine:
        if self._closing or self._engine is None:
            raise EngineError(self._gone)
        return self._engine

    def _step(self) -> None:
        engine = self._alive()
        if not engine.has_unfinished_requests():
            raise EngineError("the engine has lost a request")
        self._undelivered.extend(zip(self._numbers, map(_STEP, (engine,)), strict=False))
        self._deliver()

    def _deliver(self) -> None:
        while self._undelivered:
            number, outputs = self._undelivered[0]
            for output in outputs:
                inbox = self._inboxes.get(output.request_id)
                if inbox is not None:
                    inbox.items[number, output.request_id] = output
                    if output.finish_reason is not None:
                        inbox.finished.add(output.request_id)
            for output in outputs:
                if output.finish_reason is not None:
                    self._inboxes.pop(output.request_id, None)
            self._undelivered.popleft()

    def after_fork(self) -> None:
        """In the child: a lock held by a thread that was not copied would never open."""
        if self._lock.locked():
            self._engine = None
            self._gone = "the process was forked while the engine ran; make a new LLM in the child"
        self._lock = threading.Lock()


def _close_all() -> None:
    # A daemon thread inside the engine must not come back to an interpreter that is gone.
    _exiting.set()
    for driver in list(_drivers):
        driver.close()


def _after_fork() -> None:
    for driver in list(_drivers):
        driver.after_fork()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_after_fork)
