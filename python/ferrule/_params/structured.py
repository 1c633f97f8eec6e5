"""Structured outputs: JSON schema, regular expression, choice, grammar or structural tag, under vLLM's names.

This module checks types. The structure is compiled when a request begins, since compiling needs the model's tokens.
"""

from __future__ import annotations

import json as _json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

from ferrule._params.closed_objects import close_objects, close_structures, strict_schema
from ferrule._params.compatibility import Ignored, Rules, compatible
from ferrule._params.gbnf import gbnf_to_lark, is_gbnf
from ferrule._validation import check_flag
from ferrule.errors import InvalidParameterError

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")

_FORMAT_FIELDS: dict[str, frozenset[str]] = {
    "text": frozenset({"type"}),
    "json_object": frozenset({"type", "schema"}),
    "json_schema": frozenset({"type", "json_schema"}),
}
"""Fields of a `response_format`, by its type. Fields of a structural tag are checked when it is compiled."""
_SCHEMA_FIELDS = frozenset({"name", "description", "schema", "strict"})


@runtime_checkable
class SchemaClass(Protocol):
    """A class with a JSON schema, such as a pydantic model."""

    def model_json_schema(self) -> dict[str, Any]:
        """Returns the schema."""
        ...


FOREIGN: Rules = {
    "disable_additional_properties": Ignored(False, "objects are closed unless the schema sets additionalProperties"),
    "backend": Ignored(None, "llguidance is the one backend"),
}
"""Fields of vLLM's StructuredOutputsParams that ferrule does not have."""


@compatible(FOREIGN)
@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """Structure of the output: exactly one of the first six fields, and optionally the white space of JSON.

        >>> from ferrule import SamplingParams, StructuredOutputsParams
        >>> colour = StructuredOutputsParams(choice=["red", "green"])
        >>> SamplingParams(structured_outputs=colour).structured_outputs.choice
        ('red', 'green')

    Raises InvalidParameterError if none or several of the six fields are set, and for a value of the wrong type.
    Contents are checked when the request begins.
    """

    json: str | Mapping[str, Any] | type[SchemaClass] | None = None
    """JSON schema as text, as a mapping, or as a pydantic model; stored as text. An object with `properties` and
    without `additionalProperties` has no other members."""
    regex: str | None = None
    """Regular expression that the whole output must match."""
    choice: Sequence[str] | None = None
    """Texts one of which the output must be."""
    grammar: str | None = None
    """Context-free grammar in Lark's syntax or in GBNF, llama.cpp's syntax."""
    json_object: bool | None = None
    """True if the output must be a JSON object."""
    structural_tag: str | Mapping[str, Any] | None = None
    """Free text with structured parts, as in vLLM: `{"structures": [{"begin": ..., "schema": ..., "end": ...}],
    "triggers": [...]}`; stored as text."""
    disable_any_whitespace: bool = False
    """Whether to forbid white space between the tokens of JSON."""
    whitespace_pattern: str | None = None
    """Regular expression that white space between the tokens of JSON must match."""

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise InvalidParameterError("structured_outputs", given, f"exactly one of {', '.join(KINDS)}")
        checked: dict[str, object] = {}
        for name in ("regex", "grammar", "whitespace_pattern"):
            if getattr(self, name) is not None:
                checked[name] = _text(name, getattr(self, name))
        for name in ("json", "structural_tag"):
            if getattr(self, name) is not None:
                checked[name] = _text(name, _json_text(name, getattr(self, name)))
        if self.choice is not None:
            checked["choice"] = _checked_choices(self.choice)
        if self.json_object is not None and self.json_object is not True:
            raise _wrong("json_object", self.json_object, "True or None")
        self._check_whitespace(given[0])
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def _check_whitespace(self, kind: str) -> None:
        check_flag("structured_outputs.disable_any_whitespace", self.disable_any_whitespace)
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise _wrong("whitespace_pattern", self.whitespace_pattern, "left out with disable_any_whitespace")
        if kind not in ("json", "json_object") and (self.disable_any_whitespace or self.whitespace_pattern):
            name = "whitespace_pattern" if self.whitespace_pattern else "disable_any_whitespace"
            raise _wrong(name, getattr(self, name), f"left out with {kind}; it applies to json and json_object")

    @classmethod
    def from_response_format(cls, response_format: Mapping[str, Any]) -> StructuredOutputsParams | None:
        """Reads OpenAI's `response_format`; returns None for `{"type": "text"}`.

        `strict` closes every object of a schema and requires every property.

        Raises InvalidParameterError.
        """
        if not isinstance(cast("object", response_format), Mapping):
            raise InvalidParameterError("response_format", response_format, "an object")
        kind = response_format.get("type")
        if isinstance(kind, str) and kind in _FORMAT_FIELDS:
            _check_fields("response_format", response_format, _FORMAT_FIELDS[kind])
        match kind:
            case "text":
                return None
            case "json_object":
                schema = response_format.get("schema")  # llama.cpp's field
                return cls(json_object=True) if schema is None else cls(json=schema)
            case "json_schema":
                described = cast("object", response_format.get("json_schema"))
                if not isinstance(described, Mapping) or cast("Mapping[str, Any]", described).get("schema") is None:
                    raise InvalidParameterError(
                        "response_format.json_schema", cast("object", described), "an object with a schema"
                    )
                _check_fields("response_format.json_schema", cast("Mapping[str, Any]", described), _SCHEMA_FIELDS)
                return cls(json=_followed_schema(cast("Mapping[str, Any]", described)))
            case "structural_tag":
                return cls(structural_tag=response_format)
            case _:
                requirement = "text, json_object, json_schema or structural_tag"
                raise InvalidParameterError("response_format.type", kind, requirement)

    def description(self) -> str:
        """Returns the structure as the JSON that the native module reads."""
        described: dict[str, object]
        if self.json is not None or self.json_object:
            whitespace: object = "none" if self.disable_any_whitespace else "some"
            if self.whitespace_pattern is not None:
                whitespace = {"pattern": self.whitespace_pattern}
            schema = '{"type": "object"}' if self.json is None else close_objects(cast("str", self.json))
            described = {"type": "json", "schema": schema, "whitespace": whitespace}
        elif self.regex is not None:
            described = {"type": "regex", "pattern": self.regex}
        elif self.choice is not None:
            described = {"type": "choice", "choices": list(self.choice)}
        elif self.grammar is not None:
            grammar = gbnf_to_lark(self.grammar) if is_gbnf(self.grammar) else self.grammar
            described = {"type": "grammar", "grammar": grammar}
        else:
            described = {"type": "structural_tag", "tag": close_structures(cast("str", self.structural_tag))}
        return _json.dumps(described)


