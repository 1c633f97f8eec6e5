"""Requests of clients other than the official ones, and of routes without /v1."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

import fakes
from ferrule import LLM
from ferrule.server import ServerSettings
from server.live import Live, events, serving
from server.scripted_server import ANSWER, PARAMETERS, SAID, ScriptedServer

MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "strict": True}}


class City(BaseModel):
    """Schema of a parsed answer, and of the arguments of a parsed call."""

    city: str


def write(live: Live, text: str) -> None:
    """Sets the output of the fake engine."""
    tokens = [*live.llm.tokenize(text, add_special_tokens=False), 2]
    live.llm._driver._engine.__class__.script = staticmethod(lambda _prompt: tokens)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_clients_that_split_lines_at_unicode_separators_read_streams(
    live: Live, engine: type[fakes.Engine], path: str
) -> None:
    text = "a\u2028b\u2029c\u0085d\u000be"
    write(live, text)
    body = {"messages": MESSAGES, "stream": True} if "chat" in path else {"prompt": "Hi", "stream": True}
    found = ""
    with httpx.stream("POST", live.url + path, json={**body, "max_tokens": 50}) as answer:
        for line in answer.iter_lines():
            if line and line != "data: [DONE]":
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                found += choice["delta"].get("content") or "" if "chat" in path else choice["text"]
    assert found == text


def test_no_chunk_of_a_chat_is_empty(live: Live, engine: type[fakes.Engine]) -> None:
    engine.step_seconds = 0.01
    write(live, "🎉👩‍👩‍👧‍👦" * 3)
    choices = [choice for chunk in events(live.chat(stream=True).body) for choice in chunk["choices"]]
    assert len(choices) > 2
    assert all(choice["delta"] or choice["finish_reason"] for choice in choices)
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "🎉👩‍👩‍👧‍👦" * 3
    identified = events(live.chat(stream=True, return_token_ids=True).body)
    tokens = [token for chunk in identified for choice in chunk["choices"] for token in choice["token_ids"]]
    assert live.llm.detokenize(tokens) == "🎉👩‍👩‍👧‍👦" * 3


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of the client, which sends `parsed`
def test_a_parsed_answer_can_be_sent_back(scripted: ScriptedServer) -> None:
    with openai.OpenAI(base_url=f"{scripted.live.url}/v1", api_key="none", max_retries=0) as client:
        called = client.chat.completions.with_raw_response.parse(model="tiny", messages=MESSAGES, tools=[WEATHER])
        message = called.parse().choices[0].message
        assert message.tool_calls
        assert message.tool_calls[0].function.parsed_arguments == {"city": "Zürich"}
        results = [{"role": "tool", "tool_call_id": each.id, "content": "Sunny."} for each in message.tool_calls]
        sent: list[Any] = [*MESSAGES, message, *results]
        again = client.chat.completions.with_raw_response.create(model="tiny", messages=sent)
        assert "X-Ferrule-Ignored-Fields" not in again.headers
        scripted.set_output('{"city": "Rome"}')
        parsed = client.chat.completions.parse(model="tiny", messages=MESSAGES, response_format=City)
        message = parsed.choices[0].message
        assert message.parsed == City(city="Rome")
        sent = [*MESSAGES, message, *MESSAGES]
        again = client.chat.completions.with_raw_response.create(model="tiny", messages=sent)
        assert "X-Ferrule-Ignored-Fields" not in again.headers
        response = client.responses.parse(model="tiny", input="?", text_format=City)
        assert response.output_parsed == City(city="Rome")
        output: list[Any] = [item.to_dict() for item in response.output]
        assert "parsed" in output[-1]["content"][0]
        handed = client.responses.with_raw_response.create(model="tiny", input=[*MESSAGES, *output, *MESSAGES])
        assert "X-Ferrule-Ignored-Fields" not in handed.headers


def test_an_answer_of_litellm_can_be_sent_back(scripted: ScriptedServer) -> None:
    answer = scripted.live.chat(tools=[WEATHER]).json["choices"][0]["message"]
    answer["provider_specific_fields"] = {"refusal": None}
    results = [{"role": "tool", "tool_call_id": each["id"], "content": "Sunny."} for each in answer["tool_calls"]]
    again = scripted.live.chat(messages=[*MESSAGES, answer, *results])
    assert again.status == 200, again.body
    assert "X-Ferrule-Ignored-Fields" not in again.headers


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"documents": []}, "documents"),
        ({"texts": []}, "texts"),
        ({}, "documents"),
        ({"documents": ["a"], "texts": ["a"]}, "texts"),
        ({"texts": ["a"], "raw_scores": True}, "raw_scores"),
    ],
)
def test_reranking_nothing_is_refused(live: Live, fields: dict[str, Any], param: str) -> None:
    answer = live.request("/v1/rerank", {"query": "a", **fields})
    assert (answer.status, answer.error["param"]) == (400, param)


def test_routes_of_openai_without_v1(live: Live) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
        "/completions": {"prompt": "Hi", "max_tokens": 1},
        "/responses": {"input": "Hi", "max_output_tokens": 1},
        "/embeddings": {"input": "Hi", "dimensions": 0},
    }
    for path, body in bodies.items():
        assert live.request(path, body).status == live.request(f"/v1{path}", body).status != 404
    assert live.request("/models").json == live.request("/v1/models").json
    assert live.request("/models/tiny").json == live.request("/v1/models/tiny").json


def test_a_body_with_two_lengths_is_refused_and_the_connection_closed(live: Live) -> None:
    body = json.dumps({"prompt": "Hi", "max_tokens": 1}).encode()
    lines = [
        b"POST /v1/completions HTTP/1.1",
        b"Host: localhost",
        b"Content-Type: application/json",
        b"Content-Length: %d" % len(body),
        b"Transfer-Encoding: chunked",
    ]
    with live.connect() as client:
        client.sendall(b"\r\n".join([*lines, b"", b"%x" % len(body), body, b"0", b"", b""]))
        answer = b""
        while piece := client.recv(1 << 16):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"\r\nconnection: close\r\n" in answer.lower()
    assert answer.count(b"HTTP/1.1 ") == 1


def sent_half_closed(live: Live, body: dict[str, Any]) -> bytes:
    """Returns the response to a client that sends a request and closes its sending side."""
    data = json.dumps(body).encode()
    lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    with live.connect() as client:
        client.sendall("\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""]).encode() + data)
        client.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := client.recv(1 << 16):
            answer += piece
    return answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")


@pytest.mark.parametrize("stream", [False, True])
def test_half_closed_connection_gets_its_response(live: Live, engine: type[fakes.Engine], stream: bool) -> None:
    engine.step_seconds = 0.02
    write(live, "one two three four five six")
    answer = sent_half_closed(live, {"prompt": "Hi", "stream": stream, "max_tokens": 50})
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"six" in answer
    assert (b"data: [DONE]" in answer) == stream
    assert sent_half_closed(live, {"prompt": 5}).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    ("said", "content", "cities"),
    [
        (ANSWER.partition("</think>")[2].partition(SAID)[2].strip(), None, ["Zürich", "Rome"]),
        ('{"city": "Rome"}', '{"city": "Rome"}', []),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_tools_with_a_response_format(
    scripted: ScriptedServer, said: str, content: str | None, cities: list[str], stream: bool
) -> None:
    scripted.set_output(said)
    with openai.OpenAI(base_url=f"{scripted.live.url}/v1", api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "tools": [WEATHER], "response_format": City}
        if stream:
            with client.chat.completions.stream(**asked) as events_of_stream:
                choice = events_of_stream.get_final_completion().choices[0]
        else:
            choice = client.chat.completions.parse(**asked).choices[0]
        assert (choice.message.content or None) == content, "a stream begins with empty content"
        assert choice.message.parsed == (City(city="Rome") if content else None)
        assert choice.finish_reason == ("tool_calls" if cities else "stop")
        calls = choice.message.tool_calls or []
        assert [call.function.parsed_arguments for call in calls] == [{"city": each} for each in cities]


# Tests on the engine itself come last: fixtures of the others check that no thread of an engine is left.


@pytest.mark.native
def test_offsets_of_an_echo_are_places_in_the_text(tiny: Live, solo: LLM) -> None:
    special = [solo.tokenize(each, add_special_tokens=False)[0] for each in ("<|bos|>", "<|eos|>")]
    word = solo.tokenize("word", add_special_tokens=False)
    character = solo.tokenize("漢", add_special_tokens=False)
    assert len(character) > 1
    asked: dict[str, Any] = {"max_tokens": 0, "echo": True, "logprobs": 0}
    (choice,) = tiny.complete([*special, *word], **asked).json["choices"]
    assert choice["text"] == "word"
    assert choice["logprobs"]["text_offset"][:3] == [0, 0, 0]
    (choice,) = tiny.complete([*word, *character, *word], **asked).json["choices"]
    assert choice["text"] == "word漢word"
    offsets = choice["logprobs"]["text_offset"]
    assert offsets[len(word) : -len(word)] == [4] * len(character)
    assert offsets[-len(word)] == 5
    (choice,) = tiny.complete("<|eos|>word", **asked).json["choices"]
    assert choice["logprobs"]["text_offset"][:2] == [0, len("<|eos|>")]
    (choice,) = tiny.complete([*special, *word], **asked, skip_special_tokens=False).json["choices"]
    assert choice["logprobs"]["text_offset"][:3] == [0, 7, 14]


@pytest.mark.native
def test_texts_are_reranked_in_the_form_of_text_embeddings_inference(tiny: Live) -> None:
    texts = ["Paris is the capital of France.", "Dogs bark.", "France has a capital."]
    asked = {"query": "capital", "texts": texts}
    found = tiny.request("/rerank", asked).json
    known = tiny.request("/rerank", {"query": "capital", "documents": texts}).json["results"]
    assert found == [{"index": each["index"], "score": each["relevance_score"]} for each in known]
    found = tiny.request("/rerank", {**asked, "return_text": True, "raw_scores": False, "truncate": False}).json
    assert [each["text"] for each in found] == [texts[each["index"]] for each in found]
    long = [*texts, "word " * 3000]
    refused = tiny.request("/rerank", {**asked, "texts": long})
    assert (refused.status, refused.error["param"]) == (400, "texts[3]")
    assert len(tiny.request("/rerank", {**asked, "texts": long, "truncate": True}).json) == 4


@pytest.mark.native
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_schemas_are_closed_and_strict_requires_every_property(tiny: Live, path: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "boolean"}}}

    def members(strict: bool, seed: int) -> set[str]:
        sampled: dict[str, Any] = {"seed": seed, "temperature": 2}
        if "chat" in path:
            tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}
            form = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema, "strict": strict}}
            call = tiny.chat(tools=[tool], tool_choice="required", parallel_tool_calls=False, **sampled).json
            answer = tiny.chat(response_format=form, **sampled).json["choices"][0]["message"]["content"]
            arguments = call["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
        else:
            tool = {"type": "function", "name": "f", "parameters": schema, "strict": strict}
            form = {"type": "json_schema", "name": "f", "schema": schema, "strict": strict}
            asked = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "input": "Hi"}
            arguments = tiny.request(path, {**asked, **sampled}).json["output"][0]["arguments"]
            answer = tiny.request(path, {"input": "Hi", "text": {"format": form}, **sampled}).json["output"][0]
            answer = answer["content"][0]["text"]
        assert json.loads(arguments).keys() | json.loads(answer).keys() <= {"a", "b"}
        return json.loads(arguments).keys() & json.loads(answer).keys()

    assert all(members(True, seed) == {"a", "b"} for seed in range(4))
    assert any(members(False, seed) != {"a", "b"} for seed in range(8))


@pytest.mark.native
@pytest.mark.parametrize("parser", ["hermes", "llama3_json", "mistral", None])
def test_an_output_with_tools_and_a_schema_is_a_call_or_an_answer(parser: str | None) -> None:
    parameters = {"type": "object", "properties": {"city": {"enum": ["Rome", "Bern"]}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    schema = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    called = answered = 0
    with serving(ServerSettings(tool_call_parser=parser)) as live:
        for seed in range(30):
            fields = {"tools": tools, "response_format": form, "temperature": 1.5, "max_tokens": 200, "seed": seed}
            (choice,) = live.chat(**fields).json["choices"]
            message = choice["message"]
            if choice["finish_reason"] == "length":
                continue
            if parser == "mistral" and (message["content"] or "").startswith("[TOOL_CALLS]"):
                continue  # after the marker the model is free
            for call in message.get("tool_calls", ()):
                assert call["function"]["name"] == "weather"
                arguments = json.loads(call["function"]["arguments"])
                assert arguments.keys() == {"city"}
                assert arguments["city"] in ("Rome", "Bern")
                called += 1
            if message["content"] is not None:
                assert json.loads(message["content"]).keys() == {"sure"}
                answered += 1
            else:
                assert choice["finish_reason"] == "tool_calls"
    assert answered
    assert called or parser == "mistral"
