"""Queue of texts that the engine's thread encodes between its steps.

Event loops add portions and await their results. Portions with the same task are computed together, which is possible
because the result of a text does not depend on the other texts.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from copy import copy
from dataclasses import dataclass, field

from ferrule._engine.encoding.texts import Text
from ferrule.errors import EngineError


@dataclass(eq=False)
class Portion:
    """Texts of one caller, which awaits `answer` in the event loop that created it."""

    texts: list[Text]
    task: str
    width: int
    """Size of the answer in bytes."""
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    answer: asyncio.Future[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.answer = self.loop.create_future()

    def settle(self, answer: bytes | Exception) -> None:
        """Sets the answer, from any thread."""
        try:
            self.loop.call_soon_threadsafe(self._settle, answer)
        except RuntimeError:  # the event loop is closed, so nothing waits for the answer
            return

    def _settle(self, answer: bytes | Exception) -> None:
        if self.answer.done():
            return
        if isinstance(answer, Exception):
            self.answer.set_exception(answer)
        else:
            self.answer.set_result(answer)


class EncodeQueue:
    """Queue of portions in order of arrival."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._portions: deque[Portion] = deque()
        self._closed: EngineError | None = None

    def __len__(self) -> int:
        return len(self._portions)

    def put(self, portion: Portion) -> None:
        """Adds a portion.

        Raises EngineError if the queue is closed.
        """
        with self._lock:
            if self._closed is not None:
                raise copy(self._closed)
            self._portions.append(portion)

    def take(self, tokens: int, texts: int) -> list[Portion]:
        """Removes and returns the first portion and other portions of the same task, within the limits."""
        taken: list[Portion] = []
        with self._lock:
            waiting, self._portions = self._portions, deque()
            for portion in waiting:
                if portion.answer.done():  # the caller was cancelled
                    continue
                length = sum(len(text.token_ids) for text in portion.texts)
                same = not taken or portion.task == taken[0].task
                if not same or (taken and (length > tokens or len(portion.texts) > texts)):
                    self._portions.append(portion)
                    continue
                taken.append(portion)
                tokens -= length
                texts -= len(portion.texts)
        return taken

    def close(self, error: EngineError) -> None:
        """Fails waiting and later portions with copies of an error, that of the first call."""
        with self._lock:
            self._closed = self._closed or error
            portions, self._portions = self._portions, deque()
        for portion in portions:
            portion.settle(copy(self._closed))