def _followed_schema(described: Mapping[str, Any]) -> Any:
    """Returns the schema of a `response_format`, with the changes of `strict`."""
    strict: object = described.get("strict")
    if strict not in (None, False, True):
        raise InvalidParameterError("response_format.json_schema.strict", strict, "true or false")
    return strict_schema(described["schema"]) if strict is True else described["schema"]


def _check_fields(name: str, given: Mapping[str, Any], known: frozenset[str]) -> None:
    for key in given:
        if key not in known and given[key] is not None:
            raise InvalidParameterError(
                f"{name}.{key:.100}", given[key], f"left out; the fields are {', '.join(sorted(known))}"
            )


def _wrong(name: str, value: object, requirement: str) -> InvalidParameterError:
    return InvalidParameterError(f"structured_outputs.{name}", value, requirement)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise _wrong(name, value, "a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        requirement = f"valid Unicode (found a lone surrogate, U+{ord(value[error.start]):04X})"
        raise _wrong(name, value, requirement) from None
    return value


def _json_text(name: str, value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, type) and isinstance(value, SchemaClass):
        value = cast("SchemaClass", value).model_json_schema()
    if not isinstance(value, Mapping):
        raise _wrong(name, value, "JSON text or a mapping")
    try:
        return _json.dumps(dict(cast("Mapping[str, Any]", value)), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _wrong(name, cast("object", value), f"valid JSON ({error})") from None


def _checked_choices(choices: object) -> tuple[str, ...]:
    if isinstance(choices, str) or not isinstance(choices, Sequence):
        raise _wrong("choice", choices, "a list of strings")
    checked: list[str] = []
    for index, choice in enumerate(cast("Sequence[object]", choices)):
        if not isinstance(choice, str) or not choice:
            raise _wrong(f"choice[{index}]", choice, "a non-empty string")
        checked.append(_text(f"choice[{index}]", choice))
    return tuple(checked)
