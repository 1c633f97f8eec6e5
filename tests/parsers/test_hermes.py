"""Hermes and Qwen: JSON objects in tags."""

from __future__ import annotations

import pytest

from ferrule._text.parsers import MessageFormat
from parsers.read import Calls, emitted, read

HERMES = MessageFormat("hermes", "qwen3")


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Just text.", "Just text.", []),
        ("\n two  lines\n\n", "\n two  lines\n\n", []),
        (
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
            None,
            [("get_weather", '{"city": "Paris"}')],
        ),
        (
            'I look it up.\n\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n'
            '<tool_call>{"name": "g", "arguments": {"x": [1, {"y": 2}]}}</tool_call>\n',
            "I look it up.",
            [("f", "{}"), ("g", '{"x": [1, {"y": 2}]}')],
        ),
        (
            'One <tool_call>{"name": "f", "arguments": {}}</tool_call> two',
            "One two",
            [("f", "{}")],
        ),
        # Two calls in one tag.
        (
            '<tool_call>{"name": "f", "arguments": {"a": 1}}\n{"name": "g", "arguments": {}}</tool_call>',
            None,
            [("f", '{"a": 1}'), ("g", "{}")],
        ),
        # Markers and braces within strings belong to the strings.
        (
            '<tool_call>{"name": "f", "arguments": {"a": "</tool_call> {", "b": "\\"}"}}</tool_call>!',
            "!",
            [("f", '{"a": "</tool_call> {", "b": "\\"}"}')],
        ),
        # Other order of the keys, other keys, and missing arguments.
        (
            '<tool_call>{"id": 1, "arguments": {"a": {"name": "no"}}, "name": "f", "more": [1]}</tool_call>',
            None,
            [("f", '{"a": {"name": "no"}}')],
        ),
        ('<tool_call>{"name": "f"}</tool_call>', None, [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', None, [("f", "{}")]),
        # Arguments encoded as a string.
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', None, [("f", '{"a": 1}')]),
        # An escaped name, and whitespace where JSON allows it.
        ('<tool_call> {  "name" :\n"\\u0066" , "arguments"\n: { } } </tool_call>', None, [("f", "{ }")]),
    ],
)
def test_json_calls_in_tags(text: str, content: str | None, calls: Calls) -> None:
    assert read(HERMES, text) == (content, None, calls)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>not JSON</tool_call>",
        '<tool_call>\n["name"]</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{name: "f"}</tool_call>',
        '<tool_call>{"name" "f"}</tool_call>',
        '<tool_call>{"name": "f"',
        '<tool_call>{"name": "f", "arguments":',
        '<tool_call>{"arguments": {"a": 1}, "name": "f"',
        "a </tool_call> b",
        "<tool_cal",
    ],
)
def test_other_text_is_content(text: str) -> None:
    assert read(HERMES, text) == (text, None, [])


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        # Incomplete output.
        ('{"name": "f", "arguments": {"a": "</tool_ca', None, '{"a": "</tool_ca'),
        ('{"name": "f", "arguments": {"a": 1}', None, '{"a": 1}'),
        ('{"name": "f", "arguments": "{\\"a', None, '"{\\"a'),
        # A missing brace in the arguments and after them, and an extra one.
        ('{"name": "f", "arguments": {"a": [1}\n</tool_call> ok', "ok", '{"a": [1}\n'),
        ('{"name": "f", "arguments": {"a": 1}\n</tool_call> ok', "ok", '{"a": 1}'),
        ('{"name": "f", "arguments": {"a": 1}}}\n</tool_call> ok', "}\n ok", '{"a": 1}'),
        # Invalid JSON with matching delimiters.
        ('{"name": "f", "arguments": {a: \'1\'}}</tool_call>', None, "{a: '1'}"),
        ('{"name": "f", "arguments": [1, 2]}</tool_call>', None, "[1, 2]"),
        ('{"name": "f", "arguments": {}, oops}</tool_call>', ", oops}", "{}"),
    ],
)
def test_incomplete_calls_are_kept(text: str, content: str | None, arguments: str) -> None:
    assert read(HERMES, "<tool_call>" + text) == (content, None, [("f", arguments)])


def test_arguments_are_streamed() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "some long tex'
    assert emitted(HERMES, text) == (None, None, [("f", '{"a": "some long tex')])


def test_an_invalid_call_does_not_hide_the_next() -> None:
    text = 'a <tool_call>oops <tool_call>{"name": "f", "arguments": {}}</tool_call> b'
    assert read(HERMES, text) == ("a <tool_call>oops b", None, [("f", "{}")])
