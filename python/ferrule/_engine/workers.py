"""Threads for what would hold up an event loop: rendering templates, tokenizing, reading adapters and large bodies.

asyncio's own are waited for when a loop or the process ends, for as long as they take; a few that nobody can break off
would keep a program alive that was told to go.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

MOST = 8
"""Threads; other work waits."""
P = ParamSpec("P")
T = TypeVar("T")


class Workers:
    """A few threads, started as they are needed, with which the process can end."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.begin()

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What it returns, or raises; whoever is cancelled while it waits for a thread takes its work along."""
        context = contextvars.copy_context()
        future: Future[T] = Future()
        with self._changed:
            self._unfinished += 1
            if self._threads < min(self._unfinished, self._most):
                self._threads += 1
                threading.Thread(target=self._work, name=f"ferrule-worker-{self._threads}", daemon=True).start()
        self._jobs.put((future, lambda: context.run(work, *args, **kwargs)))
        return await asyncio.wrap_future(future)

    def settle(self, seconds: float) -> bool:
        """Waits until nothing is done any more, but no longer than this; whether that came true."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._unfinished, seconds)

    def begin(self) -> None:
        """Without threads or work, as in a forked child: threads do not come along, and their work is the parent's."""
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._changed = threading.Condition()
        self._threads = 0
        self._unfinished = 0

    def _work(self) -> None:
        while True:
            self._one(*self._jobs.get())

    def _one(self, future: Future[Any], job: Callable[[], Any]) -> None:
        try:
            if future.set_running_or_notify_cancel():
                try:
                    found = job()
                except BaseException as error:  # whoever waits for it gets it
                    future.set_exception(error)
                else:
                    future.set_result(found)
        finally:
            with self._changed:
                self._unfinished -= 1
                self._changed.notify_all()


WORKERS = Workers(MOST)
"""Those of the process, however many models and applications are in it."""
os.register_at_fork(after_in_child=WORKERS.begin)
