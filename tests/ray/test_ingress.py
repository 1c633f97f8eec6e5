"""The ingress and the application of a replica, without a cluster."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import httpx
import pytest
from ray.exceptions import RayActorError, TaskCancelledError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException

from ferrule.ray import ingress
from ferrule.ray.ingress import Ingress, ModelReplicas
from ferrule.ray.merged import merged_metrics
from ferrule.ray.replica import MAX_PENDING, ReplicaResponse, ServerReplica
from ferrule.ray.request_key import request_key
from ferrule.server import ServerSettings


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


HEALTHY = ReplicaResponse("x", 200, {"X-Whole": "yes"}, b'{"status":"ok"}')


class FakeResponse:
    """A method whose calls return the whole response of fake replicas."""

    def __init__(self, replicas: FakeReplicas) -> None:
        self.replicas = replicas

    async def remote(self, scope: dict[str, Any]) -> ReplicaResponse:
        assert scope["method"] in ("GET", "HEAD")
        if self.replicas.error is not None:
            raise self.replicas.error
        return self.replicas.whole


class FakeReplicas:
    """A handle whose streams have one response, `body`, or raise an error."""

    def __init__(self, error: Exception | None = None, *, body: str = "done", whole: ReplicaResponse = HEALTHY) -> None:
        self.error, self.body, self.whole = error, body, whole
        self.prefixes: list[str | None] = []
        self.adapters: list[str | None] = []
        self.cancelled = False

    @property
    def response(self) -> FakeResponse:
        return FakeResponse(self)

    @property
    def respond(self) -> FakeReplicas:
        return self

    def options(self, *, stream: bool) -> FakeReplicas:
        assert stream
        return self

    def remote(self, _scope: object, _body: bytes, *, prefix: str | None, adapter: str | None) -> FakeReplicas:
        self.prefixes.append(prefix)
        self.adapters.append(adapter)
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
        yield [{"type": "http.response.body", "body": self.body.encode()}]

    def cancel(self) -> None:
        self.cancelled = True


async def through_ingress(
    replicas: FakeReplicas, settings: ServerSettings, path: str = "/v1/completions", **request: Any
) -> httpx.Response:
    """Sends a request through an ingress without a cluster."""
    return await through_several([ModelReplicas(["tiny"], [], replicas)], path, settings=settings, **request)


async def through_several(
    models: Sequence[ModelReplicas], path: str, *, settings: ServerSettings | None = None, **request: Any
) -> httpx.Response:
    """Sends a request through an ingress of several models without a cluster."""
    transport = httpx.ASGITransport(Ingress(models, settings or ServerSettings()).__serve_build_asgi_app__())
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
    for path, request in (("/v1/completions", {"json": {"prompt": "a"}}), ("/metrics", {}), ("/health", {})):
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
    assert replicas.prefixes == [None, *(request_key(json.dumps(body).encode()).conversation for body in bodies[1:])]
    assert not replicas.cancelled


def test_errors_of_the_ingress_have_the_form_of_the_api() -> None:
    answer = asyncio.run(through_ingress(FakeReplicas(RayActorError()), ServerSettings(), "/v1/messages", json={}))
    assert answer.json()["type"] == "error"


def test_requests_reach_the_replicas_of_their_model() -> None:
    small, large = FakeReplicas(body="small"), FakeReplicas(body="large")
    models = [ModelReplicas(["small", "little"], ["both"], small), ModelReplicas(["large"], ["both", "own"], large)]

    def reached(path: str, **request: Any) -> str:
        return asyncio.run(through_several(models, path, **request)).text

    named = {
        **dict.fromkeys(("small", "little", "both", "unknown", None, 3), "small"),
        **dict.fromkeys(("large", "own", "large:latest"), "large"),
    }
    for name, replicas in named.items():
        assert reached("/v1/chat/completions", json={"model": name, "messages": []}) == replicas, name
        assert reached("/v1/embeddings", json={"model": name, "input": "a"}) == replicas, name
        adapter = name if name in ("both", "own") else None
        assert (small if replicas == "small" else large).adapters[-2:] == [adapter] * 2
    assert reached("/v1/completions", content=b"{") == "small"
    assert (reached("/v1/models/large"), reached("/models/org/unknown")) == ("large", "small")
    assert (reached("/props?model=own"), reached("/props?model="), reached("/props")) == ("large", "small", "small")


def test_lists_and_health_are_those_of_all_models() -> None:
    def models(**changed: Any) -> list[ModelReplicas]:
        bodies = ({"object": "list", "data": [{"id": name}]} for name in ("small", "large"))
        wholes = [ReplicaResponse("x", 200, {}, json.dumps(body).encode()) for body in bodies]
        changed.setdefault("whole", wholes[1])
        small, large = FakeReplicas(whole=wholes[0]), FakeReplicas(**changed)
        return [ModelReplicas(["small"], [], small), ModelReplicas(["large"], [], large)]

    def answer(path: str, found: list[ModelReplicas]) -> httpx.Response:
        return asyncio.run(through_several(found, path))

    for path in ("/v1/models", "/models"):
        assert answer(path, models()).json() == {"object": "list", "data": [{"id": "small"}, {"id": "large"}]}
    healthy = [ModelReplicas([name], [], FakeReplicas()) for name in ("small", "large")]
    found = answer("/health", healthy)
    assert (found.status_code, found.json(), found.headers["X-Whole"]) == (200, {"status": "ok"}, "yes")
    failed = ReplicaResponse("y", 503, {"Retry-After": "1"}, b"failed")
    for path in ("/health", "/v1/health", "/v1/models"):
        found = answer(path, models(whole=failed))
        assert (found.status_code, found.text, found.headers["Retry-After"]) == (503, "failed", "1")
        found = answer(path, models(error=DeploymentUnavailableError(DeploymentID("large"))))
        assert (found.status_code, found.json()["error"]["code"]) == (503, "engine_unavailable")


def test_a_replica_that_does_not_answer_ends_health_and_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    class SilentResponse(FakeResponse):
        async def remote(self, scope: dict[str, Any]) -> ReplicaResponse:
            await asyncio.Event().wait()
            return await super().remote(scope)

    class Silent(FakeReplicas):
        @property
        def response(self) -> FakeResponse:
            return SilentResponse(self)

    monkeypatch.setattr(ingress, "STATE_TIMEOUT", 0.05)
    models = [ModelReplicas(["small"], [], FakeReplicas()), ModelReplicas(["large"], [], Silent())]
    for path in ("/health", "/v1/models"):
        found = asyncio.run(through_several(models, path))
        assert (found.status_code, found.json()["error"]["code"]) == (503, "engine_unavailable")
        assert found.json()["error"]["message"] == "a replica of large must answer within 0.05 s"
