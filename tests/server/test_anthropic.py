"""Anthropic's Messages on a fake engine: thinking, tools, multi-turn messages, and errors, also of middleware."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import anthropic
import pytest

import fakes
from event_loop import fake_of
from ferrule.server import ServerSettings
from ferrule.server.anthropic.answer import PING
from ferrule.server.anthropic.conversation import conversation
from ferrule.server.anthropic.protocol import CountTokensRequest
from ferrule.server.output_parts import INVALID_JSON
from server.live import Live, serving, until
from server.message_streams import check_stream, without_names
from server.scripted_server import CITY, PARAMETERS, SAID, THOUGHT, ScriptedServer, named_events, scripted_server

WEATHER = {"name": "weather", "input_schema": PARAMETERS}
HI = [{"role": "user", "content": "Hi"}]


def ask(live: Live, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    return live.request("/v1/messages", {"max_tokens": 500, "messages": HI, **fields}, headers=headers)


def test_thinking_text_and_tool_calls_are_content_blocks(scripted: ScriptedServer) -> None:
    message = ask(scripted.live, tools=[WEATHER]).json
    thought, text, *calls = message["content"]
    assert thought == {"type": "thinking", "thinking": THOUGHT, "signature": ""}
    assert text == {"type": "text", "text": SAID, "citations": None}
    assert [(call["name"], call["input"]) for call in calls] == [("weather", {"city": city}) for city in (CITY, "Rome")]
    assert message["stop_reason"] == "tool_use"
    stream = named_events(ask(scripted.live, tools=[WEATHER], stream=True).body)
    assert without_names(check_stream(stream)) == without_names(message)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    one = ask(scripted.live, tools=[WEATHER], tool_choice=choice).json["content"]
    assert [block["type"] for block in one] == ["thinking", "text", "tool_use"]


def test_client_stream_reads_thinking_and_tool_calls(scripted: ScriptedServer) -> None:
    with (
        anthropic.Anthropic(base_url=scripted.live.url, api_key="none", max_retries=0) as client,
        client.messages.stream(
            model="tiny",
            max_tokens=2000,
            messages=[{"role": "user", "content": "Hi"}],
            tools=[{"name": "weather", "input_schema": PARAMETERS}],  # type: ignore[list-item]
            thinking={"type": "enabled", "budget_tokens": 1024},
        ) as stream,
    ):
        kinds = {event.type for event in stream}
        thought, answer, *calls = stream.get_final_message().content
    assert {"thinking", "text", "input_json"} <= kinds
    assert thought.type == "thinking"
    assert answer.type == "text"
    assert (thought.thinking, answer.text) == (THOUGHT, SAID)
    assert [call.input for call in calls if call.type == "tool_use"] == [{"city": CITY}, {"city": "Rome"}]


def test_response_content_is_accepted_as_input(scripted: ScriptedServer) -> None:
    content = ask(scripted.live, tools=[WEATHER]).json["content"]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "Sunny."}]}
        for block in content
        if block["type"] == "tool_use"
    ]
    turns = [*HI, {"role": "assistant", "content": content}, {"role": "user", "content": results}]
    assert ask(scripted.live, tools=[WEATHER], messages=turns).status == 200
    assert SAID in scripted.prompts[-1]
    assert scripted.prompts[-1].count("Sunny.") == 2


def test_truncated_tool_call_input_is_marked_invalid(scripted: ScriptedServer) -> None:
    scripted.set_output('<tool_call>\n{"name": "weather", "arguments": {"city": "Pa')
    (call,) = ask(scripted.live, tools=[WEATHER]).json["content"]
    assert call["input"] == {INVALID_JSON: '{"city": "Pa'}


def test_content_blocks_convert_to_chat_messages() -> None:
    request = CountTokensRequest.model_validate(
        {
            "system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "messages": [
                {"role": "user", "content": "c"},
                {"role": "user", "content": [{"type": "text", "text": "d"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                        {"type": "text", "text": "e"},
                        {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "1", "content": "g", "is_error": True},
                        {"type": "text", "text": "h"},
                    ],
                },
                {"role": "assistant", "content": "i"},
            ],
            "tools": [{"name": "f", "description": "j", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
            "thinking": {"type": "disabled"},
            "output_config": {"effort": "low"},
        }
    )
    found = conversation(request)
    function = {"name": "f", "arguments": {"x": 1}}
    assert found.messages == [
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": "c\nd"},
        {
            "role": "assistant",
            "content": "e",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "Error: g"},
        {"role": "user", "content": "h"},
        {"role": "assistant", "content": "i"},
    ]
    tool = {"name": "f", "parameters": {"type": "object"}, "description": "j"}
    assert found.tools == [{"type": "function", "function": tool}]
    assert (found.tool_choice, found.parallel_tool_calls) == ("function:f", False)
    assert (found.add_generation_prompt, found.continue_final_message) == (False, True)
    assert found.template_arguments == {"enable_thinking": False, "thinking": False, "reasoning_effort": "low"}


def test_failed_stream_ends_with_error_event(scripted: ScriptedServer) -> None:
    scripted.engine.step_seconds = 0.02
    scripted.engine.error_at = 6
    answer = ask(scripted.live, stream=True)
    first, *_, last = named_events(answer.body)
    assert first["type"] == "message_start"
    assert (last["type"], last["error"]["type"]) == ("error", "invalid_request_error")
    assert last["request_id"] == answer.headers["request-id"]


def test_pings_are_sent_while_stream_is_idle(engine: type[fakes.Engine]) -> None:
    fields = json.dumps({"max_tokens": 500, "messages": HI, "stream": True}).encode()
    with held(engine) as gate, scripted_server(engine, keep_alive=0.05) as scripted:
        url, headers = f"{scripted.live.url}/v1/messages", {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, fields, headers), timeout=60) as response:
            body = response.read(len(PING + PING))
            assert body == PING + PING
            gate.set()
            body += response.read()
    check_stream([event for event in named_events(body) if event["type"] != "ping"])


@contextmanager
def held(engine: type[fakes.Engine]) -> Generator[threading.Event]:
    """Makes engine steps wait for the gate."""
    engine.gate = threading.Event()
    try:
        yield engine.gate
    finally:
        engine.gate.set()


def message_of(answer: Any, status: int, kind: str) -> str:
    """Returns the message of an error in Anthropic's format."""
    assert answer.status == status
    assert answer.json.keys() == {"type", "error", "request_id"}
    assert (answer.json["type"], answer.json["error"]["type"]) == ("error", kind)
    assert answer.json["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    return answer.json["error"]["message"]


def test_middleware_errors_have_anthropic_format(engine: type[fakes.Engine]) -> None:
    settings = ServerSettings(api_keys=["secret"], max_body_bytes=1000, allowed_hosts=["here"])
    key = {"X-Api-Key": "secret", "Anthropic-Version": "2023-06-01"}
    with serving(settings) as live:
        assert ask(live, key).status == 200
        assert ask(live, {"Authorization": "Bearer secret"}).status == 200
        message_of(ask(live), 401, "authentication_error")
        message_of(ask(live, {"X-Api-Key": "other"}), 401, "authentication_error")
        message_of(ask(live, {**key, "Host": "elsewhere"}), 403, "permission_error")
        assert "max_body_bytes" in message_of(ask(live, key, system="x" * 1000), 413, "request_too_large")
        message_of(live.request("/v1/messages/batches", {}, headers=key), 404, "not_found_error")
        message_of(live.request("/v1/messages", headers=key), 405, "invalid_request_error")
        message_of(live.request("/v1/messages", b"{:", headers=key), 400, "invalid_request_error")
        live.server.models.draining = True
        refused = ask(live, key)
        message_of(refused, 503, "overloaded_error")
        assert refused.headers["retry-after"] == "1"
        other = live.request("/v1/responses", {"input": "Hi"}, headers=key)
        assert other.error["code"] == "draining", "each API has its own form"


def test_full_queue_raises_overloaded_error_in_client(engine: type[fakes.Engine]) -> None:
    with held(engine) as gate, scripted_server(engine, max_concurrent_requests=1) as scripted:
        asking = threading.Thread(target=lambda: ask(scripted.live))
        asking.start()
        until(lambda: fake_of(scripted.live.llm).running)
        with anthropic.Anthropic(base_url=scripted.live.url, api_key="none", max_retries=0) as client:
            with pytest.raises(anthropic.InternalServerError) as caught:
                client.messages.create(model="tiny", max_tokens=1, messages=[{"role": "user", "content": "Hi"}])
            assert caught.value.type == "overloaded_error"
        gate.set()
        asking.join()


def test_request_timeout_returns_timeout_error(engine: type[fakes.Engine]) -> None:
    with held(engine) as gate, scripted_server(engine) as scripted:
        message_of(ask(scripted.live, {"X-Request-Timeout": "0.2"}), 503, "timeout_error")
        gate.set()
