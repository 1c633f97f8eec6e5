"""Many requests at once, answers in order, and not more in memory than it takes to keep the engine busy."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ferrule.async_llm import AsyncLLM
from ferrule.batch.files import LONGEST_LINE, BatchInput, BatchOutput, Line
from ferrule.batch.requests import LineError, answer_line, call, read_request

if TYPE_CHECKING:
    from starlette.types import ASGIApp

WAITING = 1.25
"""Requests that are asked at once, as a multiple of the sequences of a step: the next ones wait in the engine."""
MOST_LINES = 2048
"""Lines between the first without an answer in the file and the last that is read: how far others may go ahead of a
long answer. So many answers at the most are lost, and made again, where a run is killed."""
MOST_BYTES = 256 << 20
"""Of these lines and answers."""


@dataclass
class Progress:
    """How far a run is."""

    answered: int
    """Lines of the output."""
    bytes: int
    """Of the input, up to the last line that is answered."""
    failed: int = 0
    """Those of this run that are errors."""


async def run_batch(
    llm: AsyncLLM,
    names: Iterable[str],
    requests: BatchInput,
    output: BatchOutput,
    *,
    resumed: int = 0,
    notify: Callable[[Progress], None] | None = None,
) -> Progress:
    """Answers requests by a model that goes by these names; `resumed` is how many have answers already.

    Raises EngineError where the engine is dead, ModelWriteError.
    """
    from ferrule.server import Models, ServerSettings, create_app

    at_once = int(llm.info()["max_num_seqs"] * WAITING) + 1
    models = Models(dict.fromkeys(names, llm))
    settings = ServerSettings(max_body_bytes=2 * LONGEST_LINE, max_concurrent_requests=at_once, page=False)
    application = create_app(models, settings)
    room = asyncio.Semaphore(at_once)

    async def answer(line: Line) -> tuple[bytes, bool]:
        async with room:
            return await _answer(application, llm, line)

    progress = Progress(resumed, requests.bytes_read)
    window: deque[tuple[asyncio.Task[tuple[bytes, bool]], int]] = deque()
    held = 0

    async def write_first() -> None:
        nonlocal held
        task, size = window.popleft()
        try:
            line, failed = await task
        finally:
            task.cancel()
        held -= size
        output.write(line)
        progress.bytes += size
        progress.answered += 1
        progress.failed += failed
        if notify is not None:
            notify(progress)

    try:
        for line in requests:
            size = len(line.content or b"")
            held += size
            window.append((asyncio.create_task(answer(line)), size))
            while window and (window[0][0].done() or len(window) >= MOST_LINES or held > MOST_BYTES):
                await write_first()
        while window:
            await write_first()
    finally:
        for task, _ in window:
            task.cancel()
        await asyncio.gather(*(task for task, _ in window), return_exceptions=True)
    return progress


async def _answer(application: ASGIApp, llm: AsyncLLM, line: Line) -> tuple[bytes, bool]:
    """A line of the output, and whether it is an error."""
    try:
        path, body = read_request(line)
    except LineError as error:
        return answer_line(line, error=error), True
    status, answer = await call(application, path, body)
    if status == 503:
        await llm.check_health()  # a dead engine answers nobody: the rest is for the next run
    return answer_line(line, status=status, body=answer), status != 200
