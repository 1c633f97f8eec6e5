"""Routing by prefix: the key of a conversation, the ranking of replicas, and the router, without a cluster."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.request_router import RequestRouter

from ferrule.ray.prefix_router import PrefixRouter, ranking
from ferrule.ray.request_key import RequestKey, request_key


@pytest.fixture
def without_base_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables the part of a router that needs a cluster."""
    for name in ("on_send_request", "on_request_completed", "update_replicas"):
        monkeypatch.setattr(RequestRouter, name, lambda *_: None)


def test_key_of_a_conversation_is_that_of_its_first_turn() -> None:
    first = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    later = [*first, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "What is the capital?"}]

    def key(**fields: Any) -> str | None:
        return request_key(json.dumps(fields).encode()).conversation

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
        assert request_key(body) == RequestKey()


def test_key_has_the_name_of_the_model() -> None:
    assert request_key(b'{"model": "a"}') == RequestKey("a")
    assert request_key(b'{"model": 3}') == RequestKey()


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


def test_adapter_is_kept_to_few_replicas() -> None:
    idle = dict.fromkeys("abcd", 0)
    prefixes = [str(number) for number in range(100)]

    def first(adapter: str | None, running: dict[str, int] = idle) -> dict[str, str]:
        order = {prefix: ranking(prefix, running, 4, adapter=adapter, replicas_per_adapter=2) for prefix in prefixes}
        assert all(sorted(each) == sorted(running) for each in order.values())
        return {prefix: each[0] for prefix, each in order.items()}

    homes = {adapter: set(first(adapter).values()) for adapter in (str(number) for number in range(100))}
    assert {len(found) for found in homes.values()} == {2}
    assert len({tuple(sorted(found)) for found in homes.values()}) == 6  # all pairs of replicas
    assert set(first(None).values()) == set(idle)
    both = first("0")
    for replica in homes["0"]:
        without = {name: count for name, count in idle.items() if name != replica}
        assert homes["0"] - {replica} < set(first("0", without).values())  # another one takes its place
        found = first("0", {**idle, replica: 5})
        assert replica not in found.values()
        assert all(found[prefix] == both[prefix] for prefix in prefixes if both[prefix] != replica)
    busy, other = sorted(homes["0"])
    running = {**dict.fromkeys("abcd", 1), busy: 3}
    assert ranking(None, running, 4, adapter="0", replicas_per_adapter=2)[:2] == [other, busy]


@pytest.mark.usefixtures("without_base_router")
def test_router_forgets_removed_replicas() -> None:
    def replica(name: str) -> Any:
        return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name))

    a, b = replica("a"), replica("b")
    router = PrefixRouter.__new__(PrefixRouter)
    router.initialize_state(max_imbalance=0, replicas_per_adapter=1)
    router.update_replicas([a, b])
    for each in (a, a, b):
        router.on_send_request(each.replica_id)

    def preferred(prefix: str | None, adapter: str | None = None) -> str:
        request: Any = SimpleNamespace(kwargs={"prefix": prefix, "adapter": adapter})
        groups = asyncio.run(router.choose_replicas([a, b], request))
        return groups[0][0].replica_id.unique_id

    assert {preferred(str(number)) for number in range(20)} == {"b"}
    assert {preferred(None, str(number)) for number in range(20)} == {"b"}
    router.update_replicas([b])
    router.on_request_completed(a.replica_id, "")
    router.update_replicas([a, b])
    assert {preferred(str(number)) for number in range(20)} == {"a"}
