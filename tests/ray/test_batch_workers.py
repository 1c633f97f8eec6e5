"""`BatchWorkers` with actors of this process: requests that end actors, and models that cannot be loaded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError

from ferrule.errors import EngineError, InvalidParameterError
from ferrule.ray import batch_workers, connection
from ferrule.ray.batch_workers import MAX_ATTEMPTS, BatchWorkers

POISON = b"poison"
"""Request that ends its actor."""


@dataclass
class Method:
    """A method of an actor, or the constructor of actors."""

    call: Callable[..., Any]

    def options(self, **_: object) -> Method:
        return self

    def remote(self, *arguments: object) -> Any:
        return self.call(*arguments)


class Actor:
    """An actor that is restarted at once; the requests that run when it dies fail as with Ray."""

    places = 8

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.dies = asyncio.Event()
        self.started, self.ready, self.send = Method(self._started), Method(self._ready), Method(self._send)

    async def _started(self) -> None:
        await asyncio.sleep(0)

    async def _ready(self) -> int:
        await asyncio.sleep(0)
        if self.cluster.dies_while_loading:
            self.cluster.deaths += 1
            raise ActorUnavailableError("socket closed", None)
        return self.places

    async def _send(self, path: str, body: bytes) -> tuple[int, bytes]:
        dies = self.dies
        self.cluster.attempts.append(body)
        if body == POISON:
            self.cluster.deaths += 1
            self.dies = asyncio.Event()
            dies.set()
        for _ in range(3):
            await asyncio.sleep(0)
        if dies.is_set():
            raise ActorUnavailableError("socket closed", None)
        return 200, body


@dataclass
class Cluster:
    """The part of the module `ray` that BatchWorkers uses."""

    cpus: int = 2
    dies_while_loading: bool = False
    deaths: int = 0
    attempts: list[bytes] = field(default_factory=list[bytes])
    """Body of each request that an actor received."""
    arguments: list[Any] = field(default_factory=list[Any])
    """Arguments of the actors' constructors."""
    connected: bool = False

    def init(self, **_: object) -> None:
        self.connected = True

    def shutdown(self) -> None:
        self.connected = False

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": "00" * 28, "Alive": True, "Resources": {"CPU": self.cpus}}]

    def remote(self, _worker: type) -> Cluster:
        return self

    def options(self, **_: object) -> Method:
        def construct(*arguments: Any) -> Actor:
            self.arguments.append(arguments)
            return Actor(self)

        return Method(construct)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    monkeypatch.setattr(batch_workers, "ray", cluster)
    monkeypatch.setattr(connection, "ray", cluster)
    return cluster


def answers(bodies: list[bytes], **options: Any) -> list[tuple[int, bytes]]:
    """Returns the responses to requests that are sent together."""

    async def send() -> list[tuple[int, bytes]]:
        async with BatchWorkers("auto", None, ["tiny"], **options) as workers:
            return await asyncio.gather(*(workers.send("/v1/completions", body) for body in bodies))

    return asyncio.run(send())


@pytest.mark.parametrize("threads", [1, 2])
def test_request_that_ends_actors_gets_an_error_and_the_others_responses(cluster: Cluster, threads: int) -> None:
    bodies = [str(number).encode() for number in range(100)]
    bodies.insert(3, POISON)
    found = answers(bodies, threads=threads)
    status, body = found.pop(3)
    assert status == 500
    assert json.loads(body)["error"] == {
        "message": f"{MAX_ATTEMPTS} Ray actors died with this request; `ray list actors` shows why",
        "type": "server_error",
        "param": None,
        "code": "engine_died",
    }
    bodies.remove(POISON)
    assert found == [(200, body) for body in bodies]
    assert cluster.deaths == cluster.attempts.count(POISON) == MAX_ATTEMPTS
    assert 1 < max(map(cluster.attempts.count, bodies)) < MAX_ATTEMPTS  # requests beside it ran again
    assert not cluster.connected


def test_actor_that_dies_while_it_loads_ends_the_run(cluster: Cluster) -> None:
    cluster.dies_while_loading = True
    with pytest.raises(EngineError, match=f"a Ray actor died {MAX_ATTEMPTS} times while it loaded the model"):
        answers([b"0", b"1"])
    assert cluster.deaths == MAX_ATTEMPTS
    assert cluster.attempts == []
    assert not cluster.connected


def test_cluster_without_enough_cpus_is_disconnected(cluster: Cluster) -> None:
    for cpus, message in [
        (0, "ray must be the address of a Ray cluster with CPUs, got 'auto'"),
        (2, "threads must be at most 2, .*, got 3"),
    ]:
        cluster.cpus = cpus
        with pytest.raises(InvalidParameterError, match=message):
            answers([], threads=3)
        assert not cluster.connected


def test_paths_are_absolute(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "version").mkdir()
    (tmp_path / "draft").symlink_to("version")
    monkeypatch.chdir(tmp_path)
    speculation = {"model": "draft", "num_speculative_tokens": 3}
    answers([], tokenizer="org/repo", prefix_cache_dir="cache", speculative_config=speculation)
    answers([], prefix_cache_dir="~/cache", tokenizer="draft")
    (_, _, first), (_, _, second) = cluster.arguments
    draft = str(tmp_path / "draft")
    assert first == {
        "tokenizer": "org/repo",
        "prefix_cache_dir": str(tmp_path / "cache"),
        "speculative_config": {"model": draft, "num_speculative_tokens": 3},
        "threads": 2,
    }
    assert second == {"tokenizer": draft, "prefix_cache_dir": "~/cache", "threads": 2}
