"""Declared tools of a request, and the types of values that models write without types.

Tools are in OpenAI's form, `{"type": "function", "function": {"name": ..., "parameters": ...}}`, or only the inner
function object; `parameters` is a JSON Schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

from ferrule._text.parsers.draft import quoted
from ferrule._text.parsers.literals import read_literal
from ferrule.errors import InvalidParameterError

ToolSchema: TypeAlias = Mapping[str, Any]

JSON_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
STRING = frozenset({"string"})
_TYPES: tuple[tuple[type, frozenset[str]], ...] = (
    (str, STRING),
    (bool, frozenset({"boolean"})),  # before int, its base class
    (int, frozenset({"integer", "number"})),
    (float, frozenset({"integer", "number"})),
    (list, frozenset({"array"})),
    (dict, frozenset({"object"})),
)
_WORDS = {"True": "true", "False": "false", "None": "null"}


class Tools:
    """Declared functions of a request and the types of their arguments; without tools, all names are allowed.

    Raises InvalidParameterError.
    """

    def __init__(self, tools: Sequence[ToolSchema] | None) -> None:
        self._properties: dict[str, Mapping[str, Any]] | None = None
        if tools is None:
            return
        if not isinstance(cast("object", tools), Sequence) or isinstance(tools, (str, bytes)):
            raise InvalidParameterError("tools", tools, "a list of tools in OpenAI's form")
        self._properties = dict(_declared(index, tool) for index, tool in enumerate(tools))

    def declares(self, name: str) -> bool:
        """Whether a function is declared."""
        return self._properties is not None and name in self._properties

    def allow(self, name: str) -> bool:
        """Whether the name is allowed for a call: it is declared, or no tools are declared."""
        return self._properties is None or name in self._properties

    def parameters(self, name: str) -> list[str]:
        """Returns the known names of a function's arguments, in order."""
        return list(self._of(name))

    def types(self, name: str, parameter: str) -> frozenset[str]:
        """Returns the JSON types of an argument; empty if unknown."""
        return types_of(self.schema(name, parameter))

    def schema(self, name: str, parameter: str) -> Mapping[str, Any]:
        """Returns the schema of an argument; empty if unknown."""
        return _mapping(self._of(name).get(parameter))

    def _of(self, name: str) -> Mapping[str, Any]:
        return (self._properties or {}).get(name, {})


def json_of_text(text: str, types: frozenset[str]) -> str:
    """Returns text as JSON, of a declared type that it fits, or else as a string."""
    bare = text.strip()
    if types - STRING:
        bare = _WORDS.get(bare, bare)
        if _type_of(bare) & types:
            return bare
        if types & {"array", "object"} and bare[:1] in ("[", "{", "("):
            return _json_of_structure(bare, types) or quoted(text)
    return quoted(text)


def json_of_literal(text: str, types: frozenset[str]) -> str:
    """Returns a Python literal as JSON; other text becomes a string."""
    text = text.strip()
    try:
        value = read_literal(text)
    except ValueError:
        return json_of_text(text, types)
    if isinstance(value, str):
        return json_of_text(value, types) if types and "string" not in types else quoted(value)
    return quoted(text) if types == STRING else json.dumps(value, ensure_ascii=False)


def is_json(text: str) -> bool:
    """Whether a text is JSON by RFC 8259."""
    return bool(_type_of(text))


def _type_of(text: str) -> frozenset[str]:
    """Returns the types of a text as JSON; empty if it is not JSON."""
    try:
        return _type_of_value(json.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return frozenset()


def _type_of_value(value: object) -> frozenset[str]:
    if isinstance(value, float) and not value.is_integer():
        return frozenset({"number"})
    return next((types for kind, types in _TYPES if isinstance(value, kind)), frozenset({"null"}))


def _json_of_structure(text: str, types: frozenset[str]) -> str | None:
    """Returns a list or dict in Python notation as JSON."""
    try:
        found = json.dumps(read_literal(text), ensure_ascii=False)
    except ValueError:
        return None
    return found if _type_of(found) & types else None


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _declared(index: int, tool: object) -> tuple[str, Mapping[str, Any]]:
    function: object = cast("ToolSchema", tool).get("function", tool) if isinstance(tool, Mapping) else None
    name: object = cast("ToolSchema", function).get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise InvalidParameterError(
            f"tools[{index}]", cast("object", tool), "a tool in OpenAI's form, with a non-empty function name"
        )
    parameters: object = cast("ToolSchema", function).get("parameters")
    properties: object = cast("ToolSchema", parameters).get("properties") if isinstance(parameters, Mapping) else None
    return name, cast("Mapping[str, Any]", properties) if isinstance(properties, Mapping) else {}


def member_schema(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns the schema of a property, or of the items of a list; empty if unknown."""
    properties = _mapping(schema.get("properties"))
    return _mapping(properties[name] if name in properties else schema.get("items"))


def types_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """Returns the types of `type`, or of the values or schemas in `enum`, `const`, `anyOf` and `oneOf`."""
    found = _named(schema)
    for union in ("anyOf", "oneOf"):
        options: object = schema.get(union)
        if isinstance(options, Sequence) and not isinstance(options, str):
            for option in cast("Sequence[object]", options):
                found |= _named(cast("Mapping[str, Any]", option)) if isinstance(option, Mapping) else frozenset()
    return found


def _named(schema: Mapping[str, Any]) -> frozenset[str]:
    named: object = schema.get("type")
    if named is None and ("enum" in schema or "const" in schema):
        values: object = schema.get("enum", [schema.get("const")])
        listed = cast("Sequence[object]", values) if isinstance(values, Sequence) else ()
        return frozenset[str]().union(*map(_type_of_value, listed))
    names: object = [named] if isinstance(named, str) else named
    if not isinstance(names, Sequence):
        return frozenset()
    return frozenset(name.lower() for name in cast("Sequence[object]", names) if isinstance(name, str)) & JSON_TYPES


def _mapping(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}
