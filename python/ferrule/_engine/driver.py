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
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ferrule.errors import EngineError

if TYPE_CHECKING:
    from ferrule._engine.encoding.texts import Text
    from ferrule._native import Engine, Grammar, LoraAdapter, StepOutput
    from ferrule._params.logits_processors import LogitsProcessors


class Work(NamedTuple):
    """One sequence for the engine."""

    token_ids: list[int]
    params: str
    """JSON."""
    fork_of: int | None = None
    """Where it continues the prompt of a sequence of the same inbox: how far back that one was added, 1 for the one
    just before."""
    lora: LoraAdapter | None = None
    """What is added to the model for it."""
    logits_processors: LogitsProcessors | None = None
    """What changes its logits before a token is sampled."""
    grammar: Grammar | None = None
    """What its output must be."""


class Inbox:
    """The requests of one call, and what they got.

    Inboxes with the same `items` are received together, and released one by one.
    """

    def __init__(self, items: dict[tuple[int, int], StepOutput] | None = None) -> None:
        self.request_ids: list[int] = []
        """Grows as requests are added, so that none is lost when adding them is interrupted."""
        self.items: dict[tuple[int, int], StepOutput] = {} if items is None else items
        """By step and request."""
        self.finished: set[int] = set()


HAND_OVER = 0.0002
"""Seconds in which a thread that waits for the engine wakes up and takes the lock: tens of microseconds where a
processor is idle, and little beside a step of milliseconds."""
_STEP = operator.methodcaller("step")
_drivers: weakref.WeakSet[Driver] = weakref.WeakSet()
_exiting = threading.Event()


