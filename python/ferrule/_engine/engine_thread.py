"""Engine thread of an `AsyncLLM`.

Event loops post commands without waiting, and the thread runs them between steps. The outputs of a step go to each
event loop in one call for all its requests.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterable
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from ferrule._engine.collector import Collector
from ferrule._engine.driver import Driver, Inbox
from ferrule._engine.encoding.queue import EncodeQueue, Portion
from ferrule._engine.registry import Registry
from ferrule._engine.request import Completion
from ferrule.errors import EngineError

if TYPE_CHECKING:
    from ferrule._native import StepOutput

Delivery: TypeAlias = "tuple[Collector, Completion, StepOutput]"

CLOSED = "the engine is closed"
IDLE_CHECK_SECONDS = 1.0
"""Interval in seconds at which an idle engine checks whether its pipeline stages still run."""

_threads: weakref.WeakSet[EngineThread] = weakref.WeakSet()


class EngineThread:
    """Thread that runs steps while there are requests, and sleeps otherwise. The first request starts it.

    With pipeline stages it runs from the beginning and wakes up every second, so that a lost stage is noticed.
    """

    def __init__(self, driver: Driver, registry: Registry, portion: tuple[int, int]) -> None:
        """Creates the thread; `portion` is the maximum number of tokens and of texts to encode between two steps."""
        self._driver = driver
        self._registry = registry
        self._portion = portion
        self._encodes = EncodeQueue()
        registry.on_closed_loop(self.release)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = False
        # Only the engine thread uses the following attributes.
        self._received = Inbox()
        self._inboxes: dict[Collector, Inbox] = {}
        self._routes: dict[int, tuple[Collector, Completion]] = {}
        _threads.add(self)
        if driver.has_stages:
            self._start()

    def add(self, collector: Collector) -> None:
        """Posts a request with a tokenized prompt."""
        collector.posted = True
        self._commands.put(partial(self._add, collector))
        self._start()

    def encode(self, portion: Portion) -> None:
        """Posts texts to be encoded.

        Raises EngineError if the engine has failed or is closed.
        """
        self._encodes.put(portion)
        self._commands.put(_wake)
        self._start()

    def drop_encodes(self, reason: str) -> None:
        """Fails waiting and later texts to encode with an EngineError."""
        self._encodes.close(EngineError(reason))

    def release(self, collector: Collector) -> None:
        """Posts the end of a request; its running sequences are aborted."""
        if collector.posted:  # a request that was never posted needs no engine thread
            self._commands.put(partial(self._release, collector))

    def stop(self) -> None:
        """Posts the end of the thread. The thread frees the engine, and readers get an EngineError."""
        with self._lock:
            self._stopping = True
            started = self._thread is not None
        if started:
            self._commands.put(_wake)
        else:
            self._end(EngineError(CLOSED))

    @property
    def alive(self) -> bool:
        """Whether the thread has started and not ended."""
        return self._thread is not None and self._thread.is_alive()

    def join(self) -> None:
        """Waits until the thread has ended; after `stop` this takes one step at most."""
        if self._thread is not None:
            self._thread.join()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._stopping:
                self._thread = threading.Thread(target=self._run, name="ferrule-engine", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        failure = EngineError(CLOSED)
        try:
            while not self._stopping:
                self._run_commands()
                if self._encodes and not self._stopping:
                    self._encode()
                if self._routes and not self._stopping:
                    self._advance()
        except EngineError as error:
            failure = error
        except BaseException as error:
            failure = EngineError(f"the engine's thread failed: {error!r}")
        finally:
            self._end(failure)

    def _run_commands(self) -> None:
        """Runs the commands posted so far; waits for one if there is nothing to compute."""
        if not self._routes and not self._encodes:
            self._wait_for_command()()
        for _ in range(self._commands.qsize()):
            self._commands.get()()

    def _wait_for_command(self) -> Callable[[], None]:
        """Returns the next command; with pipeline stages, the check of an engine that has been idle for a second."""
        try:
            return self._commands.get(timeout=IDLE_CHECK_SECONDS if self._driver.has_stages else None)
        except queue.Empty:
            return self._driver.check_idle

    def _add(self, collector: Collector) -> None:
        if collector.ended:
            return
        # From here on, the engine counts the request as waiting or refuses it.
        collector.added = True
        inbox = Inbox(self._received.items)
        try:
            self._driver.submit(inbox, collector.request.work())
        except EngineError:
            raise
        except Exception as error:
            self._driver.release(inbox)
            if not self._call(collector.loop, self._fail, [(collector, error)]):
                self._abandon([collector])
            return
        self._inboxes[collector] = inbox
        for request_id, completion in zip(inbox.request_ids, collector.request.completions, strict=True):
            self._routes[request_id] = (collector, completion)

    def _release(self, collector: Collector) -> None:
        inbox = self._inboxes.pop(collector, None)
        if inbox is not None:
            self._driver.release(inbox)
            for request_id in inbox.request_ids:
                self._routes.pop(request_id, None)

    def _abort(self, request_id: int) -> None:
        if self._routes.pop(request_id, None) is not None:
            self._driver.abort(request_id)

    def _advance(self) -> None:
        batches: dict[AbstractEventLoop, list[Delivery]] = {}
        failed = False
        for step in self._driver.advance(self._received):
            route = self._routes.get(step.request_id)
            if route is None:
                continue
            collector, completion = route
            completion.receive(step)
            if step.finish_reason is not None:
                del self._routes[step.request_id]
                failed = failed or step.finish_reason == "error"
            batches.setdefault(collector.loop, []).append((collector, completion, step))
        if failed and not self._routes:
            # One request may have failed, or the whole engine. Check before the error is delivered, so that a reader
            # that calls check_health next gets the right result.
            self._driver.check_idle()
        for loop, batch in batches.items():
            if not self._call(loop, self._deliver, batch):
                self._abandon(collector for collector, _, _ in batch)

    def _encode(self) -> None:
        """Encodes the portion that has waited longest, together with other portions of the same task."""
        portions = self._encodes.take(*self._portion)
        if len(portions) > 1 and not self._encode_together(portions):
            # One portion is invalid. Encode each separately, so that only this one fails.
            for portion in portions:
                self._encode_together([portion])
        elif len(portions) == 1:
            self._encode_together(portions)

    def _encode_together(self, portions: list[Portion]) -> bool:
        """Encodes portions and returns whether it succeeded; a single portion receives its error."""
        try:
            answer = self._driver.encode([text for portion in portions for text in portion.texts], portions[0].task)
        except Exception as error:
            if len(portions) == 1:
                portions[0].settle(error)
                if isinstance(error, EngineError) and not self._routes:
                    self._driver.check_idle()  # raises if the engine is dead
            return False
        start = 0
        for portion in portions:
            portion.settle(bytes(answer[start : start + portion.width]))
            start += portion.width
        return True

    def _abandon(self, collectors: Iterable[Collector]) -> None:
        """Removes requests whose event loop was closed."""
        for collector in collectors:
            self._registry.remove(collector)
            self._release(collector)

    def _end(self, failure: EngineError) -> None:
        # Close the engine first, so that its memory is free when readers get the error.
        self._driver.close()
        by_loop: dict[AbstractEventLoop, list[tuple[Collector, Exception]]] = {}
        for collector in self._registry.fail(failure):
            # Each task gets its own exception; a shared one would accumulate the tracebacks of all tasks.
            by_loop.setdefault(collector.loop, []).append((collector, copy(failure)))
        for loop, failures in by_loop.items():
            self._call(loop, self._fail, failures)
        self._encodes.close(failure)
        self._inboxes.clear()
        self._routes.clear()

    @staticmethod
    def _call(loop: AbstractEventLoop, function: Callable[..., None], *arguments: object) -> bool:
        """Schedules a function in an event loop; returns False if the loop is closed."""
        try:
            loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            return False
        return True

    # The following methods run in the event loop of the collectors.

    def _deliver(self, batch: list[Delivery]) -> None:
        for collector, completion, step in batch:
            if collector.ended or completion.finish_reason is not None:
                continue  # a stop string or abort ended the request while the engine computed the step
            collector.take(completion, step)
            if collector.ended:
                self._registry.remove(collector)
                self.release(collector)
            elif completion.finish_reason is not None and step.finish_reason is None:
                self._commands.put(partial(self._abort, step.request_id))

    def _fail(self, failures: list[tuple[Collector, Exception]]) -> None:
        for collector, error in failures:
            collector.fail(error)
            self._registry.remove(collector)

    def after_fork(self) -> None:
        """Resets the state in a forked child, which does not have the thread; the next request starts a new thread."""
        self._lock = threading.Lock()
        self._commands = queue.SimpleQueue()
        self._encodes = EncodeQueue()
        self._thread = None
        self._received, self._inboxes, self._routes = Inbox(), {}, {}
        self._registry.after_fork()


def _wake() -> None:
    """Command that only wakes the thread."""


def _after_fork() -> None:
    for thread in list(_threads):
        thread.after_fork()


os.register_at_fork(after_in_child=_after_fork)
