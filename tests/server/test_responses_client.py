"""OpenAI's Responses: its own client against a live server with the embedded model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import openai
import pytest
from openai.types.responses import FunctionToolParam
from pydantic import BaseModel

from ferrule import LLM, SamplingParams
from ferrule.server.responses.protocol import LOGPROBS
from server.live import Live
from server.response_streams import check_stream, without_times
from server.scripted_server import named_events

pytestmark = pytest.mark.native

ASK = "What is the capital of France?"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "large": {"type": "boolean"}},
    "required": ["city", "large"],
    "additionalProperties": False,
}
ONE_CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: FunctionToolParam = {
    "type": "function",
    "name": "weather",
    "description": "Ask for the weather.",
    "parameters": ONE_CITY,
    "strict": True,
}


@pytest.fixture(scope="module")
def client(tiny: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_response_equals_library_output(client: openai.OpenAI, solo: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    question = {"role": "user", "content": ASK}
    parts = {"role": "user", "content": [{"type": "input_text", "text": ASK}]}
    cases: list[tuple[dict[str, Any], list[dict[str, str]]]] = [
        ({"input": ASK}, [question]),
        ({"input": [parts], "instructions": "Be brief."}, [{"role": "system", "content": "Be brief."}, question]),
    ]
    for given, messages in cases:
        expected = solo.chat(messages, params)[0]
        found = client.responses.create(model="tiny", temperature=0, max_output_tokens=12, metadata={"a": "b"}, **given)
        assert found.output_text == expected.outputs[0].text
        assert (found.status, found.error) == ("completed", None)
        assert found.model_extra is not None
        assert found.model_extra["store"] is False
        assert (found.metadata, found.instructions) == ({"a": "b"}, given.get("instructions"))
        assert found.usage is not None
        assert found.usage.input_tokens == len(expected.prompt_token_ids)
        assert found.usage.output_tokens == len(expected.outputs[0].token_ids)
        assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_output_tokens": 3},
        {"include": [LOGPROBS], "top_logprobs": 2},
        {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False},
        {"text": {"format": {"type": "json_schema", "name": "city", "schema": SCHEMA, "strict": True}}},
    ],
)
def test_stream_equals_whole_response(tiny: Live, fields: dict[str, Any]) -> None:
    request = {"input": ASK, "seed": 4, "max_output_tokens": 80, **fields}
    whole = tiny.request("/v1/responses", request)
    stream = tiny.request("/v1/responses", {**request, "stream": True})
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert without_times(check_stream(named_events(stream.body))) == without_times(whole.json)


def test_client_stream_equals_whole_response(client: openai.OpenAI) -> None:
    whole = client.responses.create(model="tiny", input=ASK, temperature=0)
    with client.responses.stream(model="tiny", input=ASK, temperature=0) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == whole.output_text
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")


def test_json_schema_is_enforced(client: openai.OpenAI) -> None:
    class City(BaseModel):
        city: Literal["Paris", "Rome"]
        large: bool

    parsed = client.responses.parse(model="tiny", input=ASK, text_format=City, extra_body={"seed": 1}).output_parsed
    assert isinstance(parsed, City)
    found = client.responses.create(
        model="tiny",
        input=ASK,
        text={"format": {"type": "json_schema", "name": "city", "schema": SCHEMA}},
        extra_body={"seed": 2},
    )
    jsonschema.validate(json.loads(found.output_text), SCHEMA)
    found = client.responses.create(
        model="tiny",
        input=ASK,
        text={"format": {"type": "json_object"}},
        temperature=0,
        max_output_tokens=200,
        extra_body={"structured_outputs": None},
    )
    assert found.output_text.lstrip().startswith("{")
    found = client.responses.create(
        model="tiny", input=ASK, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert found.output_text in ("yes", "no")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_tool_choice_forces_tool_call(client: openai.OpenAI, choice: Any) -> None:
    found = client.responses.create(
        model="tiny",
        input=ASK,
        tools=[WEATHER],
        tool_choice=choice,
        parallel_tool_calls=False,
        extra_body={"seed": 3},
    )
    (call,) = found.output
    assert call.type == "function_call"
    assert (call.name, call.status) == ("weather", "completed")
    jsonschema.validate(json.loads(call.arguments), ONE_CITY)
    # What came is handed back, with what the tool returned.
    answer = client.responses.create(
        model="tiny",
        input=[
            {"role": "user", "content": ASK},
            call.model_dump(exclude_unset=True),  # type: ignore[list-item]
            {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."},
        ],
        max_output_tokens=5,
    )
    assert answer.usage is not None
    assert answer.usage.output_tokens <= 5


def test_logprobs_equal_library_output(client: openai.OpenAI, solo: LLM) -> None:
    found = client.responses.create(
        model="tiny", input=ASK, temperature=0, max_output_tokens=6, include=[LOGPROBS], top_logprobs=3
    )
    message = found.output[0]
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert "".join(token.token for token in part.logprobs).startswith(part.text)
    assert {len(token.top_logprobs) for token in part.logprobs} == {3}
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=0)
    expected = solo.chat([{"role": "user", "content": ASK}], params)[0].outputs[0].logprobs or []
    assert [each.logprob for each in part.logprobs] == [next(iter(each.values())).logprob for each in expected]


def test_max_output_tokens_gives_incomplete_status(client: openai.OpenAI) -> None:
    found = client.responses.create(model="tiny", input=ASK, temperature=0, max_output_tokens=3)
    assert found.status == "incomplete"
    assert found.incomplete_details is not None
    assert found.incomplete_details.reason == "max_output_tokens"
    (message,) = found.output
    assert message.type == "message"
    assert message.status == "incomplete"


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,aGk=", "detail": "auto"}
ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"conversation": "c"}, "conversation"),
    ({"n": 2}, "n"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"stream_options": {}}, "stream_options"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 21, "include": [LOGPROBS]}, "top_logprobs"),
    ({"include": ["reasoning"]}, "include[0]"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": "hot"}, "temperature"),
    ({"text": {"format": {"type": "xml"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "json_schema": {"schema": {}}}}}, "text.format.schema"),
    ({"text": {"format": "json_schema"}}, "text.format"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "time"}}, "tool_choice.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"input": 3}, "input"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
    ({"instructions": "Hi", "input": [{"role": "user", "content": ["x"]}]}, "input[0].content[0]"),
    ({"instructions": "Hi", "input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0].image_url"),
    ({"input": [{"role": "user", "content": [{**IMAGE, "file_id": "x"}]}]}, "input[0].content[0].file_id"),
    (
        {"input": [{"type": "function_call_output", "call_id": "a", "output": [IMAGE]}]},
        "input[0].output[0].image_url",
    ),
    ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input[0].encrypted_content"),
    ({"input": [{"type": "reasoning", "encrypted_content": "ferrule:x"}]}, "input[0].encrypted_content"),
    ({"tools": [{"type": "custom"}]}, "tools[0].name"),
    ({"tools": [{"type": "custom", "name": "a", "async": True}]}, "tools[0].async"),
    ({"tools": [{"type": "custom", "name": "a", "format": {"type": "xml"}}]}, "tools[0].format.type"),
]


@pytest.mark.parametrize(("fields", "param"), ERRORS)
def test_invalid_field_is_named_in_error(tiny: Live, fields: dict[str, Any], param: str) -> None:
    answer = tiny.request("/v1/responses", {"input": "Hi", **fields})
    assert answer.status == 400
    assert answer.error["param"] == param
    assert param.split(".", maxsplit=1)[0].split("[", maxsplit=1)[0] in answer.error["message"]
