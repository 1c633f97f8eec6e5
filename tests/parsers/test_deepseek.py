"""DeepSeek: calls between special tokens, with the arguments in a block or after the separator, and in tags (V4)."""

from __future__ import annotations

import pytest

from ferrule._text.parsers import MessageFormat, ToolSchema
from ferrule._text.parsers.deepseek import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR
from ferrule._text.parsers.dsml import PARAMETER_END, TAGS
from parsers.read import WEATHER, Calls, emitted, read

DEEPSEEK = MessageFormat("deepseek_v3", "deepseek_r1")


def v3(name: str, arguments: str) -> str:
    """Formats a call as V3 and R1 do."""
    return f"{CALL_BEGIN}function{SEPARATOR}{name}\n```json\n{arguments}\n```{CALL_END}"


def v31(name: str, arguments: str) -> str:
    """Formats a call as V3.1 does."""
    return f"{CALL_BEGIN}{name}{SEPARATOR}{arguments}{CALL_END}"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (CALLS_BEGIN + v3("f", '{"a": 1}') + CALLS_END, None, [("f", '{"a": 1}')]),
        (CALLS_BEGIN + v31("f", '{"a": 1}') + CALLS_END, None, [("f", '{"a": 1}')]),
        ("Hm.\n" + CALLS_BEGIN + v3("f", "{}") + "\n" + v3("g", "{}") + CALLS_END, "Hm.", [("f", "{}"), ("g", "{}")]),
        (CALLS_BEGIN + v31("f", "{}") + v31("g", "{}") + CALLS_END + " ok", "ok", [("f", "{}"), ("g", "{}")]),
        (CALLS_BEGIN + v31("f", "") + CALLS_END, None, [("f", "{}")]),
        (CALLS_BEGIN + CALL_BEGIN + "function" + SEPARATOR + "f" + CALL_END + CALLS_END, None, [("f", "{}")]),
        (
            CALLS_BEGIN + v3("f", '{"a": "```' + CALL_END + '"}') + CALLS_END,
            None,
            [("f", '{"a": "```' + CALL_END + '"}')],
        ),
        # A missing brace, and an extra one.
        (CALLS_BEGIN + v31("f", '{"a": [1') + v31("g", "{}") + CALLS_END, None, [("f", '{"a": [1'), ("g", "{}")]),
        (CALLS_BEGIN + v3("f", "{}}") + v3("g", "{}") + CALLS_END, "}\n```", [("f", "{}"), ("g", "{}")]),
        # Incomplete output.
        (CALLS_BEGIN + v31("f", '{"a": 1}').split(":")[0], None, [("f", '{"a"')]),
        (CALLS_BEGIN + v31("f", '{"a": 1}').removesuffix(CALL_END), None, [("f", '{"a": 1}')]),
        (CALLS_BEGIN + v3("f", '{"a": 1}').split("{")[0], None, [("f", "")]),
    ],
)
def test_v3_and_v31_calls(text: str, content: str | None, calls: Calls) -> None:
    assert read(DEEPSEEK, text) == (content, None, calls)


@pytest.mark.parametrize(
    "text",
    [
        CALLS_BEGIN,
        CALLS_BEGIN + CALLS_END,
        CALLS_BEGIN + " text",
        CALLS_BEGIN + CALL_BEGIN + "f",
        CALLS_BEGIN + CALL_BEGIN + "a function" + SEPARATOR,
        CALLS_BEGIN + CALL_BEGIN + "function" + SEPARATOR + "f",
        CALLS_BEGIN + CALL_BEGIN + "function" + SEPARATOR + "f\nand",
        CALLS_BEGIN + CALL_BEGIN + "tool" + SEPARATOR + "f\n```json\n{}\n```",
        CALLS_BEGIN + CALL_BEGIN + "f" + SEPARATOR + "[1]" + CALL_END,
        v31("f", "{}"),
        "```json\n{}\n```",
    ],
)
def test_other_text_is_content(text: str) -> None:
    assert read(DEEPSEEK, text) == (text, None, [])


def test_reasoning() -> None:
    call = CALLS_BEGIN + v31("f", "{}") + CALLS_END
    assert read(DEEPSEEK, f"<think>\nHm.\n</think>\n\nYes. {call}") == ("Yes.", "Hm.", [("f", "{}")])
    assert read(DEEPSEEK, f"Hm, {call}</think>", reasoning_open=True) == (None, f"Hm, {call}", [])


def test_arguments_are_streamed() -> None:
    for call in (v3("f", '{"a": "b'), v31("f", '{"a": "b')):
        assert emitted(DEEPSEEK, CALLS_BEGIN + call.split('"b')[0] + '"b')[2] == [("f", '{"a": "b')]


def v4(*parameters: tuple[str, str, str]) -> str:
    """Formats a call as V4 does; parameters are names, attributes and values."""
    tags = "".join(f'{TAGS.argument}{name}"{kind}>{value}{PARAMETER_END}\n' for name, kind, value in parameters)
    return f'{TAGS.begin}\n{TAGS.call}get_weather">\n{tags}{TAGS.call_end}\n{TAGS.end}'


@pytest.mark.parametrize("tools", [WEATHER, None])
def test_values_of_v4_are_strings_or_json_as_their_tag_says(tools: list[ToolSchema] | None) -> None:
    string, json = ' string="true"', ' string="false"'
    form = MessageFormat("deepseek_v4", "deepseek_r1", tools=tools)
    text = v4(("city", string, "3"), ("days", json, "3"), ("spots", json, '["a", 1]'), ("metric", json, "yes"))
    arguments = '{"city": "3", "days": 3, "spots": ["a", 1], "metric": "yes"}'
    assert read(form, f"<think>So.</think>Sure.\n\n{text}") == ("Sure.", "So.", [("get_weather", arguments)])
    assert read(form, v4(("city", "", "Paris"))) == (None, None, [("get_weather", '{"city": "Paris"}')])
    cut = v4(("days", json, "[1")).partition(PARAMETER_END)[0]
    assert read(form, cut) == (None, None, [("get_weather", '{"days": "[1')])
