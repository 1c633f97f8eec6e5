"""`RequestModel`: base class of request models, and the rules for fields that it does not declare.

A request may have three kinds of fields beside the declared ones. A field that the protocol defines and that cannot
change the answer here is accepted; one that would change the answer is refused by name; any other field is unknown, and
the server's setting `unknown_fields` decides. Fields that are null count as absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias, cast

from pydantic import BaseModel, ConfigDict, model_validator

from ferrule.errors import InvalidParameterError
from ferrule.server.errors import unsupported
from ferrule.server.schema.limits import check_fields

MAX_UNKNOWN = 32
"""Maximum number of unknown fields that are reported."""
MAX_NAME = 100
"""Maximum number of characters of a field's name in errors and logs."""


@dataclass(frozen=True)
class Accepted:
    """Rule of a field that cannot change the answer: every value is accepted, without effect."""


@dataclass(frozen=True)
class Unsupported:
    """Rule of a field that would change the answer, except for values that ask for what happens anyway."""

    hint: str
    """Reason or alternative, which the error states."""
    neutral: tuple[object, ...] = ()
    """Accepted values."""


FieldRules: TypeAlias = Mapping[str, Accepted | Unsupported]
ACCEPTED = Accepted()


class RequestModel(BaseModel):
    """A part of a request. Its fields are typed strictly; `check_other_fields` applies the rules of all others."""

    model_config = ConfigDict(extra="allow", strict=True, populate_by_name=False)

    other_fields: ClassVar[FieldRules] = {}
    """Rules of fields that the protocol defines beside the declared ones."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: object) -> object:
        check_fields(value)
        if not isinstance(value, Mapping):
            return value
        return {name: each for name, each in cast("Mapping[str, object]", value).items() if each is not None}


def check_other_fields(body: object) -> list[str]:
    """Removes all fields of a request that are not declared, and returns the paths of the unknown ones.

    Raises ApiError for a field that the protocol defines and the server does not support.
    """
    unknown: list[str] = []
    _check(body, "", unknown)
    return unknown


def _check(value: object, path: str, unknown: list[str]) -> None:
    if isinstance(value, RequestModel):
        _check_model(value, path, unknown)
    elif isinstance(value, list):
        items = cast("list[object]", value)
        if items and isinstance(items[0], int):  # token ids, maybe a million
            return
        for index, item in enumerate(items):
            _check(item, f"{path}[{index}]", unknown)


def _check_model(model: RequestModel, path: str, unknown: list[str]) -> None:
    extra = cast("dict[str, Any]", model.__pydantic_extra__)
    for name, value in extra.items():
        where = field_path(path, name)
        rule = model.other_fields.get(name)
        if rule is None:
            if len(unknown) < MAX_UNKNOWN:
                unknown.append(where)
        elif isinstance(rule, Unsupported) and value not in rule.neutral:
            raise unsupported(where, f"{where} is not supported: {rule.hint}")
    extra.clear()
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if isinstance(value, (RequestModel, list)):
            _check(cast("object", value), field_path(path, field.alias or name), unknown)


def field_path(path: str, name: str) -> str:
    """Returns the path of a field of an object, such as `messages[0].name`."""
    name = name[:MAX_NAME]
    return f"{path}.{name}" if path else name


def one_of(request: RequestModel, *names: str) -> Any:
    """Returns the value of several fields with the same meaning; None where the request has none of them.

    Raises InvalidParameterError where it has two.
    """
    given = [name for name in names if name in request.model_fields_set]
    if len(given) > 1:
        value: object = getattr(request, given[1])
        raise InvalidParameterError(given[1], value, f"left out with {given[0]}; both mean the same")
    return getattr(request, given[0]) if given else None
