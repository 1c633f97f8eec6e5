"""Anthropic's own client against a live server with the embedded model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema
import pytest
from anthropic.types import MessageParam, TextBlockParam, ToolParam

from ferrule import LLM, SamplingParams
from server.live import Live
from server.message_streams import check_stream, without_names
from server.scripted_server import named_events

pytestmark = pytest.mark.native

MESSAGES: list[MessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "large": {"type": "boolean"}},
    "required": ["city", "large"],
    "additionalProperties": False,
}
WEATHER: ToolParam = {
    "name": "weather",
    "description": "Ask for the weather.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def client(tiny: Live) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=tiny.url, api_key="none", max_retries=0) as client:
        yield client


def test_message_equals_library_output(client: anthropic.Anthropic, solo: LLM) -> None:
    expected = solo.chat(
        [{"role": "system", "content": "Be brief."}, *(dict(message) for message in MESSAGES)],
        SamplingParams(temperature=0, max_tokens=12),
    )[0]
    block: TextBlockParam = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    systems: list[str | list[TextBlockParam]] = ["Be brief.", [block]]
    for system in systems:
        found = client.messages.create(model="tiny", max_tokens=12, system=system, messages=MESSAGES, extra_body=GREEDY)
        (content,) = found.content
        assert content.type == "text"
        assert content.text == expected.outputs[0].text
        assert (found.stop_reason, found.stop_sequence) == ("end_turn", None)
        usage = found.usage
        assert usage.output_tokens == len(expected.outputs[0].token_ids)
        read = usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
        assert read == len(expected.prompt_token_ids)
        counted = client.messages.count_tokens(model="tiny", system=system, messages=MESSAGES)
        assert counted.input_tokens == len(expected.prompt_token_ids)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 3},
        {"tools": [WEATHER], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"stop_sequences": ["Paris", "never"]},
    ],
)
def test_stream_equals_whole_message(tiny: Live, fields: dict[str, Any]) -> None:
    body = {"messages": MESSAGES, "max_tokens": 80, "temperature": 0, **fields}
    whole = tiny.request("/v1/messages", body)
    stream = tiny.request("/v1/messages", {**body, "stream": True})
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert without_names(check_stream(named_events(stream.body))) == without_names(whole.json)


def test_client_stream_equals_whole_message(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(model="tiny", max_tokens=20, messages=MESSAGES, extra_body=GREEDY)
    with client.messages.stream(model="tiny", max_tokens=20, messages=MESSAGES, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert whole.content[0].type == "text"
    assert text == whole.content[0].text == stream.get_final_text()
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_tool_choice_forces_tool_call(client: anthropic.Anthropic, choice: Any) -> None:
    once = {**choice, "disable_parallel_tool_use": True}
    fields: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 60,
        "messages": MESSAGES,
        "tools": [WEATHER],
        "tool_choice": once,
        "extra_body": GREEDY,
    }
    found = client.messages.create(**fields)
    (call,) = found.content
    assert call.type == "tool_use"
    assert (call.name, found.stop_reason) == ("weather", "tool_use")
    jsonschema.validate(call.input, WEATHER["input_schema"])
    with client.messages.stream(**fields) as stream:
        (streamed,) = stream.get_final_message().content
    assert streamed.type == "tool_use"
    assert streamed.input == call.input
    # What came is handed back, with what the tool returned.
    answer = client.messages.create(
        model="tiny",
        max_tokens=5,
        messages=[
            *MESSAGES,
            {"role": "assistant", "content": found.content},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "Sunny."}]},
        ],
    )
    assert answer.usage.output_tokens <= 5


def test_json_schema_is_enforced(client: anthropic.Anthropic) -> None:
    found = client.messages.create(
        model="tiny",
        max_tokens=200,
        messages=MESSAGES,
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
        extra_body={"temperature": 0},
    )
    (block,) = found.content
    assert block.type == "text"
    jsonschema.validate(json.loads(block.text), SCHEMA)


def test_stop_reasons(client: anthropic.Anthropic) -> None:
    found = client.messages.create(model="tiny", max_tokens=3, messages=MESSAGES, extra_body=GREEDY)
    assert found.stop_reason == "max_tokens"
    found = client.messages.create(
        model="tiny", max_tokens=20, messages=MESSAGES, stop_sequences=["never", "capital"], extra_body=GREEDY
    )
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", "capital")
    assert found.content[0].type == "text"
    assert found.content[0].text == "The "
    long: list[MessageParam] = [{"role": "user", "content": "word " * 1900}]
    read = client.messages.count_tokens(model="tiny", messages=long).input_tokens
    assert read < 2048
    found = client.messages.create(
        model="tiny", max_tokens=4000, messages=long, extra_body={"top_k": 1}, output_config={"format": ENDLESS}
    )
    assert found.stop_reason == "model_context_window_exceeded"
    assert read + found.usage.output_tokens == 2048


ENDLESS: Any = {"type": "json_schema", "schema": {"type": "string", "minLength": 10000}}


def test_assistant_prefill_is_continued(client: anthropic.Anthropic, solo: LLM) -> None:
    begun: list[MessageParam] = [*MESSAGES, {"role": "assistant", "content": "The capital of"}]
    found = client.messages.create(model="tiny", max_tokens=4, messages=begun, extra_body=GREEDY)
    assert found.content[0].type == "text"
    prompt = solo.chat_prompt(
        [dict(message) for message in begun], add_generation_prompt=False, continue_final_message=True
    )
    expected = solo.generate([prompt], SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].text
    assert found.content[0].text == expected


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].source"),
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "messages[0].content[0]"),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]},
        "messages",
    ),
    ({"temperature": 1.5}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"top_k": -5}, "top_k"),
    ({"stop_sequences": ["a", ""]}, "stop_sequences[1]"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "time"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"thinking": {"type": "enabled"}}, "thinking"),
    ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "adaptive", "budget_tokens": 2000}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ({"container": "c"}, "container"),
]


@pytest.mark.parametrize(("fields", "named"), ERRORS)
def test_invalid_field_is_named_in_error(client: anthropic.Anthropic, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(model="tiny", max_tokens=4, messages=MESSAGES, extra_body=fields)
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert body["error"]["message"].startswith((f"{named} ", f"{named}: ", "the format of tool calls of tiny"))
    assert body["request_id"] == caught.value.request_id


def test_unknown_model_returns_not_found(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(model="none", max_tokens=4, messages=MESSAGES)
    assert caught.value.type == "not_found_error"
    assert "none" in str(caught.value)
