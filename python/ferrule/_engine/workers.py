"""Worker threads for work that would block an event loop: templates, tokenization, adapters and large request bodies.

The threads are daemons. asyncio's own executor joins its threads when a loop or the process ends, so work that cannot
be interrupted would keep the program alive.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from ferrule._cancellation import cancelled

MAX_WORKERS = 8
"""Maximum number of threads; more work is queued."""
MAX_LARGE_WORKERS = 1
"""Maximum number of threads for large inputs. Parsing them holds the GIL, so more would only delay the event loop."""
LARGE_INPUT = 256 << 10
"""Bytes or characters from which an input is large: tokenizing it takes a tenth of a second or more."""
P = ParamSpec("P")
T = TypeVar("T")


class Workers:
    """Pool of daemon threads, started on demand."""

    def __init__(self, max_workers: int) -> None:
        self._max_workers = max_workers
        self.reset()

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a function in a thread and returns its result.

        Cancelling drops work that has not been started; other work ends at its next `raise_if_cancelled`.
        """
        context, stop = contextvars.copy_context(), threading.Event()
        context.run(cancelled.set, stop)
        future: Future[T] = Future()
        with self._changed:
            self._unfinished += 1
            if self._threads < min(self._unfinished, self._max_workers):
                self._threads += 1
                threading.Thread(target=self._work, name=f"ferrule-worker-{self._threads}", daemon=True).start()
        self._jobs.put((future, lambda: context.run(work, *args, **kwargs)))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            stop.set()
            raise

    def settle(self, seconds: float) -> bool:
        """Waits until all work is done, at most `seconds`; returns whether it is done."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._unfinished, seconds)

    def reset(self) -> None:
        """Sets the state to no threads and no work, also in a forked child, which lacks the parent's threads."""
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._changed = threading.Condition()
        self._threads = 0
        self._unfinished = 0

    def _work(self) -> None:
        while True:
            self._run_job(*self._jobs.get())

    def _run_job(self, future: Future[Any], job: Callable[[], Any]) -> None:
        try:
            if future.set_running_or_notify_cancel():
                try:
                    result = job()
                except BaseException as error:  # raised where the future is awaited
                    future.set_exception(error)
                else:
                    future.set_result(result)
        finally:
            with self._changed:
                self._unfinished -= 1
                self._changed.notify_all()


WORKERS = Workers(MAX_WORKERS)
"""Worker threads of the process, shared by all models and servers."""
LARGE_WORKERS = Workers(MAX_LARGE_WORKERS)
"""Worker threads for large inputs, so that other requests do not wait for them."""
input_size: ContextVar[int] = ContextVar("input_size", default=0)
"""Size of the input of the request that the current task handles, in bytes."""
for each in (WORKERS, LARGE_WORKERS):
    os.register_at_fork(after_in_child=each.reset)


def workers_for(size: int = 0) -> Workers:
    """Returns the threads for work on an input of `size` bytes or characters, or of the current request's size."""
    return LARGE_WORKERS if max(size, input_size.get()) >= LARGE_INPUT else WORKERS
