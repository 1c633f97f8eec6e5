"""Runs requests concurrently and writes the responses in order, with bounded memory."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from ferrule._batch.answers import Answer, error_code, refusal, response
from ferrule._batch.files import Answered, BatchInput, BatchOutput, Line
from ferrule._batch.requests import UNAVAILABLE, LineError, Send, read_request
from ferrule._engine.workers import WORKERS, workers_for

CONCURRENCY = 1.25
"""Number of concurrent requests as a multiple of `max_num_seqs`; the rest of them wait in the engine's queue."""
LARGE = 64 << 10
"""Bytes from which a line or a response is parsed in a worker thread."""
QUEUE_FULL = "queue_full"
"""Code of the error of a request that found no place in the engine's queue and is sent again."""
RETRY_SECONDS = 0.5
MAX_PENDING_LINES = 2048
"""Maximum number of lines that are read but not yet written, because they wait for the response to an earlier line.
Their responses are lost if the run is killed."""
MAX_PENDING_BYTES = 256 << 20
"""Maximum size of these lines, in bytes."""
P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class Progress:
    """Progress of a run."""

    answered: Answered
    """Number of answers in the output."""
    done: int
    """Number of lines with an answer, in the output or waiting for the answer to an earlier line."""
    completed: int = 0
    """Number of requests answered in this run."""


def concurrency(max_num_seqs: int) -> int:
    """Returns the number of requests that run at once on an engine."""
    return int(max_num_seqs * CONCURRENCY) + 1


async def run_batch(
    send: Send,
    requests: BatchInput,
    output: BatchOutput,
    *,
    at_once: int,
    answered: Answered,
    priority: int | None = None,
    notify: Callable[[Progress], None] | None = None,
) -> Progress:
    """Sends the requests that have no answers yet, `at_once` of them concurrently.

    An exception of `send` ends the run. `priority` is the lowest value of the scheduling priority of requests; None
    leaves it as it is. `notify` is called when a request has been answered and when an answer has been written.

    Raises ModelWriteError, and the exceptions of `send` and `notify`.
    """
    room = asyncio.Semaphore(at_once)
    progress = Progress(answered, answered.lines)

    def report() -> None:
        if notify is not None:
            notify(progress)

    async def answer(line: Line, kept: Answer | None) -> Answer:
        if kept is not None:
            progress.done += 1
            return kept
        async with room:
            made = await _answer(send, line, priority)
        progress.done += 1
        progress.completed += 1
        report()
        return made

    window: deque[tuple[asyncio.Task[Answer], int]] = deque()
    held = 0

    async def write_first() -> None:
        nonlocal held
        task, size = window.popleft()
        try:
            made = await task
        finally:
            task.cancel()
        held -= size
        output.write(made)
        progress.answered.count(made)
        report()

    try:
        while (line := await WORKERS.run(next, requests, None)) is not None:
            size = len(line.content or b"")
            held += size
            window.append((asyncio.create_task(answer(line, output.kept())), size))
            while window and (window[0][0].done() or len(window) >= MAX_PENDING_LINES or held > MAX_PENDING_BYTES):
                await write_first()
        while window:
            await write_first()
    finally:
        for task, _ in window:
            task.cancel()
        await asyncio.gather(*(task for task, _ in window), return_exceptions=True)
    return progress


async def _answer(send: Send, line: Line, priority: int | None) -> Answer:
    try:
        path, body = await _off_loop(len(line.content or b""), read_request, line, priority)
    except LineError as error:
        return refusal(line.custom_id, error.code, str(error))
    while True:
        status, answer = await send(path, body)
        if status != UNAVAILABLE or error_code(answer) != QUEUE_FULL:
            break
        await asyncio.sleep(RETRY_SECONDS)
    return await _off_loop(len(answer), response, line.custom_id, status, answer)


async def _off_loop(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs work on `size` bytes, in a thread if it would block the event loop for long."""
    return work(*args, **kwargs) if size < LARGE else await workers_for(size).run(work, *args, **kwargs)
