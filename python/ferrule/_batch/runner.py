"""Runs requests concurrently and writes the responses in order, with bounded memory."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ferrule._api.async_llm import AsyncLLM
from ferrule._batch.answers import Answer, refusal, response
from ferrule._batch.files import MAX_LINE_BYTES, Answered, BatchInput, BatchOutput, Line
from ferrule._batch.requests import LineError, call, read_request

if TYPE_CHECKING:
    from starlette.types import ASGIApp

CONCURRENCY = 1.25
"""Number of concurrent requests as a multiple of `max_num_seqs`; the rest of them wait in the engine's queue."""
MAX_PENDING_LINES = 2048
"""Maximum number of lines that are read but not yet written, because they wait for the response to an earlier line.
Their responses are lost if the run is killed."""
MAX_PENDING_BYTES = 256 << 20
"""Maximum size of these lines, in bytes."""


@dataclass
class Progress:
    """Progress of a run."""

    answered: Answered
    """Number of answers in the output."""
    bytes: int
    """Number of input bytes up to the last line with an answer."""
    completed: int = 0
    """Number of requests answered in this run."""


async def run_batch(
    llm: AsyncLLM,
    names: Iterable[str],
    requests: BatchInput,
    output: BatchOutput,
    *,
    answered: Answered,
    notify: Callable[[Progress], None] | None = None,
) -> Progress:
    """Runs the requests that have no answers yet; `names` are the names of the model in requests.

    Raises ModelWriteError; EngineError if the engine has failed.
    """
    from ferrule.server import Models, ServerSettings, create_app

    at_once = int(llm.info()["max_num_seqs"] * CONCURRENCY) + 1
    models = Models(dict.fromkeys(names, llm))
    settings = ServerSettings(max_body_bytes=2 * MAX_LINE_BYTES, max_concurrent_requests=at_once, page=False)
    application = create_app(models, settings)
    room = asyncio.Semaphore(at_once)
    progress = Progress(answered, requests.bytes_read)

    async def answer(line: Line, kept: Answer | None) -> Answer:
        if kept is not None:
            return kept
        async with room:
            made = await _answer(application, llm, line)
        progress.completed += 1
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
        progress.bytes += size
        progress.answered.count(made)
        if notify is not None:
            notify(progress)

    try:
        for line in requests:
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


async def _answer(application: ASGIApp, llm: AsyncLLM, line: Line) -> Answer:
    try:
        path, body = read_request(line)
    except LineError as error:
        return refusal(line.custom_id, error.code, str(error))
    status, answer = await call(application, path, body)
    if status == 503:
        await llm.check_health()  # raises if the engine has failed; the next run continues with this request
    return response(line.custom_id, status, answer)
