"""Qwen3-Coder: calls in XML-like notation."""

from __future__ import annotations

import json

import pytest

from ferrule._text.parsers import MessageFormat
from parsers.read import WEATHER, Calls, emitted, read

PLAIN, TYPED = MessageFormat("qwen3_coder"), MessageFormat("qwen3_xml", tools=WEATHER)


def call(*parameters: str, name: str = "get_weather") -> str:
    """Formats a call as the model does; each parameter is `key=value`."""
    tags = "".join("<parameter={}>\n{}\n</parameter>\n".format(*each.split("=", 1)) for each in parameters)
    return f"<tool_call>\n<function={name}>\n{tags}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (call("city=Paris"), None, [("get_weather", {"city": "Paris"})]),
        ("Sure.\n" + call("a=1", "b= x\n y "), "Sure.", [("get_weather", {"a": "1", "b": " x\n y "})]),
        (call(), None, [("get_weather", {})]),
        (call(name="f") + "\n" + call(name="g"), None, [("f", {}), ("g", {})]),
        (call('code=if a < "b":\n\tprint({})'), None, [("get_weather", {"code": 'if a < "b":\n\tprint({})'})]),
        ("<tool_call><function=f><parameter=a>x</parameter></function></tool_call>", None, [("f", {"a": "x"})]),
        # Two functions in one tag, and functions without it.
        ("<tool_call><function=f></function><function=g></function></tool_call>.", ".", [("f", {}), ("g", {})]),
        ("Hm <function=f>\n</function>\n</tool_call>", "Hm", [("f", {})]),
        # Text after a function without its end.
        ("<tool_call><function=f>and so on</tool_call>", "and so on", [("f", {})]),
    ],
)
def test_xml_calls(text: str, content: str | None, calls: list[tuple[str, object]]) -> None:
    found = read(PLAIN, text)
    assert found[:2] == (content, None)
    assert [(name, json.loads(arguments)) for name, arguments in found[2]] == calls


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("city=75001", "75001"),
        ("days=3", 3),
        ("days= 3 ", 3),
        ("days=3.0", 3.0),
        ("days=three", "three"),
        ("days=true", "true"),
        ("metric=true", True),
        ("metric=False", False),
        ('spots=["a", 1]', ["a", 1]),
        ("spots=['a', (1, None)]", ["a", [1, None]]),
        ("spots=[a]", "[a]"),
        ('where={"x": {"y": [1]}}', {"x": {"y": [1]}}),
        ("where={'x': True}", {"x": True}),
        ("where=[1]", "[1]"),
        ("most=2.5", 2.5),
        ("most=null", None),
        ("most=None", None),
        ("most=NaN", "NaN"),
        ("unknown=3", "3"),
    ],
)
def test_declared_types_are_used(parameter: str, value: object) -> None:
    [(_, arguments)] = read(TYPED, call(parameter))[2]
    [(key, found)] = json.loads(arguments).items()
    assert (key, found, type(found)) == (parameter.partition("=")[0], value, type(value))


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n{}\n</tool_call>",
        "<tool_call>\n<function",
        "<function=>",
        "<function=a b>x",
        "a </function> </parameter>",
        "<parameter=a>",
    ],
)
def test_other_text_is_content(text: str) -> None:
    assert read(PLAIN, text) == (text, None, [])


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("", ""),
        ("<parameter=city>\n", '{"city": "'),
        ("<parameter=city>\nPar", '{"city": "Par'),
        ("<parameter=city>\nParis\n</param", '{"city": "Paris\\n</param'),
        ("<parameter=city>Paris</parameter>", '{"city": "Paris"'),
        ("<parameter=days>\n1", '{"days": "1'),
    ],
)
def test_incomplete_arguments_are_invalid_json(text: str, arguments: str) -> None:
    expected: Calls = [("get_weather", arguments)]
    assert read(TYPED, "<tool_call><function=get_weather>" + text) == (None, None, expected)


def test_strings_are_streamed() -> None:
    text = "<function=get_weather><parameter=city>\nPa\nris\n"  # the last line end may belong to the tag
    assert emitted(TYPED, text)[2] == [("get_weather", '{"city": "Pa\\nris')]
    text = '<tool_call><function=f><parameter=code>\nprint("a'
    assert emitted(PLAIN, text)[2] == [("f", '{"code": "print(\\"a')]
