"""Tools for chat templates that do not read them: the system message describes them in the format of Hermes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fakes
from conftest import TINY
from ferrule import LLM, ChatTemplateError, SamplingParams, model_info
from ferrule._text.chat import describe_tools, reads_tools

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
USER: dict[str, Any] = {"role": "user", "content": "Hi"}
CALL = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln"}}}
CALLED = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for t in tools %}{{ t }}{% endfor %}", True),
        ("{% if custom is defined %}{% set tools = custom %}{% endif %}{{ tools | tojson }}", True),
        ("{% macro f() %}{{ tools | length }}{% endmacro %}{{ f() }}", True),
        ("{{ messages[0].tools }}{# tools #}{{ 'tools' }}{{ xml_tools }}", False),
        (PLAIN, False),
        ("{% if %}", True),
        ("{{" + "(" * 30_000, True),
        ("{{ x }}" * 20_000, True),
    ],
)
def test_reads_tools(template: str, expected: bool) -> None:
    assert reads_tools(template) is expected


def test_system_message_describes_tools() -> None:
    system = {"role": "system", "content": "Be brief."}
    alone = describe_tools(PLAIN, [USER], [TOOL], {})
    assert [message["role"] for message in alone] == ["system", "user"]
    description = alone[0]["content"]
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in description
    assert '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' in description
    content = f"Be brief.\n\n{description}"
    assert describe_tools(PLAIN, [system, USER], [TOOL], {}) == [{"role": "system", "content": content}, USER]
    parts = {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}
    assert describe_tools(PLAIN, [parts, USER], [TOOL], {})[0] == {"role": "developer", "content": content}
    assert describe_tools(NO_SYSTEM, [USER], [TOOL], {}) == [{"role": "user", "content": f"{description}\n\nHi"}]


def test_calls_and_results_become_text() -> None:
    results = [{"role": "tool", "tool_call_id": "a", "content": text} for text in ("Rain.", "Sun.")]
    asked = [USER, {"role": "assistant", "content": "Sure.", "tool_calls": [CALL, CALL]}, *results, USER]
    responses = "<tool_response>\nRain.\n</tool_response>\n<tool_response>\nSun.\n</tool_response>"
    assert describe_tools(PLAIN, asked, [TOOL], {})[2:] == [
        {"role": "assistant", "content": f"Sure.\n{CALLED}\n{CALLED}"},
        {"role": "user", "content": responses},
        USER,
    ]


def get_weather(city: str) -> str:
    """The weather.

    Args:
        city: A city.
    """
    return city


def test_chat_without_tools_in_the_template(llm: LLM, fake_engine: type[fakes.Engine]) -> None:
    """The model sees the tools, and its calls are parsed."""
    prompts: list[str] = []

    def script(prompt: list[int]) -> list[int]:
        prompts.append(llm.detokenize(prompt))
        return llm.tokenize(CALLED, add_special_tokens=False)

    fake_engine.script = staticmethod(script)  # type: ignore[assignment]
    for tools in ([TOOL], [get_weather]):
        (output,) = llm.chat([USER], SamplingParams(max_tokens=99), tools=tools, tool_call_parser="auto")
        message = output.outputs[0].message
        assert message is not None
        assert [(call.name, call.arguments) for call in message.tool_calls] == [("get_weather", '{"city": "Köln"}')]
        assert "# Tools" in prompts[-1]
        assert '"name": "get_weather"' in prompts[-1]
    without = llm.apply_chat_template([USER])
    assert llm.apply_chat_template([USER], tools=[]) == llm.apply_chat_template([USER], tools=None) == without
    shown = llm.apply_chat_template([USER], tools=[TOOL], chat_template="{{ tools[0].function.name }}")
    assert shown == "get_weather"
    assert llm.info()["tool_call_parser"] == model_info()["tool_call_parser"] == "hermes"
    for invalid in ("x", [5], {"a": 1}):
        with pytest.raises(ChatTemplateError, match="tools"):
            llm.chat([USER], tools=invalid)  # type: ignore[arg-type]


def test_template_for_tools_is_the_one_that_counts(
    model_with: Callable[..., Path], fake_engine: type[fakes.Engine]
) -> None:
    templates = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": "{{ tools }}[TOOL_CALLS]"}]
    directory = model_with(tokenizer_config=json.dumps({"chat_template": templates}))
    (directory / "tokenizer.json").write_text((TINY / "tokenizer.json").read_text())
    assert model_info(directory)["tool_call_parser"] == "mistral"
    with LLM(directory) as llm:
        for template, parser in ((None, "mistral"), ("default", "hermes"), ("tool_use", "mistral")):
            found = llm.message_format("auto", tools=[TOOL], chat_template=template)
            assert found is not None
            assert found.tool_call_parser == parser
