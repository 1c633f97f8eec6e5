"""The server on Ray Serve: streams, routing by prefix, disconnects, killed replicas and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray.exceptions import RayActorError, TaskCancelledError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.request_router import RequestRouter

from ferrule import LLM, AsyncLLM, InvalidParameterError, MissingDependencyError, SamplingParams
from ferrule._cli import main
from ferrule.ray import app_from_config, build_app, serving
from ferrule.ray.conversation_key import conversation_key
from ferrule.ray.ingress import Ingress, merged_metrics
from ferrule.ray.prefix_router import PrefixRouter, ranking
from ferrule.ray.replica import MAX_PENDING, ReplicaResponse, ServerReplica
from ferrule.ray.running import run_app
from ferrule.server import ServerSettings, create_app

SECONDS = 600
"""Timeout of requests and of conditions."""
RUNNING = "ferrule:num_requests_running"
GENERATED = "ferrule:generation_tokens_total"
CLIENTS, CONVERSATIONS, TURNS = 64, 6, 8
LONG = 30_000
"""Number of tokens of a request that runs until it is aborted."""


@pytest.fixture(scope="module")
def server(
    ray_cluster: str, long_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """URL and process of `ferrule serve --ray` with two replicas of one thread."""
    log = tmp_path_factory.mktemp("serve") / "stderr"
    port = str(free_port())
    command = (
        *(sys.executable, "-m", "ferrule", "serve", str(long_model), "--served-model-name", "tiny"),
        *("--ray", ray_cluster, "--num-replicas", "2", "--port", port, "--log-format", "text"),
        *("--max-num-seqs", str(CLIENTS), "--drain-timeout", str(SECONDS)),
    )
    with log.open("wb") as stderr, subprocess.Popen(command, stderr=stderr, stdout=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + SECONDS
            while f"http://127.0.0.1:{port}/v1" not in log.read_text():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}", process
        finally:
            process.terminate()
            try:
                process.wait(SECONDS)
            finally:
                process.kill()


@pytest.fixture
def url(server: tuple[str, subprocess.Popen[bytes]]) -> str:
    """URL of the server."""
    return server[0]


def free_port() -> int:
    """Returns a free port that no system assigns to other programs meanwhile."""
    for port in random.sample(range(20_000, 30_000), 100):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")


@asynccontextmanager
async def connected(url: str) -> AsyncGenerator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=SECONDS, limits=limits, trust_env=False) as client:
        yield client


def completion(number: int, **fields: Any) -> dict[str, Any]:
    """A request whose output differs from those of other numbers."""
    prompt = f"Once upon a time, animal {number} met"
    return {"prompt": prompt, "seed": number, "temperature": 1, "top_p": 1, "max_tokens": 24, **fields}


@asynccontextmanager
async def stream(client: httpx.AsyncClient, **fields: Any) -> AsyncGenerator[tuple[str, AsyncGenerator[str]]]:
    """Gives the replica of a streamed completion and its events."""
    async with client.stream("POST", "/v1/completions", json={**fields, "stream": True}) as response:
        assert response.status_code == 200
        events = (line.removeprefix("data: ") async for line in response.aiter_lines() if line.startswith("data: "))
        yield response.headers["X-Ferrule-Replica"], events


async def rest(events: AsyncGenerator[str]) -> list[str]:
    """Reads a stream to its end."""
    return [event async for event in events]


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


@pytest.mark.native
def test_64_streams_have_the_output_of_generate(url: str, long_model: Path) -> None:
    requests = [completion(number) for number in range(CLIENTS)]

    async def text(client: httpx.AsyncClient, request: dict[str, Any]) -> tuple[str, str]:
        async with stream(client, **request) as (replica, events):
            *chunks, end = await rest(events)
        assert end == "[DONE]"
        return replica, "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks)

    async def texts() -> list[tuple[str, str]]:
        async with connected(url) as client:
            return await asyncio.gather(*(text(client, request) for request in requests))

    found = asyncio.run(texts())
    with LLM(long_model) as llm:
        outputs = llm.generate(
            [request["prompt"] for request in requests],
            [SamplingParams(seed=number, temperature=1, max_tokens=24) for number in range(CLIENTS)],
        )
    assert [text for _, text in found] == [output.outputs[0].text for output in outputs]
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

            async def two_replicas() -> bool:
                return len(await samples(client, "ferrule:engine_steps_total")) == 2

            await until(two_replicas)
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
def test_killed_replica_ends_only_its_own_streams(url: str) -> None:
    async def kill() -> None:
        async with connected(url) as client, AsyncExitStack() as streams:

            async def two_replicas() -> bool:
                return len(await samples(client, RUNNING)) == 2

            await until(two_replicas)
            found: dict[str, list[AsyncGenerator[str]]] = {}
            for number in range(1000):
                request = completion(number, max_tokens=LONG, ignore_eos=True)
                replica, events = await streams.enter_async_context(stream(client, **request))
                found.setdefault(replica, []).append(events)
                if len(found) == 2 and min(map(len, found.values())) >= 2:
                    break
            assert len(found) == 2, "all requests went to one replica"
            killed, survivor = found
            ray.kill(ray.get_actor(f"SERVE_REPLICA::ferrule#ServerReplica#{killed}", namespace="serve"))
            for events in found[killed]:
                with pytest.raises(httpx.HTTPError):
                    await rest(events)
            for events in found[survivor]:
                for _ in range(20):
                    assert "text" in json.loads(await anext(events))["choices"][0]
            answer = await client.post("/v1/completions", json=completion(0))
            assert answer.status_code == 200

    asyncio.run(kill())


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
            assert (await rest(events))[-1] == "[DONE]"

    asyncio.run(shut_down())
    assert process.wait(SECONDS) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--ray", "ray://localhost:10001"), "ray must be HOST:PORT of the head node, auto, or local"),
        (("--ray", "auto", "--model", "a=tiny"), "--model is not supported with --ray"),
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


def test_key_of_a_conversation_is_that_of_its_first_turn() -> None:
    first = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    later = [*first, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "What is the capital?"}]

    def key(**fields: Any) -> str | None:
        return conversation_key(json.dumps(fields).encode())

    assert key(messages=first) == key(messages=later, temperature=0) is not None
    assert key(input=first) == key(input=later)
    assert key(prompt="a" * 256) == key(prompt="a" * 300)
    assert key(prompt=[1] * 256) == key(prompt=[1] * 300)
    assert key(prompt_cache_key="a", messages=first) == key(prompt_cache_key="a", prompt="b")
    different = [
        key(messages=first),
        key(messages=first, model="other"),
        key(messages=first[1:]),
        key(messages=first[1:], system="Be brief."),
        key(input="Hi"),
        key(input="Hi", instructions="Be brief."),
        key(prompt="Hello"),
        key(prompt=["Hello"]),
        key(prompt_cache_key="a"),
    ]
    assert len(set(different)) == len(different)
    for body in (b"", b"{", b"[]", b"{}", b'{"messages": 3}', b'{"a": ' + b"[" * 100_000):
        assert conversation_key(body) is None


def test_ranking_is_stable_and_bounded() -> None:
    idle = dict.fromkeys("abcd", 0)
    prefixes = [str(number) for number in range(400)]
    first = {prefix: ranking(prefix, idle, 4)[0] for prefix in prefixes}
    assert all(60 < list(first.values()).count(replica) < 140 for replica in idle)
    without = dict.fromkeys("abc", 0)
    for prefix in prefixes:
        assert ranking(prefix, without, 4) == [replica for replica in ranking(prefix, idle, 4) if replica != "d"]
    for prefix in prefixes:
        busy = {**idle, first[prefix]: 5}
        assert ranking(prefix, busy, 5) == ranking(prefix, idle, 4)
        second = ranking(prefix, idle, 4)[1:]
        assert ranking(prefix, busy, 4) == [*second, first[prefix]]
    assert ranking("a", {}, 4) == []


@pytest.mark.usefixtures("without_base_router")
def test_router_forgets_removed_replicas() -> None:
    def replica(name: str) -> Any:
        return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name))

    a, b = replica("a"), replica("b")
    router = PrefixRouter.__new__(PrefixRouter)
    router.initialize_state(max_imbalance=0)
    router.update_replicas([a, b])
    for each in (a, a, b):
        router.on_send_request(each.replica_id)

    def preferred(prefix: str) -> str:
        request: Any = SimpleNamespace(kwargs={"prefix": prefix})
        groups = asyncio.run(router.choose_replicas([a, b], request))
        return groups[0][0].replica_id.unique_id

    assert {preferred(str(number)) for number in range(20)} == {"b"}
    router.update_replicas([b])
    router.on_request_completed(a.replica_id, "")
    router.update_replicas([a, b])
    assert {preferred(str(number)) for number in range(20)} == {"a"}


@pytest.fixture
def without_base_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables the part of a router that needs a cluster."""
    for name in ("on_send_request", "on_request_completed", "update_replicas"):
        monkeypatch.setattr(RequestRouter, name, lambda *_: None)


