"""What FastAPI and pydantic find wrong with a body, as one error that names the field and its value."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

from fastapi.exceptions import RequestValidationError

from ferrule._validation import shown
from ferrule.server.errors import BAD_REQUEST, ApiError

LONGEST_NAME = 100
"""Characters of a field's name that an error repeats."""
_OBJECTS = frozenset({"model_type", "dict_type"})
"""Errors in which pydantic speaks of dictionaries, and of classes by our names for them."""


def validation_error(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong; the field is where the body has it."""
    found: Mapping[str, Any] = error.errors()[0]
    kind, where = str(found["type"]), [str(part) for part in found["loc"][1:]]
    if kind == "json_invalid":
        return ApiError(BAD_REQUEST, f"the body is no JSON: {found['ctx']['error']}", code="invalid_json")
    if kind == "missing":
        if not where:
            return ApiError(BAD_REQUEST, "the body is empty; it must be a JSON object", code="invalid_json")
        name = _name([*_engine_steps(error.body, found["loc"][1:-1]), where[-1]])
        return ApiError(BAD_REQUEST, f"{name} is missing", code="missing_required_parameter", param=name)
    if kind == "extra_forbidden":
        name = _name(_engine_steps(error.body, found["loc"][1:]))
        return ApiError(BAD_REQUEST, f"{name} is not supported", code="unknown_parameter", param=name)
    field = _engine_steps(error.body, found["loc"][1:])
    name = _name(field) or None
    said = "Input should be an object" if kind in _OBJECTS else found["msg"]
    message = f"{name or 'the body'} is {shown(found['input'])}: {said}"
    if isinstance(error.body, bytes):
        message = "the body is not JSON by its Content-Type; send application/json"
    return ApiError(BAD_REQUEST, message, code="invalid_type", param=name)


def unreadable_body(cause: BaseException) -> ApiError:
    """What kept FastAPI from reading a body, where it says no more than that something did."""
    match cause:
        case RecursionError():
            found = "it is nested too deeply"
        case UnicodeDecodeError():
            found = f"it is not UTF-8: byte {cause.start} is {cause.object[cause.start]:#04x}"
        case ValueError():  # the one other that json raises: Python reads no number of any length
            found = f"a number has more digits than the limit, {sys.get_int_max_str_digits()}"
        case _:  # the client went, say
            found = "it did not come whole"
    return ApiError(BAD_REQUEST, f"the body is no JSON that can be read: {found}", code="invalid_json")


def _engine_steps(body: object, path: Sequence[object]) -> list[str]:
    """The parts of a path that the body has: pydantic adds names of types to them."""
    found: list[str] = []
    for part in path:
        if isinstance(body, Mapping) and part in cast("Mapping[object, object]", body):
            body = cast("Mapping[object, object]", body)[part]
        elif isinstance(body, list) and isinstance(part, int) and part < len(cast("list[object]", body)):
            body = cast("list[object]", body)[part]
        else:
            continue
        found.append(str(part))
    return found


def _name(path: Sequence[str]) -> str:
    name = ""
    for part in path:
        part = part[:LONGEST_NAME]  # noqa: PLW2901
        name += f"[{part}]" if part.isdigit() else f".{part}" if name else part
    return name
