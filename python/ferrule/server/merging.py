"""Merging of several asynchronous generators."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yields the items of all generators, with the index of the generator, in the order of arrival.

    At most one item of each generator is buffered. Raises the first exception of a generator, and closes the others.
    """
    if len(sources) == 1:
        async with aclosing(sources[0]) as source:
            async for item in source:
                yield 0, item
        return
    waiting: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(len(sources))

    async def pump(number: int, source: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(source):
                async for item in source:
                    await waiting.put((number, item))
        except Exception as error:  # raised by the reader below
            await waiting.put(error)
        else:
            await waiting.put(None)

    pumps = [asyncio.create_task(pump(*each)) for each in enumerate(sources)]
    try:
        left = len(pumps)
        while left:
            found = await waiting.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                left -= 1
            else:
                yield found
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
