"""Gemma: code blocks up to Gemma 3, a custom notation from FunctionGemma on."""

from __future__ import annotations

import json

import pytest

from ferrule._text.parsers import MessageFormat
from parsers.read import WEATHER, emitted, read

GEMMA3 = MessageFormat("gemma3")
GEMMA4 = MessageFormat("gemma4", "gemma4")
FUNCTIONGEMMA = MessageFormat("functiongemma")

Parsed = list[tuple[str, object]]


def parsed(form: MessageFormat, text: str) -> tuple[str | None, Parsed]:
    """Returns content and calls, with parsed arguments."""
    content, _, calls = read(form, text)
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("```tool_code\nf(a=1)\n```", None, [("f", {"a": 1})]),
        ("Well:\n```tool_code\nf(a='```')\n```\nSo.", "Well:\nSo.", [("f", {"a": "```"})]),
        ("```tool_code\nprint(f(a=1))\nprint( g() )\nh()\n```", None, [("f", {"a": 1}), ("g", {}), ("h", {})]),
        ("```tool_code\n[f(), g()]\n```", None, [("f", {}), ("g", {})]),
        ('```json\n{"name": "f", "parameters": {"a": 1}}\n```', None, [("f", {"a": 1})]),
        ('```json\n[{"name": "f", "parameters": {}}]\n```', None, [("f", {})]),
        ('{"name": "f", "parameters": {}}', None, [("f", {})]),
        ('[{"name": "f", "parameters": {}}]', None, [("f", {})]),
        ("[f(a=1)]", None, [("f", {"a": 1})]),
        ("```tool_code\nf()\nx = 1\n```", "x = 1\n```", [("f", {})]),
        ("```tool_code\nf()", None, [("f", {})]),
    ],
)
def test_gemma3_calls(text: str, content: str | None, calls: Parsed) -> None:
    assert parsed(GEMMA3, text) == (content, calls)


@pytest.mark.parametrize(
    "text",
    [
        "```python\nf()\n```",
        '```json\n{"a": 1}\n```',
        "```json\n[f()]\n```",
        "```tool_code\nx = f()\n```",
        '```tool_code\n{"name": "f", "parameters": {}}\n```',
        "```tool_code",
        "```tool_code\nprint(",
        "f()",
        "``` [f()]",
    ],
)
def test_gemma3_other_text_is_content(text: str) -> None:
    assert read(GEMMA3, text) == (text, None, [])


def test_gemma3_only_declared_tools_are_called() -> None:
    form = MessageFormat("gemma3", tools=WEATHER)
    text = "```tool_code\nprint(1)\n```"
    assert read(form, text) == (text, None, [])
    assert parsed(form, "```tool_code\nprint(get_weather(city=1))\n```") == (None, [("get_weather", {"city": "1"})])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Hello <b>.", "Hello <b>.", []),
        ('<|tool_call>call:f{city:<|"|>Paris<|"|>}<tool_call|>', None, [("f", {"city": "Paris"})]),
        ('Hm. <|tool_call>call:f{a:<|"|>"}<tool_call|>\n<|"|>}<tool_call|> ok', "Hm. ok",
         [("f", {"a": '"}<tool_call|>\n'})]),
        ("<|tool_call>call:f{}<tool_call|><|tool_call>call:g{}<tool_call|>", None, [("f", {}), ("g", {})]),
        ("<|tool_call>call:f{a:1,b:-2.5,c:true,d:null}<tool_call|>", None,
         [("f", {"a": 1, "b": -2.5, "c": True, "d": None})]),
        ('<|tool_call>call:f{a:{b:[1,<|"|>x<|"|>,{c:[]}]},<|"|>d e<|"|>:{}}<tool_call|>', None,
         [("f", {"a": {"b": [1, "x", {"c": []}]}, "d e": {}})]),
        ("<|tool_call> call:f{ a : 1 , b : Paris }<tool_call|>", None, [("f", {"a": 1, "b": "Paris"})]),
    ],
)  # fmt: skip
def test_gemma4_calls(text: str, content: str | None, calls: Parsed) -> None:
    assert parsed(GEMMA4, text) == (content, calls)


def test_functiongemma_calls() -> None:
    text = "<start_function_call>call:f{a:<escape>{x}<escape>,n:[1]}<end_function_call>"
    assert parsed(FUNCTIONGEMMA, text + text) == (None, [("f", {"a": "{x}", "n": [1]})] * 2)
    assert read(FUNCTIONGEMMA, "<|tool_call>call:f{}") == ("<|tool_call>call:f{}", None, [])


@pytest.mark.parametrize(
    "text", ["<|tool_call>", "<|tool_call>call:", "<|tool_call>f{}<tool_call|>", "<|tool_call>call:f()", "<tool_call|>"]
)
def test_gemma4_other_text_is_content(text: str) -> None:
    assert read(GEMMA4, text) == (text, None, [])


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        # Incomplete output.
        ("", "{"),
        ("ci", "{ci"),
        ("city:", '{"city": '),
        ('city:<|"|>Pa<|', '{"city": "Pa<|'),
        ("n:12", '{"n": 12'),
        ("n:[1,", '{"n": [1, '),
        # Text outside of the notation.
        ("n:[1}<tool_call|>", '{"n": [1}'),
        ("n}<tool_call|>", "{n}"),
        ("a:,b:1}<tool_call|>", '{"a": ,b:1}'),
        ('{"a": 1}}<tool_call|>', '{{"a": 1}}'),
    ],
)
def test_gemma4_incomplete_calls_are_kept(text: str, arguments: str) -> None:
    assert read(GEMMA4, "<|tool_call>call:f{" + text) == (None, None, [("f", arguments)])


def test_gemma4_reasoning() -> None:
    text = "<|channel>thought\nThey ask.\n<channel|>Yes.<|tool_call>call:f{}<tool_call|>"
    assert read(GEMMA4, text) == ("Yes.", "They ask.", [("f", "{}")])
    assert read(GEMMA4, "<|channel>thought\n<channel|>Yes.") == ("Yes.", None, [])
    assert GEMMA4.reasoning_open("<|turn>model\n<|channel>thought\n")
    assert not GEMMA4.reasoning_open("<|turn>model\n<|channel>thought\n<channel|>")


def test_gemma4_strings_are_streamed() -> None:
    assert emitted(GEMMA4, '<|tool_call>call:f{a:<|"|>Pa')[2] == [("f", '{"a": "Pa')]
