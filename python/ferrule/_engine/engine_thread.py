"""The thread in which the engine of an `AsyncLLM` runs.

Event loops post what they want and go on; between two steps the thread does it. What a step brings goes to each loop in
one call, however many requests it is for.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterable
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

News: TypeAlias = "tuple[Collector, Completion, StepOutput]"

CLOSED = "the engine is closed"

_threads: weakref.WeakSet[EngineThread] = weakref.WeakSet()


class EngineThread:
    """Steps as long as there are requests, and sleeps otherwise. It starts with the first one."""

    def __init__(self, driver: Driver, registry: Registry, portion: tuple[int, int]) -> None:
        """`portion`: how many tokens and how many texts are encoded between two steps."""
        self._driver = driver
        self._registry = registry
        self._portion = portion
        self._encodes = EncodeQueue()
        registry.on_abandoned(self.release)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = False
        # From here on, what the thread alone touches.
        self._received = Inbox()
        self._inboxes: dict[Collector, Inbox] = {}
        self._routes: dict[int, tuple[Collector, Completion]] = {}
        _threads.add(self)

    def add(self, collector: Collector) -> None:
        """Posts a request that has begun."""
        collector.posted = True
        self._commands.put(partial(self._add, collector))
        self._start()

    def encode(self, portion: Portion) -> None:
        """Posts texts to be encoded.

        Raises EngineError where nobody would do it any more.
        """
        self._encodes.put(portion)
        self._commands.put(_nothing)  # wakes it up
        self._start()

    def drop_encodes(self, reason: str) -> None:
        """Ends what waits to be encoded, and all that would come, with an EngineError."""
        self._encodes.close(reason)

    def release(self, collector: Collector) -> None:
        """Posts the end of a request: what still runs of it is aborted."""
        if collector.posted:  # else there may be no thread yet, which would read this
            self._commands.put(partial(self._release, collector))

    def stop(self) -> None:
        """Posts the end of the thread: it frees the engine, and every reader gets an EngineError."""
        with self._lock:
            self._stopping = True
            started = self._thread is not None
        if started:
            self._commands.put(_nothing)  # wakes it up
        else:
            self._end(CLOSED)

    @property
    def alive(self) -> bool:
        """Whether it has begun and not ended."""
        return self._thread is not None and self._thread.is_alive()

    def join(self) -> None:
        """Waits until it has ended, for a step at most once it is stopped."""
        if self._thread is not None:
            self._thread.join()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._stopping:
                self._thread = threading.Thread(target=self._run, name="ferrule-engine", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        reason = CLOSED
        try:
            while not self._stopping:
                self._obey()
                if self._encodes and not self._stopping:
                    self._encode()
                if self._routes and not self._stopping:
                    self._advance()
        except EngineError as error:
            reason = str(error)
        except BaseException as error:
            reason = f"the engine's thread failed: {error!r}"
        finally:
            self._end(reason)

    def _obey(self) -> None:
        """Does what was posted until now; with nothing to step for, waits until something is."""
        if not self._routes and not self._encodes:
            self._commands.get()()
        for _ in range(self._commands.qsize()):
            self._commands.get()()

    def _add(self, collector: Collector) -> None:
        if collector.ended:
            return
        # From here on the engine counts it among those that wait, or refuses it.
        collector.added = True
        inbox = Inbox(self._received.items)
        try:
            self._driver.submit(inbox, collector.request.work())
        except EngineError:
            raise
        except Exception as error:
            self._driver.release(inbox)
            if not self._call(collector.loop, self._fail_all, [collector], error):
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
        batches: dict[AbstractEventLoop, list[News]] = {}
        failed = False
        for step in self._driver.advance(self._received):
            route = self._routes.get(step.request_id)
            if route is None:
                continue
            collector, completion = route
            completion.add_prompt_logprobs(step)
            if step.finish_reason is not None:
                del self._routes[step.request_id]
                failed = failed or step.finish_reason == "error"
            batches.setdefault(collector.loop, []).append((collector, completion, step))
        if failed and not self._routes:
            # One request's error is its own affair; but so says an engine that has died, and then nobody would step.
            # Before anyone hears of it, so that who then asks for the engine's health is told the truth.
            self._driver.check_idle()
        for loop, batch in batches.items():
            if not self._call(loop, self._deliver, batch):
                self._abandon(collector for collector, _, _ in batch)

    def _encode(self) -> None:
        """What those who waited longest want, and others that want the same."""
        portions = self._encodes.take(*self._portion)
        if len(portions) > 1 and not self._answer(portions):
            # One of them is at fault, and the others are not.
            for portion in portions:
                self._answer([portion])
        elif len(portions) == 1:
            self._answer(portions)

    def _answer(self, portions: list[Portion]) -> bool:
        """Has texts encoded; an error is told to the one portion that it is of."""
        try:
            answer = self._driver.encode([text for portion in portions for text in portion.texts], portions[0].task)
        except Exception as error:
            if len(portions) == 1:
                portions[0].settle(error)
                if isinstance(error, EngineError) and not self._routes:
                    self._driver.check_idle()  # it says whether the engine has died
            return False
        start = 0
        for portion in portions:
            portion.settle(bytes(answer[start : start + portion.width]))
            start += portion.width
        return True

    def _abandon(self, collectors: Iterable[Collector]) -> None:
        """Ends requests whose event loop was closed under them."""
        for collector in collectors:
            self._registry.remove(collector)
            self._release(collector)

    def _end(self, reason: str) -> None:
        # First, so that a stopped engine is free by the time that anyone hears of it.
        self._driver.close()
        by_loop: dict[AbstractEventLoop, list[Collector]] = {}
        for collector in self._registry.fail(reason):
            by_loop.setdefault(collector.loop, []).append(collector)
        for loop, collectors in by_loop.items():
            self._call(loop, self._fail_all, collectors, None, reason)
        self._encodes.close(reason)
        self._inboxes.clear()
        self._routes.clear()

    @staticmethod
    def _call(loop: AbstractEventLoop, function: Callable[..., None], *arguments: object) -> bool:
        """Runs a function in an event loop, soon; says whether that loop is still there."""
        try:
            loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            return False
        return True

    # What follows runs in the loop of the collectors.

    def _deliver(self, batch: list[News]) -> None:
        for collector, completion, step in batch:
            if collector.ended or completion.finish_reason is not None:
                continue  # ended here while the engine still worked on it
            collector.take(completion, step)
            if collector.ended:
                self._registry.remove(collector)
                self.release(collector)
            elif completion.finish_reason is not None and step.finish_reason is None:
                self._commands.put(partial(self._abort, step.request_id))

    def _fail_all(self, collectors: list[Collector], error: Exception | None, reason: str = "") -> None:
        for collector in collectors:
            # An exception that several tasks raise would gather the tracebacks of all of them.
            collector.fail(EngineError(reason) if error is None else error)
            self._registry.remove(collector)

    def after_fork(self) -> None:
        """In the child, which the thread did not come along to: the next request starts another."""
        self._lock = threading.Lock()
        self._commands = queue.SimpleQueue()
        self._encodes = EncodeQueue()
        self._thread = None
        self._received, self._inboxes, self._routes = Inbox(), {}, {}
        self._registry.after_fork()


def _nothing() -> None:
    """A command that only wakes the thread."""


def _after_fork() -> None:
    for thread in list(_threads):
        thread.after_fork()


os.register_at_fork(after_in_child=_after_fork)
