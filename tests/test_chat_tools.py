"""Functions as tools: their schemas, including the order of the keys, and errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import Enum
from typing import Any, Literal

import pytest

from ferrule import ChatTemplateError
from ferrule._text.chat.tools import function_schema


class Unit(Enum):
    CELSIUS = "C"
    FAHRENHEIT = "F"


class Nothing(Enum):
    pass


def get_weather(city: str, days: int = 1, unit: Unit | None = None) -> list[float]:
    """The weather to come.

    At a place of any size.

    Args:
        city: Name of the city: any
            language (choices: ["Paris", " Rome "])
        days: How far

        unit: Of the temperature

    Returns:
        A temperature for each day

    Raises:
        OSError: never
    """
    raise AssertionError(city, days, unit)


def schema_of(function: Callable[..., Any]) -> Any:
    schema = function_schema(function, "tools[0]")
    assert schema["type"] == "function"
    return schema["function"]


def test_complete_schema() -> None:
    city = {"type": "string", "enum": ["Paris", "Rome"], "description": "Name of the city: any language"}
    unit = {"type": "string", "enum": ["C", "F"], "nullable": True, "description": "Of the temperature"}
    expected = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather to come.\n\nAt a place of any size.",
            "parameters": {
                "type": "object",
                "properties": {"city": city, "days": {"type": "integer", "description": "How far"}, "unit": unit},
                "required": ["city"],
            },
            "return": {
                "type": "array",
                "items": {"type": "number"},
                "description": "A temperature for each day",
            },
        },
    }
    assert json.dumps(function_schema(get_weather, "tools[0]")) == json.dumps(expected)


class Clock:
    def now(self) -> Clock:
        """The time."""
        return self


def test_methods_and_functions_without_arguments() -> None:
    assert schema_of(Clock().now) == {
        "name": "now",
        "description": "The time.",
        "parameters": {"type": "object", "properties": {}},
    }


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (str, {"type": "string"}),
        (bool, {"type": "boolean"}),
        (Any, {}),
        (None, {"type": "null"}),
        (list, {"type": "array"}),
        (
            list[dict[str, int]],
            {"type": "array", "items": {"type": "object", "additionalProperties": {"type": "integer"}}},
        ),
        (tuple[int, str], {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]}),
        (int | str, {"type": ["integer", "string"]}),
        (float | None, {"type": "number", "nullable": True}),
        (list[int] | str, {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "string"}]}),
        (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}),
        (Literal["a", 1, None], {"type": ["string", "integer", "null"], "enum": ["a", 1, None]}),
    ],
)
def test_types(hint: Any, schema: dict[str, Any]) -> None:
    def function(x: Any) -> None:
        """Does it.

        Args:
            x: of a type
        """

    function.__annotations__["x"] = hint
    assert schema_of(function)["parameters"]["properties"]["x"] == {**schema, "description": "of a type"}


def no_docstring(x: int) -> None:
    raise AssertionError(x)


def no_hint(x) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001, RUF100
    """Does it.

    Args:
        x: something
    """
    raise AssertionError(x)


def no_description(x: int, y: int) -> None:
    """Does it.

    Args:
        x: something
    """
    raise AssertionError(x, y)


def bad_choices(x: str) -> None:
    """Does it.

    Args:
        x: something (choices: [1, 2])
    """
    raise AssertionError(x)


def unreadable_hint(x: NotThere) -> None:  # type: ignore[name-defined]  # noqa: F821
    """Does it.

    Args:
        x: something
    """
    raise AssertionError(x)


def with_hint(hint: Any) -> Callable[..., Any]:
    def function(x: Any) -> None:
        """Does it.

        Args:
            x: something
        """

    function.__annotations__["x"] = hint
    return function


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_docstring, r"tools\[0\] \(function no_docstring\) has no docstring"),
        (no_hint, r"\(function no_hint\): argument x has no type hint"),
        (no_description, r"\(function no_description\): argument y has no description under Args:"),
        (bad_choices, r"argument x: choices must be a JSON list of strings, got \[1, 2\]"),
        (unreadable_hint, r"\(function unreadable_hint\) has invalid type hints: name 'NotThere' is not defined"),
        (with_hint(object), "argument x has the unsupported type hint <class 'object'>; pass a JSON schema instead"),
        (with_hint(tuple[int, ...]), r"argument x has the unsupported type hint tuple\[int, ...\]"),
        (with_hint([int]), r"argument x has the unsupported type hint \[<class 'int'>\]"),
        (with_hint(Nothing), "argument x: the values of the type hint must be JSON scalars, got <enum 'Nothing'>"),
        (with_hint(Literal[b"a"]), "the values of the type hint must be JSON scalars, got "),
        (Unit, r"tools\[0\] must be a dict or a function, got <enum 'Unit'>"),
    ],
)
def test_invalid_functions(function: Any, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        function_schema(function, "tools[0]")
