"""Texts that wait to be encoded by the engine's thread, between its steps.

Event loops put portions in and await their numbers. What several of them ask for in the same way goes to the engine at
once: what is made of a text does not depend on those beside it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from dataclasses import dataclass, field

from ferrule._engine.encoding.texts import Text
from ferrule.errors import EngineError


@dataclass(eq=False)
class Portion:
    """Texts of one caller, who waits for `answer` in the event loop that made it."""

    texts: list[Text]
    task: str
    width: int
    """Bytes of the answer."""
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    answer: asyncio.Future[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.answer = self.loop.create_future()

    def settle(self, answer: bytes | Exception) -> None:
        """Hands the answer over, from any thread."""
        try:
            self.loop.call_soon_threadsafe(self._settle, answer)
        except RuntimeError:  # its loop is closed, and nobody waits there
            return

    def _settle(self, answer: bytes | Exception) -> None:
        if self.answer.done():
            return
        if isinstance(answer, Exception):
            self.answer.set_exception(answer)
        else:
            self.answer.set_result(answer)


class EncodeQueue:
    """First come, first served."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._portions: deque[Portion] = deque()
        self._closed: str | None = None

    def __len__(self) -> int:
        return len(self._portions)

    def put(self, portion: Portion) -> None:
        """Raises EngineError where it is closed."""
        with self._lock:
            if self._closed is not None:
                raise EngineError(self._closed)
            self._portions.append(portion)

    def take(self, tokens: int, texts: int) -> list[Portion]:
        """The first portion, and others that want the same, while all are within the limits; none where none waits."""
        taken: list[Portion] = []
        with self._lock:
            waiting, self._portions = self._portions, deque()
            for portion in waiting:
                if portion.answer.done():  # nobody waits for it any more
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

    def close(self, reason: str) -> None:
        """Ends those that wait, and refuses all that come, with an EngineError; the first reason counts."""
        with self._lock:
            self._closed = self._closed or reason
            portions, self._portions = self._portions, deque()
        for portion in portions:
            portion.settle(EngineError(self._closed))
