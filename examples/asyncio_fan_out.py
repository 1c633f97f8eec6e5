"""Concurrent requests: many asyncio tasks share one engine, and one task is cancelled.

    python examples/asyncio_fan_out.py [MODEL]

The engine batches the requests, so eight questions take far less than eight times as long as one. Each answer is the
same as without the other requests.
"""

import asyncio
import sys

from ferrule import AsyncLLM, SamplingParams

COUNTRIES = ("France", "Italy", "Japan", "Spain", "Germany", "Egypt", "Norway", "Peru")
GREEDY = SamplingParams(temperature=0, max_tokens=16)


async def capital(llm: AsyncLLM, country: str) -> str:
    """Returns a sentence about the capital of a country."""
    text = f"The capital of {country} is"
    async for delta in llm.stream(text, GREEDY):
        text += delta.text
    return text


async def endless_story(llm: AsyncLLM, texts: list[str]) -> None:
    """Generates until the context is full or the task is cancelled."""
    async for delta in llm.stream("Once upon a time,", SamplingParams(ignore_eos=True, seed=1, max_tokens=None)):
        texts.append(delta.text)


async def main(model: str | None = None) -> None:
    """Starts all tasks, prints the answers in the order of the questions, and cancels one task."""
    async with AsyncLLM(model) as llm:
        texts: list[str] = []
        story = asyncio.create_task(endless_story(llm, texts))
        for answer in await asyncio.gather(*(capital(llm, country) for country in COUNTRIES)):
            print(answer)

        story.cancel()  # also ends the request and frees its KV cache pages after one step
        await asyncio.gather(story, return_exceptions=True)
        print(f"Once upon a time,{''.join(texts)} ...")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:2]))
