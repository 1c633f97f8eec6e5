"""The server on Ray Serve: streams, routing by prefix, disconnects, killed replicas and shutdown."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray

from ferrule import AsyncLLM, InvalidParameterError
from ferrule._cli import main
from ferrule.ray.running import run_app
from ferrule.server import create_app
from ray_server import SECONDS, ray_server
from ray_streams import (
    LONG,
    RUNNING,
    complete,
    completion,
    connected,
    generated,
    numbers_by_replica,
    rest,
    samples,
    stream,
    streams_beside_a_loss,
    until,
    until_replicas,
)

GENERATED = "ferrule:generation_tokens_total"
CLIENTS, CONVERSATIONS, TURNS = 64, 6, 8


@pytest.fixture(scope="module")
def server(
    ray_cluster: str, long_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """URL and process of `ferrule serve --ray` with two replicas of one thread."""
    options = (str(long_model), "--served-model-name", "tiny", "--num-replicas", "2")
    limits = ("--max-num-seqs", str(CLIENTS), "--drain-timeout", str(SECONDS))
    with ray_server(ray_cluster, *options, *limits, log=tmp_path_factory.mktemp("serve") / "stderr") as server:
        yield server


@pytest.fixture
def url(server: tuple[str, subprocess.Popen[bytes]]) -> str:
    """URL of the server."""
    return server[0]


@pytest.mark.native
def test_64_streams_have_the_output_of_generate(url: str, long_model: Path) -> None:
    requests = [completion(number) for number in range(CLIENTS)]

    async def texts() -> list[tuple[str, str]]:
        async with connected(url) as client:
            return await asyncio.gather(*(complete(client, request) for request in requests))

    found = asyncio.run(texts())
    assert [text for _, text in found] == generated(long_model, requests)
    assert len({replica for replica, _ in found}) == 2


async def converse(client: httpx.AsyncClient, number: int) -> tuple[set[str | None], int, int]:
    """Holds a conversation; returns its replicas, and the number of cached tokens and of tokens of its prompts."""
    messages = [{"role": "system", "content": "Be brief."}]
    replicas: set[str | None] = set()
    cached = total = 0
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"Tell me fact {turn} about animal {number}, please."})
        request = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 16}
        response = await client.post("/v1/chat/completions", json=request)
        assert response.status_code == 200, response.text
        answer = response.json()
        messages.append(answer["choices"][0]["message"])
        replicas.add(response.headers.get("X-Ferrule-Replica"))
        cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        total += answer["usage"]["prompt_tokens"]
    return replicas, cached, total


@pytest.mark.native
def test_conversations_find_their_prefix_cache(url: str, long_model: Path) -> None:
    async def conversations(client: httpx.AsyncClient) -> list[tuple[set[str | None], int, int]]:
        return await asyncio.gather(*(converse(client, number) for number in range(CONVERSATIONS)))

    async def alone() -> list[tuple[set[str | None], int, int]]:
        async with AsyncLLM(long_model) as llm:
            transport = httpx.ASGITransport(create_app({"tiny": llm}))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return await conversations(client)

    def hit_rate(found: list[tuple[set[str | None], int, int]]) -> float:
        return sum(cached for _, cached, _ in found) / sum(total for *_, total in found)

    async def together() -> list[tuple[set[str | None], int, int]]:
        async with connected(url) as client:
            return await conversations(client)

    found = asyncio.run(together())
    assert [len(replicas) for replicas, *_ in found] == [1] * CONVERSATIONS
    assert hit_rate(found) >= 0.95 * hit_rate(asyncio.run(alone())) > 0


@pytest.mark.native
def test_disconnect_aborts_the_request(url: str) -> None:
    async def disconnect() -> None:
        async with connected(url) as client:
            async with stream(client, **completion(0, max_tokens=LONG, ignore_eos=True)) as (replica, events):
                await anext(events)
                assert (await samples(client, RUNNING))[replica] >= 1
                before = (await samples(client, GENERATED))[replica]

            async def is_idle() -> bool:
                return sum((await samples(client, RUNNING)).values()) == 0

            await until(is_idle)
            assert (await samples(client, GENERATED))[replica] - before < LONG / 2

    asyncio.run(disconnect())


@pytest.mark.native
def test_metrics_health_and_errors(url: str) -> None:
    async def ask() -> None:
        async with connected(url) as client:
            await until_replicas(client, 2)
            assert (await client.get("/health")).json() == {"status": "ok"}
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == "tiny"
            answer = await client.post("/v1/completions", json=completion(0, temperature=-1))
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "temperature")
            answer = await client.post("/v1/completions", content=b" " * (9 << 20))
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")

    asyncio.run(ask())


@pytest.fixture
def driver(ray_cluster: str) -> Iterator[None]:
    """Connects this process to the cluster."""
    connect: Any = ray.init
    connect(ray_cluster, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.native
@pytest.mark.usefixtures("server")
def test_running_server_is_reported(url: str, ray_cluster: str) -> None:
    port = int(url.rpartition(":")[2])

    def run(host: str = "127.0.0.1", port: int = port) -> None:
        run_app(ray_cluster, None, host=host, port=port, on_ready=print)

    with pytest.raises(InvalidParameterError, match=f"port must be {port}, where Ray Serve listens .*{url}.*got 1"):
        run(port=1)
    with pytest.raises(InvalidParameterError, match=f"host must be 127.0.0.1, where Ray Serve listens .*{url}"):
        run(host="::1")
    with pytest.raises(InvalidParameterError, match="a cluster that does not serve the application ferrule yet"):
        run()


@pytest.mark.native
@pytest.mark.usefixtures("driver")
def test_killed_replica_ends_only_its_own_streams(url: str, long_model: Path) -> None:
    async def kill() -> tuple[list[dict[str, Any]], list[str]]:
        """Returns the requests of the replica that is left, and their texts."""
        async with connected(url) as client:
            await until_replicas(client, 2)
            numbers = await numbers_by_replica(client)
            killed, _ = numbers

            async def kill_replica() -> None:
                ray.kill(ray.get_actor(f"SERVE_REPLICA::ferrule#tiny#{killed}", namespace="serve"))

            found = await streams_beside_a_loss(client, killed, numbers, kill_replica)
            answer = await client.post("/v1/completions", json=completion(0))
            assert answer.status_code == 200
            return found

    requests, texts = asyncio.run(kill())
    assert texts == generated(long_model, requests)


@pytest.mark.native
def test_shutdown_waits_for_streams(server: tuple[str, subprocess.Popen[bytes]]) -> None:
    """The last test that uses the server of this module, which it ends."""
    url, process = server

    async def shut_down() -> None:
        async with (
            connected(url) as client,
            stream(client, **completion(0, max_tokens=600, ignore_eos=True)) as (_, events),
        ):
            await anext(events)
            process.terminate()
            await rest(events)

    asyncio.run(shut_down())
    assert process.wait(SECONDS) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--ray", "ray://localhost:10001"), "ray must be HOST:PORT of the head node, auto, or local"),
        (("--ray", "auto", "--uds", "socket"), "--uds is not supported with --ray"),
        (("--ray", "auto", "--ssl-keyfile", "key"), "--ssl-keyfile is not supported with --ray"),
        (("--ray", "auto", "--ssl-ca-certs", "certs"), "--ssl-ca-certs is not supported with --ray"),
        (("--ray", "auto", "--model-keep-alive", "0"), "--model-keep-alive is not supported with --ray"),
        (("--ray", "auto", "--max-loaded-models", "1"), "--max-loaded-models is not supported with --ray"),
        (("--ray", "auto", "--port", "0"), "--port must be from 1 to 65535 with --ray, got 0"),
        (("--ray", "auto", "--responses-db", "db"), "settings.responses_db is not supported, got 'db'"),
        (("--num-replicas", "2"), "--num-replicas requires --ray"),
    ],
)
def test_invalid_option_is_reported(options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *options]) == 2
    assert f"error: {message}" in capsys.readouterr().err
