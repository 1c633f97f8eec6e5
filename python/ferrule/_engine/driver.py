"""Driver that shares an engine between threads: a thread that waits for tokens runs a step for all threads.

One lock guards the engine; its `with` statement releases it even if Ctrl-C interrupts. The outputs of a step move from
the engine to a queue within one call of C code, and from there to the inbox of each caller by idempotent assignments.
So an interrupt of one thread loses no output of another thread.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ferrule._engine.energy import energy_log
from ferrule.errors import EngineError

if TYPE_CHECKING:
    from ferrule._engine.encoding.texts import Text
    from ferrule._native import Engine, Grammar, LoraAdapter, StepOutput
    from ferrule._params.logits_processors import LogitsProcessors


class Work(NamedTuple):
    """Arguments of `Engine.add_request` for one sequence."""

    token_ids: list[int]
    params: str
    """Parameters as JSON."""
    fork_of: int | None = None
    """Distance to the parent sequence in the same inbox, 1 for the preceding one; None for no parent."""
    lora: LoraAdapter | None = None
    """Adapter; None for the base model."""
    logits_processors: LogitsProcessors | None = None
    """Functions that change the logits before sampling."""
    grammar: Grammar | None = None
    """Grammar that the output must match."""
    features: Sequence[tuple[int, int, bytes]] = ()
    """Features of images in the prompt: first position, number of tokens, and rows of float32."""


class Inbox:
    """Requests of one call and their undelivered outputs.

    Inboxes that share `items` receive outputs together and are released separately.
    """

    def __init__(self, items: dict[tuple[int, int], StepOutput] | None = None) -> None:
        self.request_ids: list[int] = []
        """Ids of the added requests; appended one by one, so that an interrupt loses no id."""
        self.items: dict[tuple[int, int], StepOutput] = {} if items is None else items
        """Outputs by step number and request id."""
        self.finished: set[int] = set()
        """Ids of requests that have ended."""


LOCK_HANDOVER_SECONDS = 0.0002
"""Pause after a step in seconds, so that a waiting thread can wake up and take the lock. This takes tens of
microseconds on an idle processor, and a step takes milliseconds."""
_STEP = operator.methodcaller("step")
_drivers: weakref.WeakSet[Driver] = weakref.WeakSet()
_exiting = threading.Event()


class Driver:
    """Shares an engine between threads."""

    def __init__(self, engine: Engine, *, check_stages: Callable[[], None] | None = None) -> None:
        """`check_stages` raises EngineError if a pipeline stage is lost; None for an engine without stages."""
        self._engine: Engine | None = engine
        self._check_stages = check_stages
        self._closed_reason = "the engine is closed"
        self._closing = False
        self._stepping: int | None = None
        """Id of the thread that runs a step. A logits processor runs on this thread and must not wait for the step."""
        self._late_aborts: list[int] = []
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._energy = energy_log()
        self._undelivered: deque[tuple[int, Sequence[StepOutput]]] = deque()
        self._inboxes: dict[int, Inbox] = {}
        _drivers.add(self)

    @property
    def has_stages(self) -> bool:
        """Whether the engine has connections to pipeline stages, which a fork must not use."""
        return self._check_stages is not None

    def submit(self, inbox: Inbox, work: Iterable[Work]) -> None:
        """Adds requests in order. The caller must release the inbox, also after an error.

        Raises the errors of Engine.add_request.
        """
        self._check_outside()
        with self._lock:
            arguments = _arguments(work, inbox.request_ids)
            inbox.request_ids.extend(itertools.starmap(self._alive().add_request, arguments))
            for request_id in inbox.request_ids:
                self._inboxes[request_id] = inbox

    def receive(self, inbox: Inbox) -> list[StepOutput]:
        """Returns new outputs of the inbox's requests in order; runs steps until there is an output.

        Raises EngineError, KeyboardInterrupt.
        """
        while True:
            outputs = self.advance(inbox)
            if outputs:
                return outputs
            # CPython's lock is not fair. Without a pause this thread would keep it for a whole prompt.
            time.sleep(LOCK_HANDOVER_SECONDS)

    def advance(self, inbox: Inbox) -> list[StepOutput]:
        """Returns new outputs of the inbox's requests in order; runs one step if there is no output.

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
                # The interpreter is exiting and ends this daemon thread. An exception would print a traceback.
                threading.Event().wait()
            raise

    def abort(self, request_id: int) -> None:
        """Aborts a request; it has no further output."""
        if self._is_stepping():
            # A generator was garbage collected while a logits processor ran on this thread.
            self._late_aborts.append(request_id)
            return
        with self._lock:
            self._abort(request_id)

    def release(self, inbox: Inbox) -> None:
        """Aborts the unfinished requests of an inbox."""
        for request_id in inbox.request_ids:
            if request_id not in inbox.finished:
                self.abort(request_id)

    def check_idle(self) -> None:
        """Raises EngineError if the engine is dead or lost a stage; does nothing if it has unfinished requests."""
        self._check_outside()
        with self._lock:
            # Without requests, a step only finishes batches of aborted ones, and raises the error of a dead engine.
            if not self._alive().has_unfinished_requests():
                self._alive().step()
                if self._check_stages is not None:
                    self._check_stages()

    def load_lora(self, directory: str, config: str) -> LoraAdapter:
        """Loads an adapter; other threads can run steps meanwhile, except for a moment at the beginning."""
        self._check_outside()
        return self._alive().load_lora(directory, config)

    def save_state(self, token_ids: list[int], cache_salt: str | None, lora: LoraAdapter | None) -> bytes:
        """Returns the KV cache contents of a prompt as bytes."""
        self._check_outside()
        with self._lock:
            return self._alive().save_state(token_ids, cache_salt, lora)

    def restore_state(self, state: bytes) -> tuple[list[int], int]:
        """Restores a state; returns its tokens, and the number of them that the prefix cache holds now."""
        self._check_outside()
        with self._lock:
            return self._alive().restore_state(state)

    def metrics(self) -> str:
        """Returns the metrics as JSON, without waiting for a running step."""
        return self._alive().metrics()

    def logits(self, token_ids: list[int], lora: LoraAdapter | None, first: int = 0) -> bytearray:
        """Returns the logits after each token from index `first` on, float32 `[len(token_ids) - first, vocab_size]`."""
        self._check_outside()
        with self._lock:
            return self._alive().logits(token_ids, lora, first)

    def encode(self, texts: Sequence[Text], task: str) -> bytearray:
        """Returns the output of a task for texts, float32."""
        self._check_outside()
        given = [(text.token_ids, text.token_type_ids, text.cache_salt) for text in texts]
        with self._lock:
            return self._alive().encode(given, task)

    def features(self, tiles: Sequence[tuple[list[int], bytes]]) -> bytearray:
        """Returns the features of an image from its tiles, as a vision tower computes them, float32."""
        self._check_outside()
        with self._lock:
            return self._alive().features(list(tiles))

    def encode_all(self, portions: Iterable[Sequence[Text]], task: str) -> list[bytearray]:
        """Returns the output of a task for each portion of texts; other threads may step in between."""
        answers: list[bytearray] = []
        for portion in portions:
            if answers:
                time.sleep(LOCK_HANDOVER_SECONDS)
            answers.append(self.encode(portion, task))
        return answers

    def info(self) -> str:
        """Returns facts about the loaded model as JSON."""
        self._check_outside()
        with self._lock:
            return self._alive().info()

    def fail(self, reason: str) -> None:
        """Ends the engine after a running step. Waiting and later callers get an EngineError with this reason."""
        self._closed_reason = reason
        self._closing = True

    def close(self) -> None:
        """Frees the engine after a running step; waiting callers get an EngineError."""
        self._check_outside()
        # A generating thread takes the lock repeatedly. The flag stops it even if this thread never gets the lock
        # first.
        self._closing = True
        with self._lock:
            # Dropping the last reference to the engine would free gigabytes with the GIL held; close() releases the
            # GIL.
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
            raise EngineError("a logits processor must not call the engine that runs it")

    def _alive(self) -> Engine:
        engine = self._engine
        if self._closing or engine is None:
            raise EngineError(self._closed_reason)
        return engine

    def _step(self) -> None:
        engine = self._alive()
        if not engine.has_unfinished_requests():
            raise EngineError("the engine has no record of an unfinished request")
        if self._energy is not None:
            self._energy.mark_begin()
        self._stepping = threading.get_ident()
        try:
            self._undelivered.extend(zip(self._numbers, map(_STEP, (engine,)), strict=False))
        finally:
            self._stepping = None
        if self._energy is not None:
            self._energy.mark()
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
        """Replaces the lock in a forked child, where a thread that holds it no longer exists."""
        if self._lock.locked() or self.has_stages:
            self._engine = None
            cause = "its pipeline stages belong to the parent" if self.has_stages else "the engine ran"
            self._closed_reason = f"the process was forked while {cause}; create a new LLM in the child process"
        self._lock = threading.Lock()


def _arguments(work: Iterable[Work], added: Sequence[int]) -> Iterator[tuple[Any, ...]]:
    """Yields the arguments of Engine.add_request lazily; a fork needs the id of its parent, which is added first."""
    for each in work:
        parent = None if each.fork_of is None else added[-each.fork_of]
        yield each.token_ids, each.params, parent, each.lora, each.logits_processors, each.grammar, list(each.features)


def _close_all() -> None:
    # A daemon thread must not return from the engine to a finalized interpreter.
    _exiting.set()
    for driver in list(_drivers):
        driver.close()


def _after_fork() -> None:
    for driver in list(_drivers):
        driver.after_fork()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_after_fork)
