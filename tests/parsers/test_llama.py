"""Llama: JSON objects and Python calls without markers."""

from __future__ import annotations

import json

import pytest

from ferrule._text.parsers import MessageFormat
from parsers.read import WEATHER, Calls, emitted, read

JSON, PYTHON = MessageFormat("llama3_json"), MessageFormat("pythonic")
DECLARED_JSON, DECLARED_PYTHON = MessageFormat("llama4_json", tools=WEATHER), MessageFormat("pythonic", tools=WEATHER)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "f", "parameters": {"a": 1}}', None, [("f", '{"a": 1}')]),
        (' \n{"type": "function", "name": "f", "arguments": {}}', None, [("f", "{}")]),
        ('{"parameters": {"a": 1}, "name": "f"} ok', "ok", [("f", '{"a": 1}')]),
        ('<|python_tag|>{"name": "f", "parameters": {}}', None, [("f", "{}")]),
        ('Well. <|python_tag|>{"name": "f", "parameters": {}}', "Well.", [("f", "{}")]),
        ('<|python_start|>{"name": "f", "parameters": {}}<|python_end|>', None, [("f", "{}")]),
        (
            '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"x": "};"}}',
            None,
            [("f", "{}"), ("g", '{"x": "};"}')],
        ),
        (
            '[{"name": "f", "parameters": {}}, {"name": "g", "parameters": {"x": [2]}}] done',
            "done",
            [("f", "{}"), ("g", '{"x": [2]}')],
        ),
        ('[{"name": "f", "parameters": {}}, 5]', ", 5]", [("f", "{}")]),
        ('{"name": "f", "parameters": {"a": "', None, [("f", '{"a": "')]),
    ],
)
def test_json_object_calls(text: str, content: str | None, calls: Calls) -> None:
    assert read(JSON, text) == (content, None, calls)


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Ada", "age": 36}',
        '{"name": "f"}',
        '{"name": "f", "parameters": [1]}',
        '{"name": "f", "parameters": "x"}',
        '{"answer": {"name": "f", "parameters": {}}}',
        '  {"name": "f", "par',
        "[1] says so",
        '[{"a": 1}]',
        "{",
        'See: {"name": "f", "parameters": {}}',
        '<|python_tag|>brave_search.call(query="x")',
        "[f(a=1)]",
    ],
)
def test_ambiguous_objects_are_content(text: str) -> None:
    assert read(JSON, text) == (text, None, [])


def test_only_declared_tools_are_called() -> None:
    for text in ('{"name": "f", "parameters": {"a": 1}}', '[{"name": "f", "parameters": {}}]'):
        assert read(DECLARED_JSON, text) == (text, None, [])
    text = '{"name": "get_weather", "parameters": {"a": 1}}'
    assert read(DECLARED_JSON, text)[2] == [("get_weather", '{"a": 1}')]
    assert read(DECLARED_JSON, '{"name": "get_time"}')[2] == [("get_time", "{}")]
    assert read(DECLARED_PYTHON, "[f(a=1)]") == ("[f(a=1)]", None, [])
    assert read(DECLARED_PYTHON, "[get_time(), f()]") == (", f()]", None, [("get_time", "{}")])


def test_an_answer_in_json_is_streamed() -> None:
    assert emitted(JSON, '{"answer": "som')[0] == '{"answer": "som'
    assert emitted(JSON, '{"name": "f", "parameters": {"a": "som')[2] == [("f", '{"a": "som')]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("[f()]", None, [("f", {})]),
        ("\n[ f ( ) ]", "\n[ f ( ) ]", []),
        ('[f(a=1, b="x"), g(c=[1, 2.5])]', None, [("f", {"a": 1, "b": "x"}), ("g", {"c": [1, 2.5]})]),
        ('[f(a=\'it\\\'s\', b="\\"q\\"")]', None, [("f", {"a": "it's", "b": '"q"'})]),
        ("[f(a=')],(', b='''x\n'y''')]", None, [("f", {"a": ")],(", "b": "x\n'y"})]),
        ('[f(a={"k": (1, None), "l": {}}, b=true)]', None, [("f", {"a": {"k": [1, None], "l": {}}, "b": True})]),
        ("[f(a=-1, b=1_000, c=.5, d=0x10)]", None, [("f", {"a": -1, "b": 1000, "c": 0.5, "d": 16})]),
        ("[f( a = 1 ,\n b = 2 , )]", None, [("f", {"a": 1, "b": 2})]),
        ("[ns.f-2(a=1)]", None, [("ns.f-2", {"a": 1})]),
        ("[f(a=b + 1, c=g(1, 2))]", None, [("f", {"a": "b + 1", "c": "g(1, 2)"})]),
        ("[f(a==1)]", None, [("f", {"0": "a==1"})]),
        ("[f(1, 'x', a=2)]", None, [("f", {"0": 1, "1": "x", "a": 2})]),
        ("<|python_start|>[f()]<|python_end|>", None, [("f", {})]),
        ("One moment. <|python_start|>[f()]<|python_end|>", "One moment.", [("f", {})]),
        ("[f()] is what I call.", "is what I call.", [("f", {})]),
        # A missing bracket.
        ("[f(a=1]", None, [("f", {"a": 1})]),
        ("[f(a=1)", None, [("f", {"a": 1})]),
        ("[f(a=1}]", "}]", [("f", {"a": 1})]),
    ],
)
def test_python_calls(text: str, content: str | None, calls: list[tuple[str, object]]) -> None:
    found = read(PYTHON, text)
    assert found[:2] == (content, None)
    assert [(name, json.loads(arguments)) for name, arguments in found[2]] == calls


@pytest.mark.parametrize("text", ["[]", "[1, 2]", "[f]", "[f, g()]", "f()", "Call [f()]", "[2f()]", "[f", "[", "[.."])
def test_other_lists_are_content(text: str) -> None:
    assert read(PYTHON, text) == (text, None, [])


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ('city="Paris", days="3"', {"city": "Paris", "days": 3}),
        ("city=75001, metric=1", {"city": "75001", "metric": 1}),
        ('city=Paris, days="many"', {"city": "Paris", "days": "many"}),
        ('most="2.5", spots="[1]"', {"most": 2.5, "spots": [1]}),
        ("most=None", {"most": None}),
        ('"Paris", 2', {"city": "Paris", "days": 2}),
        ('days=2, "Paris", True', {"days": 2, "city": "Paris", "metric": True}),
    ],
)
def test_declared_types_are_used(arguments: str, values: object) -> None:
    [(_, found)] = read(DECLARED_PYTHON, f"[get_weather({arguments})]")[2]
    assert json.loads(found) == values


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("", ""),
        ("a", '{"0": "a'),
        ("a=", '{"a": "'),
        ("a='x", '{"a": "\'x'),
        ("a=1", '{"a": "1'),
        ("a=1,", '{"a": 1'),
        ("a=1, b=[(2,", '{"a": 1, "b": "[(2,'),
    ],
)
def test_incomplete_arguments_are_invalid_json(text: str, arguments: str) -> None:
    assert read(PYTHON, "[f(" + text) == (None, None, [("f", arguments)])


def test_arguments_are_streamed_one_by_one() -> None:
    assert emitted(PYTHON, "[f(a=1, b=2)")[2] == [("f", '{"a": 1, "b": 2}')]
    assert emitted(PYTHON, "[f(a=1, b=2")[2] == [("f", '{"a": 1')]