class Driver:
    """Shares an engine between threads."""

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine | None = engine
        self._gone = "the engine is closed"
        self._closing = False
        self._stepping: int | None = None
        """The thread that steps. A logits processor runs on it, and would wait for itself."""
        self._late_aborts: list[int] = []
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._undelivered: deque[tuple[int, Sequence[StepOutput]]] = deque()
        self._inboxes: dict[int, Inbox] = {}
        _drivers.add(self)

    def submit(self, inbox: Inbox, work: Iterable[Work]) -> None:
        """Adds requests, in order.

        Raises what Engine.add_request does; `release` the inbox in any case.
        """
        self._check_outside()
        with self._lock:
            arguments = _arguments(work, inbox.request_ids)
            inbox.request_ids.extend(itertools.starmap(self._alive().add_request, arguments))
            for request_id in inbox.request_ids:
                self._inboxes[request_id] = inbox

    def receive(self, inbox: Inbox) -> list[StepOutput]:
        """What the inbox's requests got since the last call, in order; waits until there is something.

        Raises EngineError, KeyboardInterrupt.
        """
        while True:
            outputs = self.advance(inbox)
            if outputs:
                return outputs
            # CPython's lock has no queue: taken again at once, it would be kept from all others for a whole prompt.
            time.sleep(HAND_OVER)

    def advance(self, inbox: Inbox) -> list[StepOutput]:
        """What the inbox's requests got since the last call, in order: if that is nothing, what one step brings them.

        Raises EngineError, KeyboardInterrupt.
        """
        self._check_outside()
        try:
            with self._lock:
                self._deliver()
                if not inbox.items:
                    self._step()
                return [inbox.items.pop(key) for key in sorted(inbox.items)]
        except EngineError:
            if _exiting.is_set() and threading.current_thread().daemon:
                # Nobody is left to tell. The interpreter is about to go, and this thread with it.
                threading.Event().wait()
            raise

    def abort(self, request_id: int) -> None:
        """Ends a request; nothing more arrives for it."""
        if self._is_stepping():
            # A generator that nobody reads any more was collected while a logits processor ran.
            self._late_aborts.append(request_id)
            return
        with self._lock:
            self._abort(request_id)

    def release(self, inbox: Inbox) -> None:
        """Ends what is left of an inbox's requests."""
        for request_id in inbox.request_ids:
            if request_id not in inbox.finished:
                self.abort(request_id)

    def check_idle(self) -> None:
        """Raises EngineError where the engine is dead; only for an engine that has nothing to do."""
        self._check_outside()
        with self._lock:
            # A step says so, and without requests it does nothing else.
            if not self._alive().has_unfinished_requests():
                self._alive().step()

    def load_lora(self, directory: str, config: str) -> LoraAdapter:
        """Loads an adapter. The engine steps meanwhile, but for a moment at the beginning."""
        self._check_outside()
        return self._alive().load_lora(directory, config)

    def save_state(self, token_ids: list[int], cache_salt: str | None, lora: LoraAdapter | None) -> bytes:
        """The keys and values of a prompt, as bytes."""
        self._check_outside()
        with self._lock:
            return self._alive().save_state(token_ids, cache_salt, lora)

    def restore_state(self, state: bytes) -> tuple[list[int], int]:
        """The tokens of a state, and how many of them are in the prefix cache now."""
        self._check_outside()
        with self._lock:
            return self._alive().restore_state(state)

    def metrics(self) -> str:
        """The engine's numbers, as JSON. Waits for nobody: the engine has them at hand while it steps."""
        return self._alive().metrics()

    def logits(self, token_ids: list[int], lora: LoraAdapter | None, first: int = 0) -> bytearray:
        """The logits after each token from the one at `first` on, float32 `[len(token_ids) - first, vocab_size]`."""
        self._check_outside()
        with self._lock:
            return self._alive().logits(token_ids, lora, first)

    def encode(self, texts: Sequence[Text], task: str) -> bytearray:
        """What a task makes of texts, float32."""
        self._check_outside()
        given = [(text.token_ids, text.token_type_ids, text.cache_salt) for text in texts]
        with self._lock:
            return self._alive().encode(given, task)

    def encode_all(self, portions: Iterable[Sequence[Text]], task: str) -> list[bytearray]:
        """What a task makes of texts, portion by portion; others come between."""
        answers: list[bytearray] = []
        for portion in portions:
            if answers:
                time.sleep(HAND_OVER)
            answers.append(self.encode(portion, task))
        return answers

    def info(self) -> str:
        """What is loaded, as JSON."""
        self._check_outside()
        with self._lock:
            return self._alive().info()

    def close(self) -> None:
        """Frees the engine once a running step is over; whoever still waits gets an EngineError."""
        self._check_outside()
        # Who steps and gets tokens takes the lock again at once; this ends that, whoever is quicker.
        self._closing = True
        with self._lock:
            # The engine may outlive this reference, and dropping it would free gigabytes with Python's lock held.
            if self._engine is not None:
                self._engine.close()
            self._engine = None

    def _abort(self, request_id: int) -> None:
        inbox = self._inboxes.pop(request_id, None)
        if self._engine is not None:
            self._engine.abort(request_id)
        if inbox is not None:
            inbox.finished.add(request_id)

    def _is_stepping(self) -> bool:
        return self._stepping == threading.get_ident()

    def _check_outside(self) -> None:
        if self._is_stepping():
            raise EngineError("a logits processor cannot use the engine that waits for it")

    def _alive(self) -> Engine:
        engine = self._engine
        if self._closing or engine is None:
            raise EngineError(self._gone)
        return engine

    def _step(self) -> None:
        engine = self._alive()
        if not engine.has_unfinished_requests():
            raise EngineError("the engine has lost a request")
        self._stepping = threading.get_ident()
        try:
            self._undelivered.extend(zip(self._numbers, map(_STEP, (engine,)), strict=False))
        finally:
            self._stepping = None
        while self._late_aborts:
            self._abort(self._late_aborts.pop())
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


def _arguments(work: Iterable[Work], added: Sequence[int]) -> Iterator[tuple[Any, ...]]:
    """Those of Engine.add_request. A fork's origin has its id by the time that the fork's turn comes."""
    for each in work:
        origin = None if each.fork_of is None else added[-each.fork_of]
        yield each.token_ids, each.params, origin, each.lora, each.logits_processors, each.grammar


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
