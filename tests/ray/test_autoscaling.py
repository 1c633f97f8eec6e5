"""Replicas that Ray Serve adds and removes while streams run (`autoscaling_config`)."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray import serve

from ferrule.ray import build_app
from ray_server import SECONDS, free_port
from ray_streams import complete, completion, connected, generated, rest, stream, until

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("ray_driver")]

NAME = "autoscaled"
SCALING = {
    "min_replicas": 1,
    "max_replicas": 2,
    "target_ongoing_requests": 1,
    "upscale_delay_s": 0.2,
    "downscale_delay_s": 0.5,
    "metrics_interval_s": 0.2,
    "look_back_period_s": 0.6,
}
LOAD = 4
"""Number of requests at once while a second replica starts."""
WHOLE = 4000
"""Number of tokens of a stream that its replica still generates when it is removed."""


@pytest.fixture(scope="module")
def url(ray_driver: None, long_model: Path) -> Iterator[str]:
    """URL of an application with one replica, or two under load."""
    port = free_port()
    api: Any = serve
    api.start(http_options={"host": "127.0.0.1", "port": port})
    app = build_app(
        long_model,
        served_model_names=["tiny"],
        autoscaling_config=SCALING,
        max_imbalance=0,
        settings={"drain_timeout": SECONDS},
    )
    api.run(app, name=NAME)
    yield f"http://127.0.0.1:{port}"
    api.shutdown()


async def replica_states() -> dict[str, int]:
    """Returns the number of replicas by state."""
    status = await asyncio.to_thread(serve.status)
    states = status.applications[NAME].deployments["tiny"].replica_states
    return {str(state): count for state, count in states.items()}


def test_replicas_follow_the_load_and_finish_their_streams(url: str, long_model: Path) -> None:
    texts: dict[int, str] = {}
    """Texts of the requests that bring a second replica, by number."""
    replicas: list[str] = []
    numbers = itertools.count()

    async def load(client: httpx.AsyncClient, enough: asyncio.Event) -> None:
        while not enough.is_set():
            number = next(numbers)
            replica, texts[number] = await complete(client, completion(number))
            replicas.append(replica)

    async def is_stopping() -> bool:
        return "STOPPING" in await replica_states()

    async def is_one() -> bool:
        return await replica_states() == {"RUNNING": 1}

    async def has_two() -> bool:
        return len(set(replicas)) == 2

    async def scale() -> tuple[dict[str, Any], str]:
        """Returns a request whose replica is removed while it runs, and its text."""
        async with connected(url) as client, asyncio.TaskGroup() as tasks:
            await until(is_one)
            enough = asyncio.Event()
            for _ in range(LOAD):
                tasks.create_task(load(client, enough))
            await until(has_two)
            first = replicas[0]
            for number in range(1000, 2000):
                request = completion(number, max_tokens=WHOLE, ignore_eos=True)
                async with stream(client, **request) as (replica, events):
                    if replica != first:  # the newest replica is removed first
                        enough.set()
                        await until(is_stopping)
                        text = await rest(events)
                        await until(is_one)
                        assert (await complete(client, completion(0)))[0] == first
                        return request, text
            raise AssertionError("all requests went to one replica")

    request, text = asyncio.run(scale())
    assert [*texts.values(), text] == generated(long_model, [*map(completion, texts), request])