def test_application_waits_for_a_slow_reader() -> None:
    sent = 0

    async def application(_scope: Any, receive: Any, send: Any) -> None:
        nonlocal sent
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(10 * MAX_PENDING):
            sent += 1
            await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await send({"type": "http.response.body"})

    replica: Any = ServerReplica.__new__(ServerReplica)
    replica._id, replica._running, replica._application = "x", set(), application

    async def read() -> int:
        batches = replica.respond({}, b"", prefix=None)
        count = len(await anext(batches))
        for _ in range(100):  # in which the application could send everything
            await asyncio.sleep(0)
        assert sent <= 2 * MAX_PENDING
        return count + sum([len(batch) async for batch in batches])

    try:
        assert asyncio.run(read()) == 10 * MAX_PENDING + 2
    finally:
        del replica._application  # there is no engine to close


def test_metrics_of_replicas_have_a_label() -> None:
    text = b'# HELP a_total A.\n# TYPE a_total counter\na_total{model_name="tiny"} 1.0\n'
    responses = [ReplicaResponse(replica, 200, {}, text) for replica in ("x", "y")]
    assert merged_metrics(responses).decode().splitlines() == [
        "# HELP a_total A.",
        "# TYPE a_total counter",
        'a_total{model_name="tiny",replica="x"} 1.0',
        'a_total{model_name="tiny",replica="y"} 1.0',
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_replicas": 0}, "num_replicas must be an integer from 1 to 65536, got 0"),
        ({"num_replicas": 2, "autoscaling_config": {}}, "num_replicas must be unset with autoscaling_config, got 2"),
        ({"autoscaling_config": {"min_replicas": -1}}, "autoscaling_config must be fields of Ray's AutoscalingConfig"),
        ({"num_cpus": 0}, "num_cpus must be a number > 0"),
        ({"max_ongoing_requests": 0}, "max_ongoing_requests must be an integer from 1 to"),
        ({"max_imbalance": -1}, "max_imbalance must be an integer from 0 to"),
        ({"num_ingress_replicas": 0}, "num_ingress_replicas must be an integer from 1 to"),
        ({"autoscaling_config": {"replicas": 1}}, "autoscaling_config.replicas is not supported, got <class 'int'>"),
        ({"autoscaling_config": 3}, "autoscaling_config must be a mapping of fields of AutoscalingConfig"),
        ({"served_model_names": "tiny"}, "served_model_names must be a list of strings, got 'tiny'"),
        ({"model": 3}, "model must be the name or the path of a model, got 3"),
        ({"num_replica": 2}, "num_replica is not supported, got <class 'int'>; neither build_app nor AsyncEngineArgs"),
        ({"settings": []}, "settings must be a mapping of fields of ServerSettings, got <class 'list'>"),
        (
            {"settings": {"warmth": 1}},
            "settings.warmth is not supported, got <class 'int'>; ServerSettings has no such",
        ),
        ({"settings": {"files_dir": "x"}}, "settings.files_dir is not supported, got 'x'; replicas do not share"),
        ({"settings": {"max_body_bytes": 0}}, "max_body_bytes must be an integer from 1 to"),
        ({"max_model_len": 0}, "max_model_len must be an integer from 1 to"),
    ],
)
def test_invalid_argument_is_rejected(options: dict[str, Any], message: str) -> None:
    for build in (lambda: build_app(**options), lambda: app_from_config(options)):
        with pytest.raises(InvalidParameterError, match=re.escape(message)):
            build()


