"""One request of an `AsyncLLM`, in the event loop of its reader.

There is no queue: outputs are added to the request, and the reader takes the part that it has not read. A slow reader
gets the newest state at once and costs no additional memory.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ferrule._engine.request import Completion, Request
from ferrule._text.parsers import MessageDelta
from ferrule.errors import EngineError, FerruleError
from ferrule.outputs import CompletionOutput, RequestOutput, StreamDelta, StreamStep

if TYPE_CHECKING:
    from ferrule._native import StepOutput


@dataclass
class _Cursor:
    """Read position in a completion."""

    characters: int = 0
    tokens: int = 0
    message: MessageDelta = field(default_factory=MessageDelta)
    ended: bool = False

    def advance(self, index: int, completion: Completion) -> StreamDelta:
        """Returns the unread part of the completion and marks it as read."""
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
    """Collects the engine's output of a request and wakes its reader. Created and used in one event loop."""

    def __init__(self, request_id: str, n: int) -> None:
        self.request_id = request_id
        self.n = n
        """Number of completions. Each is a sequence of the engine."""
        self.loop = asyncio.get_running_loop()
        self.posted = False
        """Whether the request was posted to the engine's thread. Only the reader's event loop changes it."""
        self.added = False
        """Whether the request was added to the engine. Only the engine's thread changes it."""
        self.ended = False
        """Whether the request has ended for the reader; never set back to False."""
        self._request: Request | None = None
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._cursors: dict[int, _Cursor] = {}

    @property
    def request(self) -> Request:
        """Request that `begin` set."""
        if self._request is None:
            raise EngineError(f"the request {self.request_id} has not been started")
        return self._request

    def begin(self, request: Request) -> None:
        """Sets the request when its prompt has been tokenized; it may have been aborted meanwhile."""
        self._request = request
        if self.ended:
            self._abort_completions(request)

    def take(self, completion: Completion, step: StepOutput) -> None:
        """Adds the output of a step."""
        try:
            delta = completion.add(step)
        except FerruleError as error:
            self.fail(error)
            return
        except Exception as error:
            # This is a bug. Raise it in the reader: the event loop would only log it, and the reader would wait
            # forever.
            failure = EngineError(f"output of request {self.request_id} could not be processed: {error!r}")
            failure.__cause__ = error
            self.fail(failure)
            return
        self.ended = self.request.finished
        if self.request.ranks and not self.ended:
            return  # the best completions are known only at the end
        if delta.token_ids or completion.finish_reason is not None or self.request.reports.prompt_progress:
            self._news.set()

    def fail(self, error: Exception) -> None:
        """Ends the request with an error, which the reader raises."""
        if not self.ended:
            self.ended = True
            self._error = error
            self._news.set()

    def abort(self) -> None:
        """Ends the request; the reader gets a last output with finish_reason `abort`."""
        if not self.ended:
            self.ended = True
            if self._request is not None:
                self._abort_completions(self._request)
            self._news.set()

    async def next_output(self) -> RequestOutput:
        """Waits until the request has changed, and returns its state.

        Raises the error that was passed to `fail`.
        """
        await self._wait()
        return self.request.output()

    async def next_step(self) -> StreamStep:
        """Returns the changes since the last call, in time proportional to their size.

        A step has no delta where only the prompt has progressed, which requests can ask for.

        Raises the error that was passed to `fail`.
        """
        await self._wait()
        deltas: list[StreamDelta] = []
        for index, completion in enumerate(self.request.returned()):
            cursor = self._cursors.setdefault(index, _Cursor())
            if len(completion.token_ids) > cursor.tokens or (completion.finish_reason is not None and not cursor.ended):
                deltas.append(cursor.advance(index, completion))
        return StreamStep(deltas, self.request.output() if self.request.finished else self.request.progress())

    async def next_delta(self) -> RequestOutput:
        """Returns an output with only the changes since the last call.

        Raises the error that was passed to `fail`.
        """
        step = await self.next_step()
        outputs = [
            CompletionOutput(
                index=delta.index,
                text=delta.text,
                token_ids=delta.token_ids,
                logprobs=delta.logprobs,
                cumulative_logprob=self.request.returned()[delta.index].output().cumulative_logprob,
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason,
                seed=self.request.returned()[delta.index].seed,
                entropies=delta.entropies,
                lora_request=self.request.lora_request,
            )
            for delta in step.deltas
        ]
        return replace(step.output, outputs=outputs)

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
