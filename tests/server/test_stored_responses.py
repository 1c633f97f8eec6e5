"""Stored and background responses: OpenAI's own client against a live server."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response

import fakes
from ferrule.errors import InvalidParameterError
from ferrule.server import ServerSettings
from ferrule.server.responses import store
from ferrule.server.responses.store import ResponseStore, StoredResponse
from server.live import Live, serving, until
from server.response_streams import check_stream
from server.scripted_server import ANSWER, SAID, ScriptedServer, scripted_server

ENDED = {"completed", "incomplete", "failed", "cancelled"}
LONG: dict[str, Any] = {"max_output_tokens": 1000, "extra_body": {"ignore_eos": True}}


@contextmanager
def served(file: Path, **settings: Any) -> Generator[tuple[Live, openai.OpenAI]]:
    with (
        serving(ServerSettings(responses_db=str(file), **settings)) as live,
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield live, client


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "responses.db"


@pytest.fixture
def client(engine: type[fakes.Engine], file: Path) -> Iterator[openai.OpenAI]:
    """A client of a server with a fake engine."""
    with served(file) as (_, client):
        yield client


@pytest.fixture
def scripted_store(engine: type[fakes.Engine], file: Path) -> Iterator[ScriptedServer]:
    with scripted_server(engine, responses_db=str(file)) as found:
        yield found


def ended(client: openai.OpenAI, response: Response) -> Response:
    until(lambda: client.responses.retrieve(response.id).status in ENDED)
    return client.responses.retrieve(response.id)


def code(caught: pytest.ExceptionInfo[Any]) -> tuple[int, str | None, str | None]:
    error = caught.value
    assert isinstance(error, openai.APIStatusError)
    return error.status_code, error.code, error.param


def asked(server: ScriptedServer, **fields: Any) -> tuple[dict[str, Any], str]:
    """Returns a response and the prompt that it answers."""
    found = server.live.request("/v1/responses", fields)
    assert found.status == 200, found.body
    return found.json, server.prompts[-1]


@pytest.mark.parametrize("stream", [False, True])
def test_response_is_stored_unless_the_request_says_otherwise(client: openai.OpenAI, stream: bool) -> None:
    for store_it in (None, True, False):
        fields: dict[str, Any] = {} if store_it is None else {"store": store_it}
        made: Any = client.responses.create(input="Hi", max_output_tokens=4, stream=stream, **fields)
        if stream:
            made = list(made)[-1].response
        assert made.model_extra["store"] is (store_it is not False)
        if store_it is False:
            with pytest.raises(openai.NotFoundError) as caught:
                client.responses.retrieve(made.id)
            assert code(caught) == (404, "response_not_found", "response_id")
        else:
            assert client.responses.retrieve(made.id) == made


def test_previous_response_precedes_the_input(scripted_store: ScriptedServer) -> None:
    scripted_store.set_output("First.")
    first, prompt = asked(scripted_store, input="One?", instructions="Be brief.")
    assert "Be brief." in prompt
    second, prompt = asked(scripted_store, input="Two?", previous_response_id=first["id"])
    assert "Be brief." not in prompt, "instructions are those of one request"
    assert second["previous_response_id"] == first["id"]
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Three?"}]}]
    _, prompt = asked(scripted_store, input=items, previous_response_id=second["id"], store=False)
    turns = [("user", "One?"), ("assistant", "First."), ("user", "Two?"), ("assistant", "First."), ("user", "Three?")]
    whole = [{"role": role, "content": text} for role, text in turns]
    assert prompt == asked(scripted_store, input=whole)[1]


def test_calls_and_reasoning_of_previous_responses_are_sent_back(scripted_store: ScriptedServer) -> None:
    tool = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
    scripted_store.set_output(ANSWER)
    first, _ = asked(scripted_store, input="Weather?", tools=[tool], max_output_tokens=500)
    calls = [item for item in first["output"] if item["type"] == "function_call"]
    outputs = [{"type": "function_call_output", "call_id": call["call_id"], "output": "Rain"} for call in calls]
    assert len(outputs) == 2
    _, prompt = asked(scripted_store, input=outputs, previous_response_id=first["id"], tools=[tool])
    by_hand = [{"role": "user", "content": "Weather?"}, *first["output"], *outputs]
    assert prompt == asked(scripted_store, input=by_hand, tools=[tool])[1]
    assert SAID in prompt


def test_conversation_survives_restart_and_deletion_of_its_beginning(engine: type[fakes.Engine], file: Path) -> None:
    with served(file) as (_, client):
        first = client.responses.create(input="One?", max_output_tokens=4)
        second = client.responses.create(input="Two?", max_output_tokens=4, previous_response_id=first.id)
    with served(file) as (_, client):
        assert client.responses.retrieve(second.id) == second
        client.responses.delete(first.id)
        third = client.responses.create(input="Three?", max_output_tokens=4, previous_response_id=second.id)
        items = client.responses.input_items.list(third.id, order="asc").data
        roles = [item.model_dump()["role"] for item in items]
        assert roles == ["user", "assistant", "user", "assistant", "user"]
        with pytest.raises(openai.NotFoundError) as caught:
            client.responses.create(input="Hi", previous_response_id=first.id)
        assert code(caught) == (404, "previous_response_not_found", "previous_response_id")


def test_input_items_are_listed_in_pages(client: openai.OpenAI) -> None:
    given: Any = [{"role": "user", "content": str(each)} for each in range(5)]
    made = client.responses.create(input=given, max_output_tokens=2)
    texts = [item.model_dump()["content"][0]["text"] for item in client.responses.input_items.list(made.id, limit=2)]
    assert texts == ["4", "3", "2", "1", "0"]
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.input_items.list(made.id, after="none")
    assert code(caught) == (400, "invalid_value", "after")


def test_background_response_is_polled(engine: type[fakes.Engine], client: openai.OpenAI) -> None:
    engine.gate = threading.Event()
    try:
        made = client.responses.create(input="Hi", max_output_tokens=6, temperature=0, background=True)
        assert (made.status, made.background, made.output) == ("queued", True, [])
        assert client.responses.retrieve(made.id).status == "queued"
    finally:
        engine.gate.set()
    found = ended(client, made)
    direct = client.responses.create(input="Hi", max_output_tokens=6, temperature=0)
    assert (found.status, found.output_text) == (direct.status, direct.output_text)
    assert client.responses.cancel(made.id) == found, "a response that has ended stays as it is"
    after = client.responses.create(input="More", max_output_tokens=2, previous_response_id=made.id)
    assert after.previous_response_id == made.id


def test_background_response_is_cancelled(engine: type[fakes.Engine], client: openai.OpenAI) -> None:
    engine.step_seconds = 0.01
    made = client.responses.create(input="Hi", background=True, **LONG)
    until(lambda: client.responses.retrieve(made.id).output_text)
    assert client.responses.retrieve(made.id).status == "in_progress"
    cancelled = client.responses.cancel(made.id)
    assert cancelled.status == "cancelled"
    assert cancelled.output_text
    assert client.responses.retrieve(made.id) == cancelled
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(input="More", previous_response_id=made.id)
    assert code(caught) == (400, "invalid_value", "previous_response_id")
    waited_for = client.responses.create(input="Hi", max_output_tokens=2)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.cancel(waited_for.id)
    assert code(caught) == (400, "not_in_background", "response_id")


def test_deletion_cancels_a_background_response(engine: type[fakes.Engine], file: Path) -> None:
    engine.step_seconds = 0.01
    with served(file) as (live, client):
        made = client.responses.create(input="Hi", background=True, **LONG)
        until(live.llm._registry.all)
        client.responses.delete(made.id)
        until(lambda: not live.llm._registry.all())
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id)


def test_stream_of_a_background_response_continues_after_any_event(
    engine: type[fakes.Engine], client: openai.OpenAI
) -> None:
    engine.step_seconds = 0.005
    given: Any = {"input": "Hi", "max_output_tokens": 60, "extra_body": {"ignore_eos": True}}
    begun = client.responses.create(**given, background=True, stream=True)
    first = [next(begun) for _ in range(5)]
    begun.close()
    made: Any = first[0]
    running = list(client.responses.retrieve(made.response.id, stream=True, starting_after=4))
    events = [event.model_dump(exclude_unset=True) for event in [*first, *running]]
    assert check_stream(events)["status"] == "incomplete"
    done = client.responses.retrieve(made.response.id, stream=True, starting_after=4)
    assert [event.model_dump(exclude_unset=True) for event in done] == events[5:]
    assert [event.sequence_number for event in client.responses.retrieve(made.response.id, stream=True)] == list(
        range(len(events))
    )


def test_failure_of_a_background_response_is_stored(engine: type[fakes.Engine], client: openai.OpenAI) -> None:
    engine.step_seconds, engine.dies_at = 0.01, 5
    found = ended(client, client.responses.create(input="Hi", background=True, **LONG))
    assert found.status == "failed"
    assert found.error is not None
    assert found.error.code == "engine_unavailable"
    last = list(client.responses.retrieve(found.id, stream=True))[-1]
    assert last.type == "response.failed"


def test_invalid_background_request_fails_at_once(client: openai.OpenAI) -> None:
    for fields, param in [({"temperature": -1}, "temperature"), ({"store": False}, "store")]:
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(input="Hi", background=True, **fields)  # type: ignore[call-overload]
        assert code(caught)[2] == param


def test_background_responses_are_limited(engine: type[fakes.Engine], file: Path) -> None:
    engine.step_seconds = 0.01
    with served(file, max_concurrent_requests=2) as (_, client):
        made = [client.responses.create(input="Hi", background=True, **LONG) for _ in range(2)]
        with pytest.raises(openai.APIStatusError) as caught:
            client.responses.create(input="Hi", background=True, **LONG)
        assert code(caught) == (503, "queue_full", None)
        for each in made:
            client.responses.cancel(each.id)


def test_shutdown_waits_for_background_responses_as_for_others(engine: type[fakes.Engine], file: Path) -> None:
    gate = engine.gate = threading.Event()
    with served(file, drain_timeout=60) as (live, client):
        short = client.responses.create(input="Hi", background=True, max_output_tokens=50)
        until(live.llm._registry.all)
        live.end()
        until(lambda: live.server.models.draining)
        gate.set()
        live.thread.join(60)
        assert not live.thread.is_alive()
    engine.gate, engine.step_seconds = None, 0.05
    with served(file, drain_timeout=0.2) as (live, client):
        assert client.responses.retrieve(short.id).status in ("completed", "incomplete")
        long = client.responses.create(input="Hi", background=True, **LONG)
        until(live.llm._registry.all)
        live.end()
        live.thread.join(60)
        assert not live.thread.is_alive()
    with served(file) as (_, client):
        found = client.responses.retrieve(long.id)
        assert found.status == "failed"
        assert found.error is not None
        assert found.error.code == "draining"


def test_interrupted_background_response_has_failed_after_restart(engine: type[fakes.Engine], file: Path) -> None:
    engine.step_seconds = 0.02
    with served(file) as (live, client):
        made = client.responses.create(input="Hi", background=True, **LONG)
        until(live.llm._registry.all)
        live.end()
        live.end()
        live.thread.join(60)
        assert not live.thread.is_alive()
    with served(file) as (_, client):
        found = client.responses.retrieve(made.id)
        assert found.status == "failed"
        assert found.error is not None
        assert found.error.code in ("interrupted", "draining", "engine_unavailable")


def test_oldest_responses_are_removed(engine: type[fakes.Engine], file: Path) -> None:
    with served(file, max_stored_responses=3) as (_, client):
        made = [client.responses.create(input="Hi", max_output_tokens=2).id for _ in range(5)]
        for old in made[:2]:
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(old)
        assert [client.responses.retrieve(each).id for each in made[2:]] == made[2:]


def test_store_limits_bytes_and_keeps_unfinished_responses(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_BYTES", 100_000)
    with closing(ResponseStore(file, 1000)) as stored:
        stored.put("running", StoredResponse(b"{}", b"[]"), ended=False)
        for each in range(50):
            stored.put(str(each), StoredResponse(b"x" * 10_000, b"[]"), ended=True)
        assert [each for each in range(50) if stored.get(str(each)) is not None] == list(range(41, 50))
        assert stored.get("running") is not None
    assert file.stat().st_size < 200_000
    assert file.stat().st_mode & 0o077 == 0, "others can read conversations"


def test_deleted_text_is_not_in_the_file(file: Path) -> None:
    with closing(ResponseStore(file, 10)) as stored:
        for each in ("a", "b"):
            stored.put(each, StoredResponse(b"secret" * 1000, b"[]"), ended=True)
            assert stored.delete(each)
        assert not stored.delete("a")
    assert b"secret" not in file.read_bytes()


def test_files_of_others_are_refused_and_kept(tmp_path: Path) -> None:
    text, other = tmp_path / "text", tmp_path / "other.db"
    text.write_text("not a database " * 100)
    with closing(sqlite3.connect(other)) as db:
        db.execute("CREATE TABLE own (a)")
    before = [path.read_bytes() for path in (text, other)]
    for path in (text, other, tmp_path, tmp_path / "none" / "file"):
        with pytest.raises(InvalidParameterError, match="responses_db must be "):
            ResponseStore(path, 10)
    assert [path.read_bytes() for path in (text, other)] == before


def test_file_serves_one_server(file: Path) -> None:
    with closing(ResponseStore(file, 10)), pytest.raises(InvalidParameterError, match="no other server uses"):
        ResponseStore(file, 10)
    ResponseStore(file, 10).close()


def test_without_a_file_nothing_is_stored_and_errors_say_how_to_change_that(
    engine: type[fakes.Engine], live: Live
) -> None:
    made = live.request("/v1/responses", {"input": "Hi", "store": True, "max_output_tokens": 2})
    assert (made.status, made.json["store"]) == (200, False)
    for fields in ({"previous_response_id": "resp_1"}, {"background": True}):
        found = live.request("/v1/responses", {"input": "Hi", **fields})
        assert (found.status, found.error["param"]) == (400, next(iter(fields)))
        assert "--responses-db" in found.error["message"]
    for method, path in [("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")]:
        found = live.request(f"/v1/responses/{made.json['id']}{path}", method=method)
        assert (found.status, found.error["code"]) == (404, "responses_not_stored")
        assert "--responses-db" in found.error["message"]


def test_query_of_a_stored_response_is_checked(engine: type[fakes.Engine], file: Path) -> None:
    with served(file) as (live, client):
        made = client.responses.create(input="Hi", max_output_tokens=2).id
        for query, param in [
            ("starting_after=1", "starting_after"),
            ("stream=true&starting_after=-1", "starting_after"),
            ("stream=true", "stream"),
            ("stream=maybe", "stream"),
        ]:
            found = live.request(f"/v1/responses/{made}?{query}")
            assert (found.status, found.error["param"]) == (400, param), json.dumps(found.json)
