"""Asks many questions at once: each is a task, all share one engine, and one that takes too long is cancelled.

    python examples/asyncio_fan_out.py [MODEL]

The engine computes the tasks' tokens side by side in its steps, so eight questions take far less than eight times as
long as one. Each answer is the one that the question would get alone.
"""

import asyncio
import sys

from ferrule import AsyncLLM, SamplingParams

COUNTRIES = ("France", "Italy", "Japan", "Spain", "Germany", "Egypt", "Norway", "Peru")
GREEDY = SamplingParams(temperature=0, max_tokens=16)


async def capital(llm: AsyncLLM, country: str) -> str:
    """The end of a sentence about a country."""
    text = f"The capital of {country} is"
    async for delta in llm.stream(text, GREEDY):
        text += delta.text
    return text


async def endless_story(llm: AsyncLLM, told: list[str]) -> None:
    """Would go on until the context is full."""
    async for delta in llm.stream("Once upon a time,", SamplingParams(ignore_eos=True, seed=1)):
        told.append(delta.text)


async def main(model: str | None = None) -> None:
    """Fans out, prints answers in the order of the questions, and gives one task up."""
    async with AsyncLLM(model) as llm:
        told: list[str] = []
        story = asyncio.create_task(endless_story(llm, told))
        for answer in await asyncio.gather(*(capital(llm, country) for country in COUNTRIES)):
            print(answer)

        story.cancel()  # ends the request, too: its pages are free for others after one step
        await asyncio.gather(story, return_exceptions=True)
        print(f"Once upon a time,{''.join(told)} ...")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:2]))
