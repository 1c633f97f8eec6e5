"""Runs tests of AsyncLLM in an event loop that reports unhandled exceptions; functions that wait for conditions."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import fakes
from ferrule import AsyncLLM, RequestOutput, SamplingParams

LONG = SamplingParams(max_tokens=2000, ignore_eos=True, seed=1)
SLACK = 5.0
"""Factor by which time limits are relaxed for slow machines."""


def sampled(length: int, seed: int = 1, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=length, ignore_eos=True, **more)


def run(test: Callable[[], Coroutine[Any, Any, None]], debug: bool = True) -> None:
    """Runs a test in an event loop that reports unhandled exceptions."""
    caught: list[dict[str, Any]] = []

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: caught.append(context))
        await asyncio.wait_for(test(), 120)
        gc.collect()
        await asyncio.sleep(0)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others

    asyncio.run(watched(), debug=debug)
    assert not caught


def fake_of(llm: AsyncLLM) -> fakes.Engine:
    found: Any = llm._driver._engine
    assert isinstance(found, fakes.Engine)
    return found


async def last(outputs: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    return [output async for output in outputs][-1]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def all_free(llm: AsyncLLM) -> None:
    """Checks that no request is left in the engine or in its queue."""
    await until(lambda: not fake_of(llm).running)
    thread = llm._engine_thread
    await until(lambda: not thread._routes and not thread._inboxes)
    assert not llm._registry.all()
    assert llm._registry._sequences == 0
    assert not llm._driver._inboxes
