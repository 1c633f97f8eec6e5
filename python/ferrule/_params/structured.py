"""What an output must be: JSON of a schema, what a regular expression matches, a choice, or what a grammar derives.

The names are vLLM's. What is asked for is checked for its kind here, and compiled where the model's tokens are known.
"""

from __future__ import annotations

import json as _json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

from ferrule._validation import shown
from ferrule.errors import InvalidParameterError

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")

_FORMAT_FIELDS: dict[str, frozenset[str]] = {
    "text": frozenset({"type"}),
    "json_object": frozenset({"type"}),
    "json_schema": frozenset({"type", "json_schema"}),
}
"""Of a `response_format`, by its type; a structural tag's are looked at where it is read."""
_SCHEMA_FIELDS = frozenset({"name", "description", "schema", "strict"})


@runtime_checkable
class SchemaClass(Protocol):
    """A class that knows its JSON schema, as those of pydantic do."""

    def model_json_schema(self) -> dict[str, Any]:
        """The schema."""
        ...


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What the output must be: one of these, and for JSON what white space it may have.

    Raises InvalidParameterError where there is not exactly one, or it is of the wrong kind; what it says is read when
    the request is made.
    """

    json: str | Mapping[str, Any] | type[SchemaClass] | None = None
    """A JSON schema: as text, as a mapping, or a class of pydantic's. Kept as text."""
    regex: str | None = None
    """A regular expression, of the whole output."""
    choice: Sequence[str] | None = None
    """The texts that the output may be."""
    grammar: str | None = None
    """A context-free grammar in Lark's syntax."""
    json_object: bool | None = None
    """True for any JSON object."""
    structural_tag: str | Mapping[str, Any] | None = None
    """Free text with parts of a structure, as vLLM has it: `{"structures": [{"begin": ..., "schema": ..., "end": ...}],
    "triggers": [...]}`. Kept as text."""
    disable_any_whitespace: bool = False
    """Whether JSON has no white space between its parts."""
    whitespace_pattern: str | None = None
    """A regular expression of the white space that each place between the parts of JSON may have."""

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            found = ", ".join(given) or "none"
            raise InvalidParameterError(f"structured_outputs has {found}; it must have one of {', '.join(KINDS)}")
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
            raise _wrong("json_object", self.json_object, "True, or left out")
        self._check_whitespace(given[0])
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def _check_whitespace(self, kind: str) -> None:
        if not isinstance(cast("object", self.disable_any_whitespace), bool):
            raise _wrong("disable_any_whitespace", self.disable_any_whitespace, "True or False")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise _wrong("whitespace_pattern", self.whitespace_pattern, "left out with disable_any_whitespace")
        if kind not in ("json", "json_object") and (self.disable_any_whitespace or self.whitespace_pattern):
            raise InvalidParameterError(
                f"structured_outputs.{kind} has no white space of its own: whitespace_pattern and "
                "disable_any_whitespace are for json and json_object"
            )

    @classmethod
    def from_response_format(cls, response_format: Mapping[str, Any]) -> StructuredOutputsParams | None:
        """What OpenAI's `response_format` asks for; None for `{"type": "text"}`.

        Raises InvalidParameterError.
        """
        if not isinstance(cast("object", response_format), Mapping):
            raise InvalidParameterError(f"response_format is {shown(response_format)}; it must be an object")
        kind = response_format.get("type")
        if isinstance(kind, str) and kind in _FORMAT_FIELDS:
            _check_fields("response_format", response_format, _FORMAT_FIELDS[kind])
        match kind:
            case "text":
                return None
            case "json_object":
                return cls(json_object=True)
            case "json_schema":
                described = cast("object", response_format.get("json_schema"))
                if not isinstance(described, Mapping) or cast("Mapping[str, Any]", described).get("schema") is None:
                    found = shown(cast("object", described))
                    raise InvalidParameterError(
                        f"response_format.json_schema is {found}; it must be an object with a schema"
                    )
                _check_fields("response_format.json_schema", cast("Mapping[str, Any]", described), _SCHEMA_FIELDS)
                return cls(json=cast("Mapping[str, Any]", described)["schema"])
            case "structural_tag":
                return cls(structural_tag=response_format)
            case _:
                limit = "text, json_object, json_schema or structural_tag"
                raise InvalidParameterError(f"response_format.type is {shown(kind)}; it must be {limit}")

    def description(self) -> str:
        """What is asked for, as JSON that the native module reads."""
        described: dict[str, object]
        if self.json is not None or self.json_object:
            whitespace: object = "none" if self.disable_any_whitespace else "some"
            if self.whitespace_pattern is not None:
                whitespace = {"pattern": self.whitespace_pattern}
            described = {"type": "json", "schema": self.json or '{"type": "object"}', "whitespace": whitespace}
        elif self.regex is not None:
            described = {"type": "regex", "pattern": self.regex}
        elif self.choice is not None:
            described = {"type": "choice", "choices": list(self.choice)}
        elif self.grammar is not None:
            described = {"type": "grammar", "grammar": self.grammar}
        else:
            described = {"type": "structural_tag", "tag": self.structural_tag}
        return _json.dumps(described)


def _check_fields(name: str, given: Mapping[str, Any], known: frozenset[str]) -> None:
    for key in given:
        if key not in known:
            raise InvalidParameterError(
                f"{name}.{key:.100} is not supported; the fields are {', '.join(sorted(known))}"
            )


def _wrong(name: str, value: object, limit: str) -> InvalidParameterError:
    return InvalidParameterError(f"structured_outputs.{name} is {shown(value)}; it must be {limit}")


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise _wrong(name, value, "a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        found = f"holds a lone surrogate, U+{ord(value[error.start]):04X}"
        raise InvalidParameterError(f"structured_outputs.{name} {found}; it must be valid Unicode") from None
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
        raise InvalidParameterError(f"structured_outputs.{name} is no JSON: {error}") from None


def _checked_choices(choices: object) -> tuple[str, ...]:
    if isinstance(choices, str) or not isinstance(choices, Sequence):
        raise _wrong("choice", choices, "a list of strings")
    checked: list[str] = []
    for index, choice in enumerate(cast("Sequence[object]", choices)):
        if not isinstance(choice, str) or not choice:
            raise _wrong(f"choice[{index}]", choice, "a string that is not empty")
        checked.append(_text(f"choice[{index}]", choice))
    return tuple(checked)
