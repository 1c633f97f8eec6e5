"""JSON schemas of Python functions, as transformers' `get_json_schema` generates them (5.23).

Types are taken from the type hints, and descriptions from a docstring in Google's style: a description of the function,
then `Args:` with a line `name: description` for each argument, and optionally `Returns:`. A description may end in
`(choices: ["a", "b"])`.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, TypeAlias, Union, cast, get_args, get_origin, get_type_hints

from ferrule._validation import shown
from ferrule.errors import ChatTemplateError

Schema: TypeAlias = dict[str, Any]
Tool: TypeAlias = Mapping[str, Any] | Callable[..., Any]
"""A JSON schema, or a function with type hints and a docstring that describes its arguments."""

SCALARS: dict[object, str] = {int: "integer", float: "number", str: "string", bool: "boolean", NoneType: "null"}
TYPES: dict[object, Schema] = {
    **{kind: {"type": name} for kind, name in SCALARS.items()},
    list: {"type": "array"},
    tuple: {"type": "array"},
    dict: {"type": "object"},
    Any: {},
}

_SECTION = re.compile(r"\n[ \t]*(Args|Returns|Raises):[ \t]*(?=\n|$)|\n[ \t]*(Returns|Raises):")
_ARGUMENT = re.compile(r"([ \t]*)(\w+):[ \t]*(.*)")
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


def tool_schemas(tools: Sequence[Tool]) -> Sequence[Mapping[str, Any]]:
    """Replaces functions in the tools by their schemas; invalid values are left for later checks.

    Raises the errors of `function_schema`.
    """
    converted: object = tools
    if isinstance(tools, (list, tuple)):
        converted = [
            function_schema(tool, f"tools[{index}]") if callable(tool) and not hasattr(tool, "model_dump") else tool
            for index, tool in enumerate(tools)
        ]
    return cast("Sequence[Mapping[str, Any]]", converted)


def function_schema(function: Callable[..., Any], where: str) -> Schema:
    """Returns the schema of a function; `where` describes it in messages.

    Raises ChatTemplateError, for example for an argument without a type hint or a description.
    """
    name = getattr(function, "__name__", None)
    if name is None or inspect.isclass(function):
        raise ChatTemplateError(f"{where} must be a dict or a function, got {shown(function)}")
    where = f"{where} (function {name})"
    documentation = inspect.getdoc(function)
    if not documentation:
        raise ChatTemplateError(f"{where} has no docstring; it must describe the function and its arguments")
    description, descriptions, returned = _read_docstring(documentation.strip())
    try:
        hints = get_type_hints(function)
    except Exception as error:  # type hints are code that may raise any exception
        raise ChatTemplateError(f"{where} has invalid type hints: {error}") from error
    properties: dict[str, Schema] = {}
    required: list[str] = []
    for position, parameter in enumerate(inspect.signature(function).parameters.values()):
        if position == 0 and parameter.name in ("self", "cls") and parameter.name not in hints:
            continue
        argument = f"{where}: argument {parameter.name}"
        if parameter.name not in hints:
            raise ChatTemplateError(f"{argument} has no type hint")
        if parameter.name not in descriptions:
            raise ChatTemplateError(f"{argument} has no description under Args: in the docstring")
        properties[parameter.name] = _described(
            _type_schema(hints[parameter.name], argument), descriptions[parameter.name], argument
        )
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters: Schema = {"type": "object", "properties": properties, **({"required": required} if required else {})}
    schema: Schema = {"name": name, "description": description, "parameters": parameters}
    result = _result_schema(hints, returned, where)
    return {"type": "function", "function": schema if result is None else {**schema, "return": result}}


def _described(schema: Schema, description: str, argument: str) -> Schema:
    choices = _CHOICES.search(description)
    if choices is None:
        return {**schema, "description": description}
    try:
        values: object = json.loads(choices[1])
    except ValueError:
        values = None
    listed = cast("list[object]", values) if isinstance(values, list) else [None]
    if not all(isinstance(value, str) for value in listed):
        raise ChatTemplateError(f"{argument}: choices must be a JSON list of strings, got {choices[1]}")
    enum = [str(value).strip() for value in listed]
    return {**schema, "enum": enum, "description": description[: choices.start()].strip()}


def _result_schema(hints: Mapping[str, Any], description: str | None, where: str) -> Schema | None:
    """Returns the schema of the result, if its type has one."""
    if "return" not in hints:
        return None
    try:
        schema = _type_schema(hints["return"], where)
    except ChatTemplateError:
        return None
    return schema if description is None else {**schema, "description": description}


def _type_schema(hint: Any, argument: str) -> Schema:
    origin, inner = get_origin(hint), get_args(hint)
    plain: Any = hint if origin is None else origin
    schema: Schema | None = None
    if not inner and isinstance(plain, type) and issubclass(plain, Enum):
        schema = _choice_schema([member.value for member in plain], shown(cast("object", hint)), argument)
    elif not inner and isinstance(plain, Hashable) and plain in TYPES:
        schema = dict(TYPES[plain])
    elif origin is Literal:
        schema = _choice_schema(list(inner), shown(cast("object", hint)), argument)
    elif origin is Union or origin is UnionType:
        schema = _union_schema(inner, argument)
    elif origin is list:
        schema = {"type": "array", "items": _type_schema(inner[0], argument)}
    elif origin is dict:
        schema = {"type": "object", "additionalProperties": _type_schema(inner[1], argument)}
    elif origin is tuple and len(inner) > 1 and ... not in inner:
        schema = {"type": "array", "prefixItems": [_type_schema(each, argument) for each in inner]}
    if schema is None:
        raise ChatTemplateError(
            f"{argument} has the unsupported type hint {shown(cast('object', hint))}; pass a JSON schema instead"
        )
    return schema


def _choice_schema(values: list[Any], hint: str, argument: str) -> Schema:
    """Returns a schema with the type of the values, or a list of their distinct types in order."""
    if not values or any(type(value) not in SCALARS for value in values):
        raise ChatTemplateError(f"{argument}: the values of the type hint must be JSON scalars, got {hint}")
    types = list(dict.fromkeys(SCALARS[type(value)] for value in values))
    return {"type": types[0] if len(types) == 1 else types, "enum": values}


def _union_schema(hints: tuple[Any, ...], argument: str) -> Schema:
    schemas = [_type_schema(hint, argument) for hint in hints if hint is not NoneType]
    if len(schemas) == 1:
        schema = schemas[0]
    elif all(each.keys() == {"type"} and isinstance(each["type"], str) for each in schemas):
        types = sorted({each["type"] for each in schemas})
        schema = {"type": types[0] if len(types) == 1 else types}
    else:
        schema = {"anyOf": schemas}
    return {**schema, "nullable": True} if NoneType in hints else schema


def _read_docstring(text: str) -> tuple[str, dict[str, str], str | None]:
    """Returns the descriptions of the function, of each argument, and of the result."""
    parts = _SECTION.split(f"\n{text}")
    sections: dict[str, str] = {}
    for long, short, body in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        sections.setdefault(long or short, body)
    returned = sections.get("Returns")
    described = _read_arguments(sections.get("Args", ""))
    return parts[0].strip(), described, None if returned is None else returned.strip()


def _read_arguments(text: str) -> dict[str, str]:
    """Parses lines `name: description`; a line that is indented deeper or has no name continues the previous one."""
    lines: dict[str, list[str]] = {}
    current, margin = "", ""
    for line in filter(str.strip, text.split("\n")):
        found = _ARGUMENT.fullmatch(line)
        deeper = found is not None and current and found[1].startswith(margin) and len(found[1]) > len(margin)
        if found is not None and not deeper:
            margin, current = found[1], found[2]
            lines[current] = [found[3]]
        elif current:
            lines[current].append(line)
    return {name: " ".join(filter(None, map(str.strip, body))) for name, body in lines.items()}
