"""OpenAI's Responses on a fake engine: reasoning, tool calls, multi-turn input, errors, and unsupported fields."""

from __future__ import annotations

import json
from typing import Any

import openai

from ferrule.server.responses.items import conversation
from ferrule.server.responses.protocol import LOGPROBS, ResponsesRequest
from server.live import Live
from server.response_streams import check_stream, without_times
from server.scripted_server import CITY, PARAMETERS, SAID, THOUGHT, ScriptedServer, named_events

WEATHER = {"type": "function", "name": "weather", "parameters": PARAMETERS}


def ask(scripted: ScriptedServer, **fields: Any) -> Any:
    return scripted.live.request("/v1/responses", {"input": "?", "tools": [WEATHER], **fields})


def test_reasoning_text_and_tool_calls_are_output_items(scripted: ScriptedServer) -> None:
    body = ask(scripted, max_output_tokens=500).json
    thought, answer, *calls = body["output"]
    assert (thought["type"], thought["summary"]) == ("reasoning", [])
    assert thought["content"] == [{"type": "reasoning_text", "text": THOUGHT}]
    assert (answer["type"], answer["role"], answer["content"][0]["text"]) == ("message", "assistant", SAID)
    assert [json.loads(call["arguments"]) for call in calls] == [{"city": CITY}, {"city": "Rome"}]
    assert len({call["call_id"] for call in calls}) == 2
    assert {each["status"] for each in body["output"]} == {"completed"}
    reasoning = body["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert 0 < reasoning < body["usage"]["output_tokens"]
    stream = check_stream(named_events(ask(scripted, max_output_tokens=500, stream=True).body))
    assert without_times(stream) == without_times(body)
    one = ask(scripted, max_output_tokens=500, parallel_tool_calls=False).json["output"]
    assert [each["type"] for each in one] == ["reasoning", "message", "function_call"]


def test_response_output_is_accepted_as_input(scripted: ScriptedServer) -> None:
    output = ask(scripted, max_output_tokens=500).json["output"]
    results = [
        {"type": "function_call_output", "call_id": each["call_id"], "output": "Sunny."}
        for each in output
        if each["type"] == "function_call"
    ]
    question = {"role": "user", "content": "?"}
    assert ask(scripted, input=[question, *output, *results], max_output_tokens=500).status == 200
    assert SAID in scripted.prompts[-1]
    assert scripted.prompts[-1].count("Sunny.") == 2


def test_input_items_convert_to_chat_messages() -> None:
    items: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": "b"},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "1", "output": "c"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "d"}]},
        {"type": "function_call", "call_id": "3", "name": "f", "arguments": "{}"},
        {"role": "assistant", "content": "e"},
        {"role": "assistant", "content": "f"},
        {"type": "reasoning", "summary": []},
        {"role": "user", "content": "g"},
    ]
    request = ResponsesRequest.model_validate({"input": items, "instructions": "h"})

    def call(name: str, number: str, arguments: str = "{}") -> dict[str, Any]:
        return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}

    assert conversation(request).messages == [
        {"role": "system", "content": "h"},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "assistant",
            "content": "b",
            "reasoning_content": "Hm.",
            "tool_calls": [call("f", "1"), call("g", "2", '{"x": 1}')],
        },
        {"role": "tool", "tool_call_id": "1", "content": "c"},
        {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "d"}]},
        {"role": "assistant", "content": "", "tool_calls": [call("f", "3")]},
        {"role": "assistant", "content": "e"},
        {"role": "assistant", "content": "f"},
        {"role": "assistant", "content": "", "reasoning_content": ""},
        {"role": "user", "content": "g"},
    ]


def test_failed_stream_ends_with_response_failed(scripted: ScriptedServer) -> None:
    scripted.engine.step_seconds = 0.02
    scripted.engine.error_at = 6
    events = named_events(ask(scripted, stream=True, max_output_tokens=500).body)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    response = events[-1]["response"]
    assert (events[-1]["type"], response["status"]) == ("response.failed", "failed")
    assert response["error"]["message"]
    assert response["id"] == events[0]["response"]["id"]


def test_failure_before_first_token_returns_422(scripted: ScriptedServer) -> None:
    scripted.engine.error_at = 1
    answer = ask(scripted, stream=True)
    assert answer.status == 422
    assert answer.error["code"] == "request_failed"


def test_logprobs_with_reasoning_are_rejected(scripted: ScriptedServer) -> None:
    answer = scripted.live.request("/v1/responses", {"input": "Hi", "include": [LOGPROBS]})
    assert (answer.status, answer.error["param"]) == (400, "include")


def test_lone_surrogate_in_metadata_round_trips(live: Live) -> None:
    body = b'{"input": "Hi", "metadata": {"a": "\\ud800"}, "max_output_tokens": 1}'
    assert live.request("/v1/responses", body).json["metadata"] == {"a": "\ud800"}
    assert live.request("/v1/responses", b'{"input": "\\ud800"}').status == 400
    streamed = named_events(live.request("/v1/responses", body[:-1] + b', "stream": true}').body)
    assert streamed[-1]["response"]["metadata"] == {"a": "\ud800"}


def test_reasoning_effort_is_passed_to_chat_template() -> None:
    request = ResponsesRequest.model_validate({"input": "x", "reasoning": {"effort": "low"}})
    assert conversation(request).template_arguments == {"reasoning_effort": "low"}


