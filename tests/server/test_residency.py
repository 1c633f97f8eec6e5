"""Models that are loaded on demand: leases, loads, keep-alive times, and the order in which models are unloaded."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fakes
from ferrule import AsyncLLM
from ferrule._cli.served_models import load_models
from ferrule.errors import EngineError, InsufficientMemoryError, ModelFileError
from ferrule.server import OnDemand, ServerSettings
from ferrule.server.residency import Entry, Residency
from server.live import Answer, Live, serving, until

OLLAMA = ServerSettings(ollama=True)


class Loader:
    """A model on demand whose loads a test counts, holds up and lets fail."""

    def __init__(self) -> None:
        self.loads = 0
        self.gate = threading.Event()
        self.gate.set()
        self.check: Callable[[], None] = lambda: None
        """Runs at the begin of a load and may raise its error."""
        self.download: Callable[[], None] = lambda: None
        """Runs when the files are first needed."""
        self.made: list[AsyncLLM] = []
        self.missing = 0
        """Bytes that the model lacks according to its files."""
        self.model = OnDemand(self._load, "a/model", missing_memory=self._missing_memory)

    def _missing_memory(self) -> int:
        self.download()
        return self.missing

    def _load(self) -> AsyncLLM:
        self.loads += 1
        assert self.gate.wait(60)
        self.check()
        self.made.append(AsyncLLM())
        return self.made[-1]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as found:
        yield found


def states(live: Live) -> dict[str, str]:
    return {card["id"]: card["status"]["value"] for card in live.request("/v1/models").json["data"]}


def running(live: Live) -> list[str]:
    return [model["name"] for model in live.request("/api/ps").json["models"]]


def ask(pool: ThreadPoolExecutor, live: Live, model: str, **fields: Any) -> Future[Answer]:
    return pool.submit(lambda: live.chat(model=model, max_tokens=2, **fields))


def entry_of(live: Live, name: str) -> Any:
    return live.server.models.find(name).entry


def test_model_is_loaded_by_its_first_request(engine: type[fakes.Engine]) -> None:
    first, second = Loader(), Loader()
    with serving(OLLAMA, on_demand={"first": first.model, "alias": first.model, "second": second.model}) as live:
        assert live.request("/health").status == 200
        assert states(live) == {"first": "unloaded", "alias": "unloaded", "second": "unloaded"}
        assert live.request("/v1/models/first").json["max_model_len"] is None
        assert live.request("/v1/models/first").json["root"] == "a/model"
        tags = live.request("/api/tags").json["models"]
        assert [(tag["name"], tag["size"]) for tag in tags] == [("first", 0), ("alias", 0), ("second", 0)]
        assert running(live) == []
        assert live.request("/slots").json == []
        assert live.chat(max_tokens=1).json["model"] == "first"
        assert live.chat(max_tokens=1, model="alias").json["model"] == "alias"
        assert (first.loads, second.loads) == (1, 0)
        assert states(live) == {"first": "loaded", "alias": "loaded", "second": "unloaded"}
        assert live.request("/v1/models/first").json["max_model_len"] == 2048
        assert running(live) == ["first", "alias"]
        assert live.request("/api/tags").json["models"][0]["digest"] == tags[0]["digest"]
        metrics = live.request("/metrics").body.decode()
        assert 'ferrule:model_loaded{engine="0",model_name="first"} 1.0' in metrics
        assert 'ferrule:model_loads_total{engine="0",model_name="first"} 1.0' in metrics
        assert 'ferrule:model_loaded{engine="0",model_name="second"} 0.0' in metrics


def test_first_requests_share_one_load(engine: type[fakes.Engine], pool: ThreadPoolExecutor) -> None:
    loader = Loader()
    loader.gate.clear()
    with serving(on_demand={"m": loader.model}) as live:
        answers = [ask(pool, live, "m", stream=stream) for stream in (False, True)]
        until(lambda: entry_of(live, "m").waiting == 2)
        assert states(live) == {"m": "loading"}
        assert live.request("/health").status == 200
        loader.gate.set()
        assert [answer.result(60).status for answer in answers] == [200, 200]
        assert loader.loads == 1


def test_failed_load_is_an_error_and_the_next_request_loads_again(
    engine: type[fakes.Engine], pool: ThreadPoolExecutor
) -> None:
    loader = Loader()
    loader.gate.clear()

    def fail() -> None:
        raise ModelFileError("the file is truncated")

    loader.check = fail
    with serving(on_demand={"m": loader.model}) as live:
        answers = [ask(pool, live, "m") for _ in range(2)]
        until(lambda: entry_of(live, "m").waiting == 2)
        loader.gate.set()
        for answer in answers:
            found = answer.result(60)
            assert (found.status, found.error["code"]) == (500, "model_load_failed")
            assert found.error["message"] == "m could not be loaded: the file is truncated"
        assert loader.loads == 1
        loader.check = lambda: None
        assert live.chat(model="m", max_tokens=1).status == 200
        assert loader.loads == 2


def test_client_that_disconnects_does_not_cancel_the_load(engine: type[fakes.Engine], pool: ThreadPoolExecutor) -> None:
    loader = Loader()
    loader.gate.clear()
    with serving(on_demand={"m": loader.model}) as live:
        with live.connect() as client:
            body = b'{"prompt": "Hi"}'
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
            client.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
            until(lambda: entry_of(live, "m").waiting == 1)
            other = ask(pool, live, "m")
            until(lambda: entry_of(live, "m").waiting == 2)
        until(lambda: entry_of(live, "m").waiting == 1)
        loader.gate.set()
        assert other.result(60).status == 200
        assert loader.loads == 1


def test_request_timeout_ends_the_wait_for_a_load(engine: type[fakes.Engine]) -> None:
    loader = Loader()
    loader.gate.clear()
    with serving(on_demand={"m": loader.model}) as live:
        body = {"prompt": "Hi", "max_tokens": 1}
        found = live.request("/v1/completions", body, headers={"X-Request-Timeout": "0.1"})
        assert (found.status, found.error["code"]) == (503, "deadline_exceeded")
        loader.gate.set()
        assert live.complete(max_tokens=1).status == 200
        assert loader.loads == 1


def test_idle_model_is_unloaded_after_its_keep_alive_time(engine: type[fakes.Engine]) -> None:
    loader = Loader()
    with serving(ServerSettings(model_keep_alive=0.05), on_demand={"m": loader.model}) as live:
        assert live.chat(max_tokens=1).status == 200
        until(lambda: states(live) == {"m": "unloaded"})
        until(lambda: not loader.made[0]._engine_thread.alive)
        assert live.request("/health").status == 200
        assert live.chat(max_tokens=1).status == 200
        assert loader.loads == 2
        assert 'model_unloads_total{engine="0",model_name="m"}' in live.request("/metrics").body.decode()


@pytest.mark.parametrize("stream", [False, True])
def test_model_in_use_is_not_unloaded(engine: type[fakes.Engine], pool: ThreadPoolExecutor, stream: bool) -> None:
    loader = Loader()
    engine.gate = threading.Event()
    with serving(ServerSettings(model_keep_alive=0, ollama=True), on_demand={"m": loader.model}) as live:
        try:
            answer = ask(pool, live, "m", stream=stream)
            until(lambda: loader.made and loader.made[0]._registry.all())
            unload = live.request("/api/generate", {"model": "m", "keep_alive": 0})
            assert unload.json["done_reason"] == "unload"
            assert states(live) == {"m": "loaded"}
        finally:
            engine.gate.set()
        assert answer.result(60).status == 200
        until(lambda: states(live) == {"m": "unloaded"})


def test_background_response_keeps_its_model_loaded(engine: type[fakes.Engine], tmp_path: Path) -> None:
    loader = Loader()
    engine.gate = threading.Event()
    settings = ServerSettings(model_keep_alive=0, responses_db=str(tmp_path / "responses.db"))
    with serving(settings, on_demand={"m": loader.model}) as live:
        try:
            made = live.request("/v1/responses", {"input": "Hi", "background": True, "max_output_tokens": 2}).json
            until(lambda: loader.made and loader.made[0]._registry.all())
            assert states(live) == {"m": "loaded"}
        finally:
            engine.gate.set()
        path = f"/v1/responses/{made['id']}"
        until(lambda: live.request(path).json["status"] in ("completed", "incomplete"))
        until(lambda: states(live) == {"m": "unloaded"})


def test_ollama_loads_and_unloads(engine: type[fakes.Engine]) -> None:
    loader = Loader()
    with serving(OLLAMA, on_demand={"m": loader.model}) as live:

        def expiry(keep_alive: Any) -> timedelta:
            loaded = live.request("/api/generate", {"model": "m:latest", "keep_alive": keep_alive, "stream": False})
            assert (loaded.status, loaded.json["done_reason"]) == (200, "load")
            (model,) = live.request("/api/ps").json["models"]
            return datetime.fromisoformat(model["expires_at"]) - datetime.now(UTC)

        assert timedelta(minutes=9) < expiry("10m") <= timedelta(minutes=10)
        assert live.chat(max_tokens=1).status == 200
        assert timedelta(minutes=9) < expiry(None) <= timedelta(minutes=10), "other requests keep the time"
        assert timedelta(minutes=89) < expiry("1h30m") <= timedelta(minutes=90)
        assert timedelta(seconds=80) < expiry(90) <= timedelta(seconds=90)
        assert expiry(-1) > timedelta(days=36500)
        assert loader.loads == 1
        found = live.request("/api/chat", {"model": "m", "messages": [], "keep_alive": 0}).json
        assert found["done_reason"] == "unload"
        assert running(live) == []
        assert timedelta(minutes=4) < expiry(None) <= timedelta(minutes=5), "the server's time applies after a load"
        assert loader.loads == 2


def test_least_recently_used_model_is_unloaded(engine: type[fakes.Engine], pool: ThreadPoolExecutor) -> None:
    loaders = {name: Loader() for name in "abc"}
    models = {name: loader.model for name, loader in loaders.items()}
    with serving(ServerSettings(max_loaded_models=2), on_demand=models) as live:
        for name in "aba":
            assert live.chat(model=name, max_tokens=1).status == 200
        assert live.chat(model="c", max_tokens=1).status == 200
        assert states(live) == {"a": "loaded", "b": "unloaded", "c": "loaded"}
        engine.gate = threading.Event()
        try:
            used: list[Future[Answer]] = []
            for name in "ac":  # one after the other, so that a is the least recently used one
                used.append(ask(pool, live, name, stream=name == "a"))
                until(loaders[name].made[-1]._registry.all)
            waiting = ask(pool, live, "b")
            until(lambda: entry_of(live, "a").is_retiring)
            late = ask(pool, live, "a")  # waits for the load of b, which would otherwise never have its turn
            until(lambda: entry_of(live, "a").waiting == 1)
            assert states(live) == {"a": "loaded", "b": "loading", "c": "loaded"}
        finally:
            engine.gate.set()
        assert [answer.result(60).status for answer in (*used, waiting, late)] == [200] * 4
        assert loaders["b"].loads == 2


@pytest.mark.parametrize("requests", [1, 2])
def test_first_requests_of_two_models_take_turns(
    engine: type[fakes.Engine], pool: ThreadPoolExecutor, requests: int
) -> None:
    first, second = Loader(), Loader()
    first.gate.clear()
    with serving(ServerSettings(max_loaded_models=1), on_demand={"a": first.model, "b": second.model}) as live:
        answers = [ask(pool, live, "a") for _ in range(requests)]
        until(lambda: entry_of(live, "a").is_reading and entry_of(live, "a").waiting == requests)
        answers.append(ask(pool, live, "b"))  # its load begins before the requests for a go on
        until(lambda: entry_of(live, "b").waiting == 1)
        first.gate.set()
        assert [answer.result(60).status for answer in answers] == [200] * (requests + 1)
        assert (first.loads, second.loads) == (1, 1)


def test_request_for_a_retiring_model_waits_for_its_next_load(
    engine: type[fakes.Engine], pool: ThreadPoolExecutor
) -> None:
    first, second = Loader(), Loader()
    with serving(ServerSettings(max_loaded_models=1), on_demand={"a": first.model, "b": second.model}) as live:
        engine.gate = threading.Event()
        try:
            answers = [ask(pool, live, "a", stream=True)]
            until(lambda: first.made and first.made[0]._registry.all())
            answers.append(ask(pool, live, "b"))
            until(lambda: entry_of(live, "a").is_retiring)
            answers.append(ask(pool, live, "a"))
            until(lambda: entry_of(live, "a").waiting == 1)
        finally:
            engine.gate.set()
        assert [answer.result(60).status for answer in answers] == [200] * 3
        assert (first.loads, second.loads) == (2, 1)


@pytest.mark.parametrize("other_waits", [False, True])
def test_request_that_leaves_when_the_load_has_ended(engine: type[fakes.Engine], other_waits: bool) -> None:
    async def run() -> None:
        first, second = Loader(), Loader()
        first.gate.clear()
        residency = Residency()
        residency.max_loaded = 1
        residency.keep_alive = math.inf if other_waits else 0
        left, other = Entry("a", first.model), Entry("b", second.model)
        residency.entries += [left, other]

        async def use(entry: Entry) -> None:
            async with residency.lease(entry):
                pass

        try:
            request = asyncio.create_task(use(left))
            while left.loading is None or not left.is_reading:
                await asyncio.sleep(0)
            following = asyncio.create_task(use(other)) if other_waits else None
            await asyncio.sleep(0)
            left.loading.add_done_callback(lambda _: request.cancel())
            first.gate.set()
            with pytest.raises(asyncio.CancelledError):
                await request
            if following is not None:
                await asyncio.wait_for(following, 60)
            assert left.state == "unloaded"
        finally:
            await residency.aclose()

    asyncio.run(run())


def test_idle_model_is_unloaded_where_memory_does_not_suffice(engine: type[fakes.Engine]) -> None:
    first, second = Loader(), Loader()

    def check() -> None:
        if any(llm._engine_thread.alive for llm in first.made):
            raise InsufficientMemoryError("the model needs 2 bytes, but only 1 is available")

    second.check = check
    with serving(on_demand={"first": first.model, "second": second.model}) as live:
        assert live.chat(model="first", max_tokens=1).status == 200
        assert live.chat(model="second", max_tokens=1).status == 200
        assert states(live) == {"first": "unloaded", "second": "loaded"}
        assert second.loads == 2

        def never() -> None:
            raise InsufficientMemoryError("the model needs 9 bytes, but only 1 is available")

        first.check = never
        found = live.chat(model="first", max_tokens=1)
        assert (found.status, found.error["code"]) == (500, "model_load_failed")
        assert "9 bytes" in found.error["message"]


@pytest.mark.parametrize("most", [None, 1])
def test_model_that_never_fits_does_not_unload_others_again(engine: type[fakes.Engine], most: int | None) -> None:
    small, large = Loader(), Loader()

    def never() -> None:
        raise InsufficientMemoryError("the model needs 9 bytes, but only 1 is available")

    large.check = never
    models = {"small": small.model, "large": large.model}
    with serving(ServerSettings(max_loaded_models=most, ollama=True), on_demand=models) as live:
        assert live.chat(model="large", max_tokens=1).error["code"] == "model_load_failed"
        assert live.chat(model="small", max_tokens=1).status == 200
        for _ in range(2):
            found = live.chat(model="large", max_tokens=1)
            assert (found.status, found.error["code"]) == (500, "model_load_failed")
            assert "9 bytes" in found.error["message"]
        assert states(live) == {"small": "loaded", "large": "unloaded"}
        assert (small.loads, large.loads) == (1, 1)
        large.check = lambda: None
        assert live.request("/api/generate", {"model": "small", "keep_alive": 0}).status == 200
        until(lambda: states(live)["small"] == "unloaded")
        assert live.chat(model="large", max_tokens=1).status == 200, "tried again where nothing else is loaded"
        assert live.chat(model="small", max_tokens=1).status == 200


@pytest.mark.parametrize("most", [None, 1])
def test_model_above_all_memory_is_refused_before_others_are_unloaded(
    engine: type[fakes.Engine], most: int | None
) -> None:
    small, large = Loader(), Loader()
    large.missing = 1 << 60
    with serving(
        ServerSettings(max_loaded_models=most), on_demand={"small": small.model, "large": large.model}
    ) as live:
        assert live.chat(model="small", max_tokens=1).status == 200
        found = live.chat(model="large", max_tokens=1)
        assert (found.status, found.error["code"]) == (500, "model_load_failed")
        assert f"exceed the available memory by {1 << 60} bytes" in found.error["message"]
        assert states(live) == {"small": "loaded", "large": "unloaded"}
        assert (small.loads, large.loads) == (1, 0)
        large.missing = 1
        assert live.chat(model="large", max_tokens=1).status == 200, "the other models hold more than is missing"


def test_download_before_the_check_of_memory_counts_as_load_time(
    engine: type[fakes.Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = Loader(), Loader()
    seconds = [0.0]

    def download() -> None:
        seconds[0] += 100

    large.download = download
    monkeypatch.setattr("ferrule.server.residency.time", SimpleNamespace(perf_counter=lambda: seconds[0]))
    with serving(on_demand={"small": small.model, "large": large.model}) as live:
        for name in ("small", "large"):
            assert live.chat(model=name, max_tokens=1).status == 200
        assert [entry_of(live, name).load_seconds for name in ("small", "large")] == [0, 100]


def test_properties_of_a_model_do_not_load_it(engine: type[fakes.Engine]) -> None:
    loader = Loader()
    with serving(on_demand={"m": loader.model}) as live:
        found = live.request("/props?model=m").json
        assert (found["is_sleeping"], found["model_alias"], found["model_path"]) == (True, "m", "a/model")
        assert "total_slots" not in found
        assert loader.loads == 0
        assert live.chat(max_tokens=1).status == 200
        found = live.request("/props?model=m").json
        assert (found["is_sleeping"], found["total_slots"]) == (False, entry_of(live, "m").info["max_num_seqs"])
        assert live.request("/props?model=none").status == 404


def test_failed_engine_is_loaded_again(engine: type[fakes.Engine]) -> None:
    loader = Loader()
    with serving(on_demand={"m": loader.model}) as live:
        assert live.chat(max_tokens=1).status == 200
        entry_of(live, "m").leases += 1  # that of a client that does not read its response
        loader.made[0]._registry.fail(EngineError("the engine has failed"))
        assert live.request("/health").status == 200
        assert live.chat(max_tokens=1).status == 200
        assert loader.loads == 2


def test_model_that_stays_loaded_is_loaded_again_after_a_failure(
    engine: type[fakes.Engine], pool: ThreadPoolExecutor
) -> None:
    loader, other = Loader(), Loader()
    first = AsyncLLM()
    models = {"m": replace(loader.model, loaded=first), "other": other.model}
    with serving(ServerSettings(ollama=True, max_loaded_models=1), on_demand=models) as live:
        assert states(live) == {"m": "loaded", "other": "unloaded"}
        # Neither a client nor another model unloads it.
        assert live.request("/api/generate", {"model": "m", "keep_alive": 0}).json["done_reason"] == "load"
        assert live.chat(model="other", max_tokens=1).status == 200
        assert states(live) == {"m": "loaded", "other": "loaded"}
        assert loader.loads == 0
        loader.gate.clear()
        first._registry.fail(EngineError("a stage is lost"))
        for _ in range(2):
            found = live.request("/health")
            assert (found.status, found.error["code"]) == (503, "engine_unavailable")
            assert "is being loaded again" in found.error["message"]
        answer = ask(pool, live, "m")
        until(lambda: entry_of(live, "m").waiting)
        loader.gate.set()
        assert answer.result(60).status == 200
        assert live.request("/health").status == 200
        assert states(live) == {"m": "loaded", "other": "loaded"}
        # A request loads it again too.
        loader.made[0]._registry.fail(EngineError("a stage is lost"))
        assert live.chat(model="m", max_tokens=1).status == 200
        assert loader.loads == 2
    assert not any(llm._engine_thread.alive for llm in (first, *loader.made))


def test_shutdown_ends_the_wait_for_a_load(engine: type[fakes.Engine], pool: ThreadPoolExecutor) -> None:
    loader = Loader()
    loader.gate.clear()
    with serving(on_demand={"m": loader.model}) as live:
        answer = ask(pool, live, "m")
        until(lambda: entry_of(live, "m").is_reading)
        live.end()
        found = answer.result(60)
        assert (found.status, found.error["code"]) == (503, "draining")
        loader.gate.set()
        live.thread.join(60)


def test_shutdown_closes_loaded_models(engine: type[fakes.Engine]) -> None:
    loader = Loader()
    with serving(on_demand={"m": loader.model}) as live:
        assert live.chat(max_tokens=1).status == 200
    assert not loader.made[0]._engine_thread.alive


def test_model_argument_is_loaded_at_start_and_model_options_on_demand(engine: type[fakes.Engine]) -> None:
    models = {"own": None, "again": None, "other": "a/model"}
    found = load_models(models, {}, OLLAMA, on_demand={"a/model"})
    assert isinstance(found["own"], AsyncLLM)
    assert found["again"] is found["own"]
    assert isinstance(found["other"], OnDemand)
    assert found["other"].source == "a/model"
    found["own"].close()
