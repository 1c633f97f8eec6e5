"""Valid and invalid requests over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

import fakes
from ferrule import AsyncLLM, SamplingParams, StructuredOutputsParams
from ferrule.server import ServerSettings
from ferrule.server.schema.limits import MAX_TOKEN_IDS
from ferrule.server.schema.sampling import NOT_IN_REQUESTS, SamplingFields, StructuredOutputs
from server.live import Answer, Live, events, serving

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
OTHER = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}

SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}}
BROKEN = {"type": "function", "function": {"name": "a", "parameters": {"type": "nothing"}}}


@pytest.fixture(scope="module")
def shared(tiny: Live) -> Live:
    """A server on the real engine, for requests that the engine rejects."""
    return tiny


def test_every_library_parameter_is_a_request_field() -> None:
    assert SamplingFields.model_fields.keys() | NOT_IN_REQUESTS == {field.name for field in fields(SamplingParams)}
    assert not SamplingFields.model_fields.keys() & NOT_IN_REQUESTS
    names = {field.alias or name for name, field in StructuredOutputs.model_fields.items()}
    assert names == {field.name for field in fields(StructuredOutputsParams)}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("46", {"temperature": -1}, "temperature"),
    ("46", {"temperature": 1e308}, "temperature"),
    ("46", {"temperature": float("nan")}, "temperature"),
    ("47", {"top_p": -1}, "top_p"),
    ("47", {"top_p": 2}, "top_p"),
    ("47", {"min_p": 2}, "min_p"),
    ("47", {"repetition_penalty": 0}, "repetition_penalty"),
    ("48", {"top_k": -5}, "top_k"),
    ("48", {"top_k": 2**63}, "top_k"),
    ("49", {"n": 10**9}, "n"),
    ("50", {"max_tokens": -1}, "max_tokens"),
    ("50", {"max_tokens": 2**63}, "max_tokens"),
    ("51", {"logit_bias": {"-1": 1}}, "logit_bias"),
    ("51", {"logit_bias": {"4096": 1}}, "logit_bias"),
    ("51", {"stop_token_ids": [4096]}, "stop_token_ids"),
    ("51", {"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ("52", {"stop": ""}, "stop[0]"),
    ("52", {"stop": ["a"] * 100_000}, "stop"),
    ("54", {"structured_outputs": {"json": {"type": "nothing"}}}, "structured_outputs.json"),
    ("54", {"response_format": SCHEMA}, "response_format.json_schema.schema"),
    ("54", {"response_format": {"type": "structural_tag", "structures": 1}}, "response_format.structural_tag"),
    ("54", {"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ("54", {"structured_outputs": {"grammar": "start: start start"}}, "structured_outputs.grammar"),
    ("54", {"structured_outputs": {}}, "structured_outputs"),
    ("54", {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ("54", {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ("55", {"logits_processors": ["a"]}, "logits_processors"),
    ("55", {"response_format": {"type": "text", "foo": 1}}, "response_format.foo"),
    (
        "55",
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "foo": 1}}},
        "response_format.json_schema.foo",
    ),
    ("39", {"structured_outputs": {"choice": ["\\ud800"]}}, "structured_outputs.choice[0]"),
    ("", {"priority": 2**40}, "priority"),
    ("", {"cache_salt": ""}, "cache_salt"),
    ("", {"seed": -2}, "seed"),
    ("", {"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
]
CHAT_ALONE: list[tuple[str, dict[str, Any], str]] = [
    ("44", {"chat_template_kwargs": {"messages": []}}, "messages"),
    ("45", {"chat_template": "{{ raise_exception('no such thing') }}"}, "messages"),
    ("49", {"logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
    ("50", {"max_completion_tokens": -1}, "max_completion_tokens"),
    ("53", {"messages": [{"role": "user", "content": "word " * 3000}]}, "messages"),
    ("54", {"tools": [BROKEN], "tool_choice": "required"}, "tools"),
    ("52", {"messages": []}, "messages"),
    (
        "62",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://10.0.0.1"}}]}]},
        "messages[0].content[0].image_url.url",
    ),
    (
        "",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "data:image/png;base64,a"}]}]},
        "messages[0].content[0].image_url",
    ),
    ("", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].image_url"),
    ("", {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0].type"),
    ("", {"messages": [{"role": "user", "content": "\\ud800"}]}, "messages"),
    ("", {"messages": "Hi"}, "messages"),
    ("", {"messages": [{"content": "Hi"}]}, "messages[0].role"),
    ("55", {"messages": [{"role": "alien", "content": "Hi"}]}, "messages[0].role"),
    ("55", {"audio": {"voice": "a"}}, "audio"),
    ("55", {"modalities": ["text", "audio"]}, "modalities"),
    ("55", {"functions": [{"name": "a"}]}, "functions"),
    ("55", {"web_search_options": {}}, "web_search_options"),
    ("55", {"messages": [{"role": "assistant", "content": "", "audio": {"id": "a"}}]}, "messages[0].audio"),
    ("55", {"messages": [{"role": "user", "content": "Hi"}, {"role": "user", "content": None}]}, "messages[1]"),
    ("55", {"messages": [{"role": "assistant"}]}, "messages[0]"),
    ("55", {"messages": [{"role": "user", "content": "a", "tool_call_id": "b"}]}, "messages[0]"),
    ("55", {"messages": [{"role": "user", "content": "a", "reasoning": "b"}]}, "messages[0]"),
    (
        "55",
        {"messages": [{"role": "tool", "content": "a", "tool_calls": [{"function": {"name": "b"}}]}]},
        "messages[0]",
    ),
    ("", {"tool_choice": "required"}, "tool_choice"),
    ("", {"tool_choice": "sometimes"}, "tool_choice"),
    ("", {"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    (
        "",
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice.function.name",
    ),
    ("", {"tools": [TOOL, TOOL], "tool_choice": "required"}, "tools[1]"),
    ("", {"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ("", {"tools": [TOOL], "structured_outputs": {"regex": "a"}}, "tools"),
    ("", {"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens"),
    ("", {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
]
COMPLETIONS_ALONE: list[tuple[str, dict[str, Any], str]] = [
    ("49", {"logprobs": 10**6}, "logprobs"),
    ("49", {"prompt_logprobs": 10**6}, "prompt_logprobs"),
    ("51", {"prompt": [1, 4096]}, "prompt[1]"),
    ("51", {"prompt": [-1]}, "prompt[0]"),
    ("52", {"prompt": ""}, "prompt"),
    ("52", {"prompt": []}, "prompt"),
    ("53", {"prompt": [5] * 3000}, "prompt"),
    ("", {"prompt": ["a"] * 2000}, "prompt"),
    ("", {"prompt": {"text": "a"}}, "prompt"),
    ("", {"prompt": ["a"] * 100, "n": 100}, "prompt"),
    ("", {"prompt": [1, 2, "a"]}, "prompt[2]"),
    ("", {"prompt": ["a", 5]}, "prompt[1]"),
    ("", {"prompt": [[1], ["a"]]}, "prompt[1][0]"),
    ("", {"suffix": "b"}, "suffix"),
    ("", {"suffix": "b", "echo": True}, "echo"),
    ("", {"suffix": "b", "prompt": [5]}, "suffix"),
    ("", {"max_tokens": 0}, "max_tokens"),
]
UNKNOWN: list[tuple[str, dict[str, Any], str]] = [
    ("chat/completions", {"foo": 1}, "foo"),
    ("chat/completions", {"tool_choice": "none", "tools": [{**TOOL, "foo": 1}]}, "tools[0].foo"),
    (
        "chat/completions",
        {"tool_choice": "none", "tools": [{"type": "function", "function": {"name": "a", "foo": 1}}]},
        "tools[0].function.foo",
    ),
    ("chat/completions", {"messages": [{"role": "user", "content": "Hi", "foo": 1}]}, "messages[0].foo"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "foo": 1}]}]},
        "messages[0].content[0].foo",
    ),
    (
        "chat/completions",
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"id": "b", "function": {"name": "a"}, "foo": 1}]},
                {"role": "user", "content": "Hi"},
            ]
        },
        "messages[0].tool_calls[0].foo",
    ),
    ("completions", {"structured_outputs": {"regex": "a", "foo": True}}, "structured_outputs.foo"),
    ("completions", {"stream": True, "stream_options": {"chunk_size": 1}}, "stream_options.chunk_size"),
    ("completions", {"tools": [TOOL]}, "tools"),
]
ACCEPTED: list[dict[str, Any]] = [
    {"store": True},
    {"metadata": {"a": "b"}},
    {"service_tier": "flex"},
    {"verbosity": "low"},
    {"modalities": ["text"]},
    {"safety_identifier": "a", "prompt_cache_key": "b", "prompt_cache_retention": "24h", "user": "c"},
    {"parallel_tool_calls": True},
    {"audio": None, "functions": None, "logit_bias": None, "foo": None},
    {"functions": [], "function_call": "auto"},
]


@pytest.mark.native
def with_prompt(path: str, body: dict[str, Any]) -> dict[str, Any]:
    plain = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hi"}
    return {**plain, "max_tokens": 2, **body}


@pytest.fixture(scope="module")
def rejecting() -> Iterator[Live]:
    with serving(ServerSettings(unknown_fields="reject")) as live:
        yield live


@pytest.mark.parametrize(("path", "body", "field"), UNKNOWN)
def test_unknown_fields_are_rejected_with_reject(rejecting: Live, path: str, body: dict[str, Any], field: str) -> None:
    found = rejecting.request(f"/v1/{path}", with_prompt(path, body))
    assert (found.status, found.error["param"], found.error["code"]) == (400, field, "unknown_parameter")


@pytest.mark.parametrize(("path", "body", "field"), UNKNOWN)
def test_unknown_fields_are_reported_in_header_with_warn(
    live: Live, path: str, body: dict[str, Any], field: str
) -> None:
    found = live.request(f"/v1/{path}", with_prompt(path, body))
    assert found.status == 200, found.body
    assert found.headers["X-Ferrule-Ignored-Fields"] == field


def test_unknown_field_names_are_percent_encoded_in_header(live: Live) -> None:
    found = live.request("/v1/completions", {"prompt": "Hi", "max_tokens": 1, "\u00e9 ,": 1, "": 2})
    assert found.status == 200, found.body
    assert found.headers["X-Ferrule-Ignored-Fields"] == '%C3%A9%20%2C, ""'


def test_unknown_field_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with serving(ServerSettings()) as live, caplog.at_level("WARNING", "ferrule.server"):
        for _ in range(2):
            live.request("/v1/completions", {"prompt": "Hi", "max_tokens": 1, "foo\r\nbar": 1})
    warned = [record for record in caplog.records if record.getMessage() == "unknown field ignored"]
    assert [record.__dict__["fields"]["field"] for record in warned] == ["foo\r\nbar"]


def test_long_unknown_field_name_is_truncated_in_error(rejecting: Live) -> None:
    found = rejecting.request("/v1/completions", {"prompt": "Hi", "a" * 1000: 5})
    assert found.error["message"].startswith(f"unknown field: {'a' * 100};")


def test_unknown_fields_are_silent_with_ignore() -> None:
    with serving(ServerSettings(unknown_fields="ignore")) as live:
        found = live.request("/v1/completions", {"prompt": "Hi", "max_tokens": 1, "foo": 1})
    assert found.status == 200
    assert "X-Ferrule-Ignored-Fields" not in found.headers


@pytest.mark.parametrize("body", ACCEPTED, ids=str)
def test_fields_without_effect_are_accepted(live: Live, body: dict[str, Any]) -> None:
    found = live.request("/v1/chat/completions", with_prompt("chat", body))
    assert found.status == 200, found.body
    assert "X-Ferrule-Ignored-Fields" not in found.headers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        *(("/v1/chat/completions", fields, param) for _, fields, param in REFUSED + CHAT_ALONE),
        *(("/v1/completions", fields, param) for _, fields, param in REFUSED + COMPLETIONS_ALONE),
    ],
)
def test_invalid_generation_request_returns_400_with_param(
    shared: Live, path: str, fields: dict[str, Any], param: str, stream: bool
) -> None:
    plain = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hi"}
    text = json.dumps({**plain, "stream": stream, **fields}).replace("\\\\ud800", "\\ud800")
    found = shared.request(path, text.encode())
    assert found.status == 400, found.body
    assert found.error["param"] == param, found.error
    too_long = found.error["code"] == "context_length_exceeded"
    assert found.error["type"] == ("exceed_context_size_error" if too_long else "invalid_request_error")
    assert len(found.error["message"]) < 1000


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"prompt": [5, "a"]}, "prompt[1] must be an integer, got 'a'"),
        (
            {"prompt": [5] * (MAX_TOKEN_IDS + 1)},
            f"prompt must be a list of at most {MAX_TOKEN_IDS} items, got a list of {MAX_TOKEN_IDS + 1} items",
        ),
        ({"stop": [None]}, "stop[0] must be a string, got None"),
        ({"\ud811": 1}, "request body must be Unicode text without lone surrogates, got '\\ud811'"),
        ({"prediction": 5}, "prediction must be an object, got 5"),
    ],
)
def test_error_message_describes_the_form_of_prompt_sent(live: Live, fields: dict[str, Any], expected: str) -> None:
    assert expected in live.complete(**fields).error["message"]


@pytest.mark.native
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ["a", 5]}, "input[1]"),
        ("/v1/embeddings", {"input": [4096]}, "input[0]"),
        ("/v1/embeddings", {"input": "word " * 3000}, "input"),
        ("/v1/rerank", {"query": "", "documents": ["b"]}, "query"),
        ("/tokenize", {"messages": [{"role": "user", "content": "\\ud800"}]}, "messages"),
        ("/detokenize", {"tokens": [1, 4096]}, "tokens[1]"),
        ("/tokenize", {"prompt": "a", "messages": []}, "messages"),
    ],
)
def test_invalid_request_to_other_routes_returns_400_with_param(
    shared: Live, path: str, body: dict[str, Any], param: str
) -> None:
    found = shared.request(path, json.dumps(body).replace("\\\\ud800", "\\ud800").encode())
    assert (found.status, found.error["param"]) == (400, param), found.error


def test_neutral_values_are_accepted(live: Live, engine: type[fakes.Engine]) -> None:
    fields: dict[str, Any] = {
        "best_of": 1,
        "store": False,
        "service_tier": "auto",
        "prompt_cache_key": "a",
        "user": "b",
    }
    assert live.chat(**fields).status == live.complete(**fields, max_tokens=2).status == 200
    assert live.chat(service_tier="default").status == 200


def test_response_message_is_accepted_as_input(live: Live, engine: type[fakes.Engine]) -> None:
    """With the fields that other servers and clients write where they say nothing, and calls as streams have them."""
    call = {"index": 0, "id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    nothing = {"refusal": None, "audio": None, "function_call": None, "annotations": []}
    answer = {"role": "assistant", "content": "Yes.", "tool_calls": None, "reasoning_content": None, **nothing}
    called = {"role": "assistant", "content": None, "tool_calls": [call], **nothing}
    plain = {"role": "assistant", "content": "", "tool_calls": [{k: call[k] for k in ("id", "type", "function")}]}
    question = {"role": "user", "content": "Hi"}
    returned = {"role": "tool", "tool_call_id": "a", "name": "weather", "content": "Rain."}

    def prompt(*messages: dict[str, Any], **fields: Any) -> list[int]:
        return live.request("/tokenize", {"messages": messages, **fields}).json["tokens"]

    assert prompt(question, answer, question) == prompt(question, {"role": "assistant", "content": "Yes."}, question)
    assert prompt(question, called, returned) == prompt(question, plain, returned)
    strict = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}, "strict": True}}
    assert prompt(question, tools=[strict]) == prompt(question, tools=[TOOL])


NO_JSON: list[bytes] = [b"{:", b"", b"[" * 100_000, b'{"messages":' + b"[" * 100_000, b"null", b"[]", b'"a"', b"\xff"]


@pytest.mark.parametrize("body", [*NO_JSON, b'{"prompt": 1' + b"0" * 100_000 + b"}"], ids=lambda body: str(body[:15]))
def test_malformed_json_returns_400(live: Live, body: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/v1/embeddings"):
        found = live.request(path, body)
        assert found.status == 400
        assert found.error["message"]
    assert live.request("/v1/completions", b"{}", headers={"Content-Type": "text/plain"}).status == 400


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"{:", "property name"),
        (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"prompt": 1' + b"0" * 5000 + b"}", "a number has more than 4300 digits"),
        (b'{"prompt": "\xff"}', "byte 12 is 0xff"),
    ],
    ids=["syntax", "depth", "digits", "encoding"],
)
def test_json_error_message_describes_cause(live: Live, body: bytes, expected: str) -> None:
    found = live.request("/v1/completions", body)
    assert (found.status, found.error["code"]) == (400, "invalid_json")
    assert expected in found.error["message"]


@pytest.mark.parametrize("depth", [100, 300, 500, 700, 800, 850, 900, 950, 980, 990])
def test_deeply_nested_json_is_handled(live: Live, depth: int) -> None:
    nested = "[" * depth + "]" * depth
    message = f'{{"role": "user", "content": "Hi", "x": {nested}}}'
    tool = f'{{"type": "function", "function": {{"name": "a", "parameters": {{"a": {nested}}}}}}}'
    for body in (
        f'"messages": {nested}',
        f'"messages": [{message}]',
        f'"messages": [], "temperature": {nested}',
        f'"messages": [], "chat_template_kwargs": {{"a": {nested}}}',
        f'"messages": [{{"role": "user", "content": "Hi"}}], "tools": [{tool}], "tool_choice": "required"',
        f'"messages": [], "response_format": {{"type": "json_schema", "json_schema": {{"schema": {nested}}}}}',
    ):
        found = live.request("/v1/chat/completions", f'{{{body}, "max_tokens": 1}}'.encode())
        assert found.status in (200, 400), body[:200]


def test_prompt_over_max_model_len_is_rejected(engine: type[fakes.Engine]) -> None:
    with serving(llm=lambda: AsyncLLM(max_num_seqs=1, max_queued_requests=1)) as live:
        found = live.complete([5] * 2048, max_tokens=1)
        assert (found.status, found.error["param"]) == (400, "prompt")
        assert "2048 tokens" in found.error["message"]


def test_unknown_model_returns_404(live: Live) -> None:
    bodies = {
        "/v1/chat/completions": {"messages": []},
        "/v1/completions": {"prompt": "a"},
        "/tokenize": {"prompt": "a"},
    }
    bodies |= {"/v1/embeddings": {"input": "a"}, "/v1/rerank": {"query": "a", "documents": ["b"]}}
    for path, body in bodies.items():
        found = live.request(path, {**body, "model": "none"})
        assert (found.status, found.error["code"], found.error["param"]) == (404, "model_not_found", "model")


def set_output(engine: type[fakes.Engine], live: Live, text: str) -> None:
    """Sets the output of the fake engine."""
    tokens = [*live.llm.tokenize(text, add_special_tokens=False), 2]
    live.llm._driver._engine.__class__.script = staticmethod(lambda _prompt: tokens)  # type: ignore[attr-defined]


def deltas(answer: Answer) -> Iterator[dict[str, Any]]:
    for event in events(answer.body):
        yield from event["choices"]


def test_multi_token_character_is_not_split_in_stream(live: Live, engine: type[fakes.Engine]) -> None:
    text = "Grüße 👩‍👩‍👧‍👦 漢字 🎉"
    engine.step_seconds = 0.02
    set_output(engine, live, text)
    texts = [choice["delta"].get("content", "") for choice in deltas(live.chat(stream=True))]
    assert "".join(texts) == text
    assert "\ufffd" not in "".join(texts)
    assert len(texts) > 1  # how many, the reader's pace says


def test_logprobs_have_bytes_of_partial_characters(live: Live, engine: type[fakes.Engine]) -> None:
    text = "漢🎉"
    set_output(engine, live, text)
    tokens = live.chat(logprobs=True).json["choices"][0]["logprobs"]["content"]
    assert any("\ufffd" in token["token"] for token in tokens)
    assert b"".join(bytes(token["bytes"]) for token in tokens[:-1]).decode() == text


@pytest.fixture
def parsing(engine: type[fakes.Engine]) -> Iterator[Live]:
    with serving(ServerSettings(tool_call_parser="hermes", reasoning_parser="qwen3")) as live:
        yield live


CALLS = '<tool_call>{"name": "weather", "arguments": {"a": 1}}</tool_call>\n' * 2


@pytest.mark.parametrize("parallel", [None, True, False])
def test_tool_calls_and_reasoning_are_separated(
    parsing: Live, engine: type[fakes.Engine], parallel: bool | None
) -> None:
    set_output(engine, parsing, f"<think>Hm.</think>Let us see. {CALLS}")
    request: dict[str, Any] = {"tools": [TOOL, OTHER], "parallel_tool_calls": parallel, "seed": 1}
    (choice,) = parsing.chat(**request).json["choices"]
    message = choice["message"]
    assert message["reasoning_content"] == "Hm."
    assert message["content"].strip() == "Let us see."
    assert choice["finish_reason"] == "tool_calls"
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "weather", "arguments": '{"a": 1}'} for _ in range(1 if parallel is False else 2)
    ]
    for n in (1, 2):
        found: dict[int, dict[str, Any]] = {}
        for delta in deltas(parsing.chat(**request, stream=True, n=n)):
            into = found.setdefault(delta["index"], {"content": "", "reasoning_content": "", "calls": {}})
            for part in ("content", "reasoning_content"):
                into[part] += delta["delta"].get(part) or ""
            for call in delta["delta"].get("tool_calls", ()):
                known = into["calls"].setdefault(call["index"], {"id": call.get("id"), "arguments": ""})
                known["arguments"] += call["function"]["arguments"]
            into["end"] = delta["finish_reason"]
        assert len(found) == n
        for into in found.values():
            assert into["reasoning_content"] == "Hm."
            assert into["content"] == message["content"]
            assert into["end"] == "tool_calls"
            assert [call["arguments"] for call in into["calls"].values()] == ['{"a": 1}'] * len(message["tool_calls"])
            assert all(call["id"] for call in into["calls"].values())


def test_tools_without_parser_are_rejected(engine: type[fakes.Engine]) -> None:
    """A template that reads tools, but has no known format of calls."""
    with serving(ServerSettings(chat_template="{{ tools }}{{ messages[0].content }}")) as live:
        error = live.chat(tools=[TOOL]).error
        assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")
        assert live.chat(tools=[TOOL], tool_choice="none").json["choices"][0]["message"].get("tool_calls") is None


def test_template_that_reads_no_tools_gets_their_description(engine: type[fakes.Engine]) -> None:
    with serving(ServerSettings()) as live:
        set_output(engine, live, CALLS)
        (choice,) = live.chat(tools=[TOOL]).json["choices"]
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"] * 2
        asked = {"messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL]}
        prompt = live.llm.detokenize(live.request("/tokenize", asked).json["tokens"])
        assert "<tools>" in prompt
        assert '"name": "weather"' in prompt


def test_without_tools_calls_stay_content(parsing: Live, engine: type[fakes.Engine]) -> None:
    set_output(engine, parsing, CALLS)
    for body in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        (choice,) = parsing.chat(**body).json["choices"]
        assert choice["message"]["content"] == CALLS
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_usage_in_stream(live: Live, engine: type[fakes.Engine], path: str, n: int) -> None:
    set_output(engine, live, "Let us see what this is.")

    def chunks(**options: Any) -> list[dict[str, Any]]:
        ask = live.chat if "chat" in path else live.complete
        return list(events(ask(n=n, stream=True, **({"stream_options": options} if options else {})).body))

    assert all("usage" not in chunk for chunk in chunks())
    *before, last = chunks(include_usage=True)
    assert all(chunk["usage"] is None for chunk in before)
    assert last["choices"] == []
    *before, end = chunks(continuous_usage_stats=True, include_usage=True)
    assert end["usage"] == last["usage"] == before[-1]["usage"]
    written = [chunk["usage"]["completion_tokens"] for chunk in before]
    assert written == sorted(written)
    assert all(chunk["usage"]["prompt_tokens"] == last["usage"]["prompt_tokens"] for chunk in before)


def test_required_tool_choice_constrains_output_to_tools(live: Live, engine: type[fakes.Engine]) -> None:
    """The fake ignores grammars: the test checks the grammar it received, and that a truncated call is not content."""
    parameters = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    set_output(engine, live, '[{"name":"weather","arguments":{"a":1}},{"na')
    request: dict[str, Any] = {"tools": [tool, OTHER], "tool_choice": "required"}
    (choice,) = live.chat(**request).json["choices"]
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"a":1}'}


@pytest.mark.native
def test_defs_of_tool_schema_are_resolved(shared: Live) -> None:
    parameters = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/A"}},
        "required": ["a"],
        "additionalProperties": False,
        "$defs": {"A": {"enum": [7]}},
    }
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("b", "c")]
    found = shared.chat(tools=tools, tool_choice="required", parallel_tool_calls=False, max_tokens=200)
    (call,) = found.json["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 7}


@pytest.mark.native
def test_tokenize_and_detokenize(shared: Live) -> None:
    found = shared.request("/tokenize", {"prompt": "The capital", "return_token_strs": True}).json
    assert found["token_strs"] == ["The", " capital"]
    assert (found["count"], found["max_model_len"]) == (2, 2048)
    assert shared.request("/detokenize", {"tokens": found["tokens"]}).json == {
        "prompt": "The capital",
        "content": "The capital",
    }
    chat = shared.request("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]}).json["tokens"]
    assert shared.chat(max_tokens=1, return_token_ids=True).json["prompt_token_ids"] == chat
    for body in ({}, {"prompt": "a", "messages": []}, {"messages": [], "add_special_tokens": True}):
        assert shared.request("/tokenize", body).status == 400
    assert shared.request("/detokenize", {"tokens": [4096]}).status == 400


@pytest.mark.native
def test_an_empty_text_is_embedded_with_its_batch(shared: Live) -> None:
    found = shared.request("/v1/embeddings", {"input": ["capital", ""]}).json
    assert [len(each["embedding"]) for each in found["data"]] == [256, 256]
    assert not any(found["data"][1]["embedding"])
    assert found["usage"] == shared.request("/v1/embeddings", {"input": "capital"}).json["usage"]
    documents = ["Paris is the capital of France.", ""]
    ranked = shared.request("/v1/rerank", {"query": "capital", "documents": documents}).json["results"]
    assert {each["index"]: each["relevance_score"] for each in ranked}[1] == 0.5


@pytest.mark.native
def test_rerank(shared: Live) -> None:
    documents = ["Paris is the capital of France.", "Dogs bark.", "France has a capital."]
    cut = shared.request("/v1/rerank", {"query": "capital", "documents": documents, "top_n": 2}).json
    found = cut["results"]
    assert len(found) == 2
    # What ranks by the cosine reads each text as an embedding is made of it.
    embedded = shared.request("/v1/embeddings", {"input": ["capital", *documents]}).json["usage"]
    assert cut["usage"] == embedded
    assert embedded["total_tokens"] == embedded["prompt_tokens"] > len(documents)
    assert found[0]["relevance_score"] >= found[1]["relevance_score"]
    assert all(each["document"]["text"] == documents[each["index"]] for each in found)
    found = shared.request("/v1/rerank", {"query": "capital", "documents": documents, "return_documents": False}).json
    assert "document" not in found["results"][0]
    for path in ("/rerank", "/v2/rerank"):
        found = shared.request(path, {"query": "capital", "documents": [{"text": each} for each in documents]}).json
        assert sorted(each["index"] for each in found["results"]) == [0, 1, 2]
    ignored = shared.request("/rerank", {"query": "a", "documents": [{"text": "b", "foo": 1}]})
    assert ignored.headers["X-Ferrule-Ignored-Fields"] == "documents[0].foo"
