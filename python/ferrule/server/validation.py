"""Conversion of validation errors of FastAPI and pydantic to errors that state field, requirement and value."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

from fastapi.exceptions import RequestValidationError

from ferrule.errors import shown
from ferrule.server.errors import BAD_REQUEST, ApiError

MAX_NAME = 100
"""Maximum number of characters of a field's name in an error."""
REQUIREMENTS = {
    "string_type": "a string",
    "string_unicode": "Unicode text without lone surrogates",
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "none_required": "null",
    "literal_error": "{expected}",
    "too_long": "a list of at most {max_length} items",
    "too_short": "a list of at least {min_length} items",
    "string_too_short": "a string of at least {min_length} characters",
    "string_too_long": "a string of at most {max_length} characters",
    "greater_than_equal": ">= {ge}",
    "less_than_equal": "<= {le}",
    "greater_than": "> {gt}",
    "less_than": "< {lt}",
}
"""Requirement by pydantic's type of the error, as it reads after "must be", with values of its context."""


def validation_error(error: RequestValidationError) -> ApiError:
    """Converts the first validation error; the path of the field is the body's, or the name of a query parameter."""
    found: Mapping[str, Any] = error.errors()[0]
    kind, location = str(found["type"]), found["loc"][1:]
    query = found["loc"][0] == "query"
    if kind == "json_invalid":
        return ApiError(BAD_REQUEST, f"request body is not valid JSON: {found['ctx']['error']}", code="invalid_json")
    if isinstance(error.body, bytes) and not query:
        message = "Content-Type must be application/json: the request body was not parsed as JSON"
        return ApiError(BAD_REQUEST, message, code="invalid_type")
    if kind == "missing":
        if not location:
            return ApiError(BAD_REQUEST, "request body is empty; it must be a JSON object", code="invalid_json")
        name = _path([*_existing_parts(error.body, location[:-1]), str(location[-1])])
        return ApiError(BAD_REQUEST, f"{name} is required", code="missing_required_parameter", param=name)
    name = str(location[0]) if query else _path(_existing_parts(error.body, location)) or None
    requirement = REQUIREMENTS.get(kind)
    if requirement is not None:
        limit = requirement.format_map(found.get("ctx", {}))
        message = f"{name or 'request body'} must be {limit}, got {shown(found['input'])}"
    else:  # errors of validators of ours state the requirement themselves
        message = f"{name or 'request body'} {found['msg']}"
    return ApiError(BAD_REQUEST, message, code="invalid_type", param=name)


def unreadable_body(cause: BaseException) -> ApiError:
    """Converts an exception that kept FastAPI from parsing a body."""
    match cause:
        case RecursionError():
            reason = "it is nested too deeply"
        case UnicodeDecodeError():
            reason = f"it is not UTF-8 (byte {cause.start} is {cause.object[cause.start]:#04x})"
        case ValueError():  # the only other ValueError of json: Python limits the digits of integers
            reason = f"a number has more than {sys.get_int_max_str_digits()} digits"
        case _:  # for example the client disconnected
            reason = "it is incomplete"
    return ApiError(BAD_REQUEST, f"request body is not valid JSON: {reason}", code="invalid_json")


def _existing_parts(body: object, path: Sequence[object]) -> list[str]:
    """Returns the parts of a path that exist in the body: pydantic adds the tags of unions."""
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


def _path(parts: Sequence[str]) -> str:
    path = ""
    for part in parts:
        name = part[:MAX_NAME]
        path += f"[{name}]" if name.isdigit() else f".{name}" if path else name
    return path