def test_error_of_a_misspelt_setting_hides_its_value() -> None:
    with pytest.raises(InvalidParameterError) as error:
        app_from_config({"settings": {"api_key": "secret"}})
    assert "secret" not in str(error.value)


def test_keys_of_the_environment_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FERRULE_API_KEYS", "b,c")
    monkeypatch.setattr(serving, "build_app", lambda *_, settings: settings.api_keys)
    assert app_from_config({"settings": {"api_keys": ["a"]}}) == ("a", "b", "c")


class FakeReplicas:
    """A handle whose calls yield one response or raise an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.prefixes: list[str | None] = []
        self.cancelled = False

    @property
    def respond(self) -> FakeReplicas:
        return self

    def options(self, *, stream: bool) -> FakeReplicas:
        assert stream
        return self

    def remote(self, _scope: object, _body: bytes, *, prefix: str | None) -> FakeReplicas:
        self.prefixes.append(prefix)
        return self

    def broadcast(self, name: str, _scope: object) -> FakeReplicas:
        assert hasattr(ServerReplica, name)
        return self

    async def results_async(self, *, timeout_s: float, return_exceptions: bool) -> list[Exception]:
        assert timeout_s > 0
        assert return_exceptions
        assert self.error is not None
        raise self.error

    async def __aiter__(self) -> AsyncGenerator[list[dict[str, Any]]]:
        if self.error is not None:
            raise self.error
        yield [{"type": "http.response.start", "status": 200, "headers": []}]
        yield [{"type": "http.response.body", "body": b"done"}]

    def cancel(self) -> None:
        self.cancelled = True


async def through_ingress(
    replicas: FakeReplicas, settings: ServerSettings, path: str = "/v1/completions", **request: Any
) -> httpx.Response:
    """Sends a request through an ingress without a cluster."""
    transport = httpx.ASGITransport(Ingress(replicas, settings).__serve_build_asgi_app__())
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await client.request("POST" if request else "GET", path, **request)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (BackPressureError(7, 7), "queue_full", "the request queue is full (7 waiting; max_queued_requests)"),
        (RayActorError(), "engine_died", "the replica died or could not be reached before it answered"),
        (TaskCancelledError(), "engine_unavailable", "the replica was stopped before it answered"),
        (
            DeploymentUnavailableError(DeploymentID("ServerReplica")),
            "engine_unavailable",
            "no replica is available; the log of Ray Serve has the reason",
        ),
        (RayServeException(), "engine_unavailable", "no replica has answered (RayServeException)"),
    ],
)
def test_request_without_an_answer_gets_503(error: Exception, code: str, message: str) -> None:
    replicas = FakeReplicas(error)
    for path, request in (("/v1/completions", {"json": {"prompt": "a"}}), ("/metrics", {})):
        answer = asyncio.run(through_ingress(replicas, ServerSettings(), path, **request))
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        found = answer.json()["error"]
        assert (found["code"], found["message"]) == (code, message)
    assert replicas.cancelled


@pytest.mark.parametrize(
    ("request_", "status", "code"),
    [
        ({"headers": {"Host": "example.org"}}, 403, "host_not_allowed"),
        ({"headers": {"Authorization": "Bearer wrong"}}, 401, "invalid_api_key"),
        ({"headers": {"Authorization": "Bearer key", "Content-Length": "9"}}, 413, "body_too_large"),
        ({"headers": {"Authorization": "Bearer key"}}, 413, "body_too_large"),
    ],
)
def test_ingress_rejects_before_the_body_is_read(request_: dict[str, Any], status: int, code: str) -> None:
    read = 0

    async def body() -> AsyncGenerator[bytes]:
        nonlocal read
        while True:
            read += 1
            yield b"12345"

    replicas = FakeReplicas()
    settings = ServerSettings(api_keys=["key"], max_body_bytes=8)
    answer = asyncio.run(through_ingress(replicas, settings, content=body(), **request_))
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert replicas.prefixes == []
    assert read <= 2


def test_requests_that_use_the_prefix_cache_have_a_key() -> None:
    replicas = FakeReplicas()
    bodies = [{"input": "a"}, {"input": "a"}, {"prompt": "a" * (512 << 10)}]
    for path, body in zip(("/v1/embeddings", "/v1/responses", "/v1/completions"), bodies, strict=True):
        answer = asyncio.run(through_ingress(replicas, ServerSettings(), path, json=body))
        assert answer.text == "done"
    assert replicas.prefixes == [None, *(conversation_key(json.dumps(body).encode()) for body in bodies[1:])]
    assert not replicas.cancelled


def test_errors_of_the_ingress_have_the_form_of_the_api() -> None:
    answer = asyncio.run(through_ingress(FakeReplicas(RayActorError()), ServerSettings(), "/v1/messages", json={}))
    assert answer.json()["type"] == "error"


def test_missing_serve_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ray, "serve")
    monkeypatch.setitem(sys.modules, "ray.serve", None)
    message = "ferrule.ray.build_app requires Ray Serve and the server: pip install 'ferrule[ray,server]'"
    with pytest.raises(MissingDependencyError, match=re.escape(message)):
        build_app()
