"""One request of an `AsyncLLM`, as the event loop of its reader sees it.

There is no queue: the request itself grows, and a reader takes what is new of it. Who reads late, or never, gets the
newest state at once and costs no memory but the request's own.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ferrule._engine.request import Completion, Request
from ferrule._text.parsers import MessageDelta
from ferrule.errors import EngineError, FerruleError
from ferrule.outputs import RequestOutput, StreamDelta, StreamStep

if TYPE_CHECKING:
    from ferrule._native import StepOutput


@dataclass
class _Place:
    """How far a completion has been read."""

    characters: int = 0
    tokens: int = 0
    message: MessageDelta = field(default_factory=MessageDelta)
    ended: bool = False

    def advance(self, index: int, completion: Completion) -> StreamDelta:
        """What is new of it, and read from now on."""
        text, start = completion.text[self.characters :], self.tokens
        message = None
        if completion.message is not None:
            message, self.message = completion.message.since(self.message), completion.message
        self.characters, self.tokens = len(completion.text), len(completion.token_ids)
        self.ended = completion.finish_reason is not None
        return StreamDelta(
            text,
            completion.token_ids[start:],
            None if completion.logprobs is None else completion.logprobs[start:],
            message=message,
            entropies=None if completion.entropies is None else completion.entropies[start:],
            index=index,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )


class Collector:
    """Gathers what the engine says of a request and wakes its reader. Made and used in one event loop."""

    def __init__(self, request_id: str, n: int) -> None:
        self.request_id = request_id
        self.n = n
        """Completions, which are sequences to the engine."""
        self.loop = asyncio.get_running_loop()
        self.posted = False
        """Whether the engine's thread is on the way to it, or has it. Only this loop changes it."""
        self.added = False
        """Whether the engine has been told. Only the engine's thread changes it."""
        self.ended = False
        """Whether the engine has nothing more to say to anyone here; never back to False."""
        self._request: Request | None = None
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._places: dict[int, _Place] = {}

    @property
    def request(self) -> Request:
        """There once `begin` has been called."""
        if self._request is None:
            raise EngineError(f"the request {self.request_id} has not begun")
        return self._request

    def begin(self, request: Request) -> None:
        """Takes the request when its prompt has been read; it may have been aborted meanwhile."""
        self._request = request
        if self.ended:
            self._abort_completions(request)

    def take(self, completion: Completion, step: StepOutput) -> None:
        """What a step brought."""
        try:
            delta = completion.add(step)
        except FerruleError as error:
            self.fail(error)
            return
        except Exception as error:
            # A defect of ours: told to whoever reads, since an event loop would only log it and let the reader wait.
            failure = EngineError(f"what the engine said of {self.request_id} could not be read: {error!r}")
            failure.__cause__ = error
            self.fail(failure)
            return
        self.ended = self.request.finished
        if self.request.ranks and not self.ended:
            return  # which of them are the best is known at the end
        if delta.token_ids or completion.finish_reason is not None:
            self._news.set()

    def fail(self, error: Exception) -> None:
        """Ends it with an error, which the reader gets."""
        if not self.ended:
            self.ended = True
            self._error = error
            self._news.set()

    def abort(self) -> None:
        """Ends it where it is; the reader gets a last output that says so."""
        if not self.ended:
            self.ended = True
            if self._request is not None:
                self._abort_completions(self._request)
            self._news.set()

    async def next_output(self) -> RequestOutput:
        """The state of the request, once it differs from the one before.

        Raises what `fail` was told.
        """
        await self._wait()
        return self.request.output()

    async def next_step(self) -> StreamStep:
        """What is new since the step before, in a time in proportion to that.

        Raises what `fail` was told.
        """
        await self._wait()
        deltas: list[StreamDelta] = []
        for index, completion in enumerate(self.request.told()):
            place = self._places.setdefault(index, _Place())
            if len(completion.token_ids) > place.tokens or (completion.finish_reason is not None and not place.ended):
                deltas.append(place.advance(index, completion))
        return StreamStep(deltas, self.request.output() if self.request.finished else self.request.progress())

    async def _wait(self) -> None:
        await self._news.wait()
        self._news.clear()
        if self._error is not None:
            raise self._error

    @staticmethod
    def _abort_completions(request: Request) -> None:
        for completion in request.completions:
            if completion.finish_reason is None:
                completion.abort()
