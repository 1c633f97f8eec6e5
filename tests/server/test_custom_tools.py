"""Custom tools in chat completions: calls with text as input, whole and streamed, and grammars of the input."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest

from server.live import Live, events, serving
from server.scripted_server import PARAMETERS, ScriptedServer

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
PATCH_INPUT = '*** Begin Patch\n"é"\n'
LARK = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "*** Begin Patch"'}}
PATCH = {"type": "custom", "custom": {"name": "patch", "description": "Edits files.", "format": LARK}}
DATE = r"[12]\d{3}-\d\d"
REGEX = {"type": "grammar", "grammar": {"syntax": "regex", "definition": DATE}}
PICK_DATE = {"type": "custom", "custom": {"name": "pick_date", "format": REGEX}}


def tool_call(name: str, arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}</tool_call>"


def test_calls_have_text_as_input_and_can_be_sent_back(scripted: ScriptedServer) -> None:
    scripted.set_output("Done. " + tool_call("patch", {"input": PATCH_INPUT}))
    asked: dict[str, Any] = {"model": "tiny", "tools": [WEATHER, PATCH], "max_tokens": 500}
    messages: list[Any] = [{"role": "user", "content": "?"}]
    with openai.OpenAI(base_url=f"{scripted.live.url}/v1", api_key="none", max_retries=0) as client:
        choice = client.chat.completions.create(messages=messages, **asked).choices[0]
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls or []
        assert call.type == "custom"
        assert (call.custom.name, call.custom.input) == ("patch", PATCH_INPUT)
        result = {"role": "tool", "tool_call_id": call.id, "content": "Patched."}
        again: list[Any] = [*messages, choice.message.model_dump(exclude_none=True), result]
        answer = client.chat.completions.with_raw_response.create(messages=again, **asked)
    assert "X-Ferrule-Ignored-Fields" not in answer.headers
    prompt = scripted.prompts[-1]
    assert '"name": "patch", "arguments": {"input": "*** Begin Patch' in prompt
    assert "Edits files." in prompt
    assert "must match this lark grammar" in prompt


def test_streams_have_the_input_of_each_call(scripted: ScriptedServer) -> None:
    scripted.set_output(
        tool_call("patch", {"input": PATCH_INPUT})
        + tool_call("weather", {"city": "Rome"})
        + tool_call("patch", {"input": "b"})
    )
    answer = scripted.live.chat(tools=[WEATHER, PATCH], max_tokens=500, stream=True)
    names: dict[int, str] = {}
    inputs: dict[int, str] = {}
    for event in events(answer.body):
        for call in event["choices"][0]["delta"].get("tool_calls", []):
            kind = call.get("custom") or call["function"]
            if "id" in call:
                names[call["index"]] = f"{call['type']} {kind['name']}"
            text = kind["input"] if "custom" in call else kind["arguments"]
            inputs[call["index"]] = inputs.get(call["index"], "") + text
    assert names == {0: "custom patch", 1: "function weather", 2: "custom patch"}
    assert (inputs[0], json.loads(inputs[1]), inputs[2]) == (PATCH_INPUT, {"city": "Rome"}, "b")


def test_input_that_is_cut_off_is_streamed_as_it_is(scripted: ScriptedServer) -> None:
    scripted.set_output(tool_call("patch", {"input": PATCH_INPUT * 9}))
    answer = scripted.live.chat(tools=[PATCH], max_tokens=60, stream=True)
    chunks = [event["choices"][0] for event in events(answer.body)]
    calls = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", [])]
    assert chunks[-1]["finish_reason"] == "length"
    assert "Begin Patch" in "".join(call["custom"]["input"] for call in calls)


@pytest.mark.native
@pytest.mark.parametrize("choice", ["required", {"type": "custom", "custom": {"name": "pick_date"}}])
def test_forced_call_matches_its_regular_expression(choice: object) -> None:
    with serving() as live:
        answer = live.chat(tools=[PICK_DATE], tool_choice=choice, parallel_tool_calls=False, max_tokens=120)
        (call,) = answer.json["choices"][0]["message"]["tool_calls"]
    assert call["type"] == "custom"
    assert re.fullmatch(DATE, call["custom"]["input"])


@pytest.mark.parametrize(
    ("tool", "field"),
    [
        ({"type": "custom"}, "tools[0].custom"),
        ({"type": "custom", "custom": {"name": ""}}, "tools[0].custom.name"),
        ({"type": "custom", "custom": {"name": "a", "format": {"type": "xml"}}}, "tools[0].custom.format"),
        (
            {"type": "custom", "custom": {"name": "a", "format": {"type": "grammar", "grammar": {"syntax": "peg"}}}},
            "tools[0].custom.format.grammar.syntax",
        ),
    ],
)
def test_invalid_tools_are_refused_by_name(live: Live, tool: object, field: str) -> None:
    answer = live.chat(tools=[tool])
    assert (answer.status, answer.error["param"]) == (400, field)


@pytest.mark.native
def test_invalid_regular_expression_is_refused() -> None:
    form = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "(a"}}
    with serving() as live:
        answer = live.chat(tools=[{"type": "custom", "custom": {"name": "a", "format": form}}], tool_choice="required")
    assert (answer.status, answer.error["param"]) == (400, "tools")
