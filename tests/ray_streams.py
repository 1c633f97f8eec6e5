"""A client of a server on Ray Serve: streamed completions whose output is known, and metrics by replica."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ferrule import LLM, SamplingParams
from ray_server import SECONDS

RUNNING = "ferrule:num_requests_running"
"""Metric with the number of requests that a replica runs."""
LONG = 30_000
"""Number of tokens of a request that runs until it is aborted."""
WHOLE = 1500
"""Number of tokens of a request that usually still runs when another replica is killed, and is read to its end."""


@asynccontextmanager
async def connected(url: str) -> AsyncGenerator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=SECONDS, limits=limits, trust_env=False) as client:
        yield client


def completion(number: int, **fields: Any) -> dict[str, Any]:
    """A request whose output differs from those of other numbers."""
    prompt = f"Once upon a time, animal {number} met"
    return {"prompt": prompt, "seed": number, "temperature": 1, "top_p": 1, "max_tokens": 24, **fields}


def generated(model: Path, requests: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the texts of `LLM.generate` for requests of `completion`."""
    params = [SamplingParams(**{name: value for name, value in each.items() if name != "prompt"}) for each in requests]
    with LLM(model) as llm:
        return [output.outputs[0].text for output in llm.generate([each["prompt"] for each in requests], params)]


@asynccontextmanager
async def stream(client: httpx.AsyncClient, **fields: Any) -> AsyncGenerator[tuple[str, AsyncGenerator[str]]]:
    """Gives the replica of a streamed completion and its events."""
    async with client.stream("POST", "/v1/completions", json={**fields, "stream": True}) as response:
        assert response.status_code == 200
        events = (line.removeprefix("data: ") async for line in response.aiter_lines() if line.startswith("data: "))
        yield response.headers["X-Ferrule-Replica"], events


async def numbers_by_replica(client: httpx.AsyncClient) -> dict[str, list[int]]:
    """Returns at least two numbers for each of two replicas: the router sends their requests to it."""
    found: dict[str, list[int]] = {}
    for number in range(1000):
        replica, _ = await complete(client, completion(number, max_tokens=1))
        found.setdefault(replica, []).append(number)
        if len(found) == 2 and min(map(len, found.values())) >= 2:
            return found
    raise AssertionError("all requests went to one replica")


async def rest(events: AsyncGenerator[str]) -> str:
    """Reads a stream to its end and returns the text. Raises httpx.HTTPError if the connection ends before."""
    *chunks, end = [event async for event in events]
    assert end == "[DONE]"
    return "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks)


async def streams_beside_a_loss(
    client: httpx.AsyncClient, lost: str, numbers: Mapping[str, Sequence[int]], lose: Callable[[], Awaitable[None]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Opens streams of two replicas and checks that those of the `lost` one end with an error after `lose`.

    `numbers` are those of `numbers_by_replica`. Returns the requests of the other replica and their texts.
    """
    [survivor] = numbers.keys() - {lost}
    requests = {
        replica: [completion(number, max_tokens=tokens, ignore_eos=True) for number in numbers[replica]]
        for replica, tokens in ((lost, LONG), (survivor, WHOLE))
    }
    async with AsyncExitStack() as streams:
        events: dict[str, list[AsyncGenerator[str]]] = {lost: [], survivor: []}
        for replica, each in requests.items():
            for request in each:
                found, opened = await streams.enter_async_context(stream(client, **request))
                assert found == replica
                events[replica].append(opened)
        await lose()
        texts = [await rest(each) for each in events[survivor]]
        for each in events[lost]:
            with pytest.raises(httpx.HTTPError):
                await rest(each)
    return requests[survivor], texts


async def complete(client: httpx.AsyncClient, request: dict[str, Any]) -> tuple[str, str]:
    """Returns the replica and the text of a streamed completion."""
    async with stream(client, **request) as (replica, events):
        return replica, await rest(events)


async def samples(client: httpx.AsyncClient, name: str) -> dict[str, float]:
    """Returns the values of a metric by replica."""
    response = await client.get("/metrics")
    assert response.status_code == 200
    families = text_string_to_metric_families(response.text)
    return {
        sample.labels["replica"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == name
    }


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Waits for a condition."""
    async with asyncio.timeout(SECONDS):
        while not await condition():
            await asyncio.sleep(0.05)


async def until_replicas(client: httpx.AsyncClient, count: int) -> None:
    """Waits until the server has so many replicas."""

    async def has_count() -> bool:
        return len(await samples(client, RUNNING)) == count

    await until(has_count)
