"""Mistral: a list of objects, or names with arguments."""

from __future__ import annotations

import re

import pytest

from ferrule._text.parsers import MessageFormat
from parsers.read import Calls, emitted, read

MISTRAL = MessageFormat("mistral", "mistral")


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("No [brackets] here.", "No [brackets] here.", []),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', None, [("f", '{"a": 1}')]),
        (
            '[TOOL_CALLS][{"name": "f", "arguments": {"a": "]"}, "id": "abcDEF123"}, {"name": "g", "arguments": {}}]',
            None,
            [("f", '{"a": "]"}'), ("g", "{}")],
        ),
        ('[TOOL_CALLS]{"name": "f", "arguments": {}}', None, [("f", "{}")]),
        # A parameter with the name `name`.
        ('[TOOL_CALLS][{"name": "f", "arguments": {"name": "g"}}]', None, [("f", '{"name": "g"}')]),
        ('Fine. [TOOL_CALLS]f[ARGS]{"a": {"b": "}"}}', "Fine.", [("f", '{"a": {"b": "}"}}')]),
        ('[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', None, [("f", '{"a": 1}'), ("g", "{}")]),
        ('[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{"a": 1}', None, [("f", '{"a": 1}')]),
        ('[TOOL_CALLS]f{"a": 1}', None, [("f", '{"a": 1}')]),
        ('[TOOL_CALLS]f[ARGS]{"a": 1} And then?', "And then?", [("f", '{"a": 1}')]),
        # The next call ends an unfinished one, except if its marker is in a string.
        ('[TOOL_CALLS]f[ARGS]{"a": [1[TOOL_CALLS]g[ARGS]{}', None, [("f", '{"a": [1'), ("g", "{}")]),
        ('[TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]g[ARGS]{}', None, [("f", '{"a": "[TOOL_CALLS]g[ARGS]{}')]),
        ("[TOOL_CALLS]f[ARGS]", None, [("f", "")]),
    ],
)
def test_list_and_name_calls(text: str, content: str | None, calls: Calls) -> None:
    assert read(MISTRAL, text) == (content, None, calls)


@pytest.mark.parametrize(
    "text",
    [
        "[TOOL_CALLS]",
        "[TOOL_CALLS] f",
        "[TOOL_CALLS] I call f",
        "[TOOL_CALLS] []",
        "[TOOL_CALLS][{",
        "[ARGS]{}",
        "[TOOL_CALLS]f[CALL_ID]call_1[ARGS]{}",
        "[TOOL_CALLS]f[CALL_ID]abcDEF1234[ARGS]{}",
        "[TOOL_CALLS]f[CALL_ID]abcDEF123{}",
    ],
)
def test_other_text_is_content(text: str) -> None:
    assert read(MISTRAL, text) == (text, None, [])


def test_ids_are_nine_letters_and_digits() -> None:
    text = "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[CALL_ID]abcDEF123[ARGS]{}[TOOL_CALLS]h[CALL_ID]abcDEF123[ARGS]{}"
    ids = [call.id for call in MISTRAL.parse(text).tool_calls]
    assert all(re.fullmatch("[A-Za-z0-9]{9}", each) for each in ids)
    assert ids[1] == "abcDEF123", "the model's own is kept"
    assert len(set(ids)) == 3


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        ("[THINK]So.[/THINK]Yes.", "Yes.", "So.", []),
        ("[THINK]a[/THINK]b[THINK]c[/THINK]d", "bd", "a\nc", []),
        ("[THINK]I call [TOOL_CALLS]f[/THINK][TOOL_CALLS]g[ARGS]{}", None, "I call [TOOL_CALLS]f", [("g", "{}")]),
        ("[THINK]So it go", None, "So it go", []),
        ("a [/THINK]", "a [/THINK]", None, []),
    ],
)
def test_reasoning(text: str, content: str | None, reasoning: str | None, calls: Calls) -> None:
    assert read(MISTRAL, text) == (content, reasoning, calls)


def test_arguments_are_streamed() -> None:
    assert emitted(MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": "b')[2] == [("f", '{"a": "b')]
    assert emitted(MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": "b')[2] == [("f", '{"a": "b')]
