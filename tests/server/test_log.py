"""Logs of the server: JSON lines without contents of requests."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from ferrule.server.middleware.log import JSONFormatter, log_uncaught
from ferrule.server.streaming import EventStream

MARKER = "MYSECRETPROMPT"


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(JSONFormatter().format(record)) for record in caplog.records]


@pytest.mark.parametrize("late", [False, True])
def test_failure_after_disconnect_is_not_logged(caplog: pytest.LogCaptureFixture, late: bool) -> None:
    async def failing() -> AsyncGenerator[bytes, None]:
        try:
            await asyncio.sleep(0 if late else 60)
        finally:
            raise ValueError(MARKER)
        yield b""

    async def leave() -> None:
        asyncio.get_running_loop().set_exception_handler(log_uncaught)
        task = asyncio.ensure_future(EventStream(failing(), 60).begin())
        # It goes at the very moment in which the first event has failed.
        while len(asyncio.all_tasks()) < 3:
            await asyncio.sleep(0)
        first = next(each for each in asyncio.all_tasks() if each not in (task, asyncio.current_task()))
        if late:
            first.add_done_callback(lambda _: task.cancel())
        else:
            task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(leave())
    gc.collect()
    assert caplog.records == []


def test_uncaught_exceptions_are_logged_by_type_and_place(caplog: pytest.LogCaptureFixture) -> None:
    async def lose() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(log_uncaught)
        loop.call_soon(fail, MARKER)
        await asyncio.sleep(0.01)

    def fail(text: str) -> None:
        raise ValueError(text)

    asyncio.run(lose())
    (line,) = lines(caplog)
    assert (line["event"], line["type"]) == ("internal error", "ValueError")
    assert any(place.endswith(" fail") for place in line["where"])
    assert MARKER not in json.dumps(line)


def test_an_exception_in_a_record_is_its_type_and_place(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ValueError(MARKER)
    except ValueError:
        logging.getLogger("uvicorn.error").exception("it failed")
    (line,) = lines(caplog)
    assert (line["event"], line["type"]) == ("it failed", "ValueError")
    assert MARKER not in json.dumps(line)