def test_input_tokens_are_those_of_the_answer(live: Live) -> None:
    asked = {"input": "Hi", "instructions": "Be brief.", "max_output_tokens": 3}
    expected = live.request("/v1/responses", asked).json["usage"]["input_tokens"]
    for path in ("/v1/responses/input_tokens", "/responses/input_tokens"):
        found = live.request(path, asked).json
        assert found == {"object": "response.input_tokens", "input_tokens": expected}
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        assert client.responses.input_tokens.count(input="Hi", instructions="Be brief.").input_tokens == expected
    answer = live.request("/v1/responses/input_tokens", {"input": "Hi", "previous_response_id": "resp_1"})
    assert (answer.status, answer.error["param"]) == (400, "previous_response_id")


def test_draining_server_returns_503(live: Live) -> None:
    live.server.models.draining = True
    answer = live.request("/v1/responses", {"input": "Hi"})
    assert (answer.status, answer.error["code"]) == (503, "draining")


PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'},
}
PATCH_INPUT = '*** Begin Patch\n"é"\n'


def test_calls_of_custom_tools_have_text_as_input(scripted: ScriptedServer) -> None:
    call = {"name": "apply_patch", "arguments": {"input": PATCH_INPUT}}
    scripted.set_output(f"Done. <tool_call>{json.dumps(call, ensure_ascii=False)}</tool_call>")
    with openai.OpenAI(base_url=f"{scripted.live.url}/v1", api_key="none", max_retries=0) as client:
        asked: Any = {"model": "tiny", "input": "?", "tools": [WEATHER, PATCH], "max_output_tokens": 500}
        whole = client.responses.create(**asked)
        call_item = whole.output[-1]
        assert call_item.type == "custom_tool_call"
        assert (call_item.name, call_item.input) == ("apply_patch", PATCH_INPUT)
        with client.responses.stream(**asked) as stream:
            events = list(stream)
            final = stream.get_final_response().output[-1]
        deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
        (done,) = [event for event in events if event.type == "response.custom_tool_call_input.done"]
        assert "".join(deltas) == done.input == PATCH_INPUT
        assert final.type == "custom_tool_call"
        assert final.id == done.item_id
        result = {"type": "custom_tool_call_output", "call_id": call_item.call_id, "output": "Patched."}
        items: list[Any] = [{"role": "user", "content": "?"}, *whole.output, result]
        again: Any = {**asked, "input": items}
        answer = client.responses.with_raw_response.create(**again)
        assert "X-Ferrule-Ignored-Fields" not in answer.headers
    assert "Patched." in scripted.prompts[-1]


def test_custom_tools_are_functions_for_the_template() -> None:
    call = {"type": "custom_tool_call", "call_id": "1", "name": "apply_patch", "input": PATCH_INPUT}
    body = {"input": [call], "tools": [PATCH], "tool_choice": {"type": "custom", "name": "apply_patch"}}
    found = conversation(ResponsesRequest.model_validate(body))
    (function,) = [tool["function"] for tool in found.tools]
    assert function["name"] == "apply_patch"
    assert function["description"].startswith("Edits files.")
    assert 'start: "*** Begin Patch"' in function["description"]
    assert function["parameters"]["required"] == ["input"]
    assert found.tool_choice == "function:apply_patch"
    (sent,) = found.messages[0]["tool_calls"]
    assert json.loads(sent["function"]["arguments"]) == {"input": PATCH_INPUT}


def test_reasoning_comes_back_where_clients_keep_only_its_encrypted_form(scripted: ScriptedServer) -> None:
    asked: dict[str, Any] = {"max_output_tokens": 500, "include": ["reasoning.encrypted_content"], "store": False}
    thought, *_ = ask(scripted, **asked).json["output"]
    item = {"type": "reasoning", "summary": [], "encrypted_content": thought["encrypted_content"]}
    read = conversation(ResponsesRequest.model_validate({"input": [item]}))
    assert read.messages[0]["reasoning_content"] == thought["content"][0]["text"] == THOUGHT
    done = [each for each in named_events(ask(scripted, **asked, stream=True).body) if "item" in each]
    carried = [each["item"].get("encrypted_content") for each in done if each["item"]["type"] == "reasoning"]
    assert carried == [None, thought["encrypted_content"]]
    assert "encrypted_content" not in ask(scripted, max_output_tokens=500).json["output"][0]


def test_fields_of_coding_agents_are_accepted(scripted: ScriptedServer) -> None:
    answer = ask(
        scripted,
        reasoning={"effort": "medium", "summary": "auto"},
        text={"verbosity": "low"},
        context_management=[{"type": "compaction", "compact_threshold": 100_000}],
        include=["reasoning.encrypted_content", "web_search_call.action.sources"],
        max_tool_calls=None,
        parallel_tool_calls=True,
        prompt_cache_key="a",
        store=False,
    )
    assert answer.status == 200, answer.body
    assert "X-Ferrule-Ignored-Fields" not in answer.headers
    body = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    answer = scripted.live.request("/v1/messages", {**body, "context_management": edits})
    assert answer.status == 200, answer.body


def test_timings_are_reported_where_asked(live: Live) -> None:
    asked = {"input": "Hi", "max_output_tokens": 3}
    body = live.request("/v1/responses", asked | {"timings_per_token": True}).json
    found = body["timings"]
    assert found["prompt_n"] + found["cache_n"] == body["usage"]["input_tokens"]
    assert found["predicted_n"] == body["usage"]["output_tokens"]
    stream = named_events(live.request("/v1/responses", asked | {"timings_per_token": True, "stream": True}).body)
    check_stream(stream)
    counts = [each["timings"]["predicted_n"] for each in stream if each["type"] == "response.output_text.delta"]
    assert counts == sorted(counts)
    assert counts[-1] == stream[-1]["timings"]["predicted_n"] == found["predicted_n"]
    plain = live.request("/v1/responses", asked | {"stream": True}).body + live.request("/v1/responses", asked).body
    assert b"timings" not in plain
