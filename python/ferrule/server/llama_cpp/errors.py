"""Errors in llama.cpp's form: OpenAI's, with the status as `code`."""

from __future__ import annotations

from typing import Any

from ferrule.server.errors import UNAVAILABLE, ApiError


def error_body(error: ApiError) -> dict[str, Any]:
    """Returns the error body."""
    kind = "unavailable_error" if error.status_code == UNAVAILABLE else error.type
    own = {"code": error.status_code, "message": error.detail, "type": kind, "param": error.param}
    return {"error": {**own, **error.facts}}
