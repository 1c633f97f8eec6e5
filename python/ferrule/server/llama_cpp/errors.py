"""Errors in llama.cpp's form: OpenAI's, with the status as `code`."""

from __future__ import annotations

from typing import Any

from ferrule.server.errors import UNAVAILABLE, ApiError

NOT_IMPLEMENTED = 501
"""Status of a feature of llama.cpp that this server lacks or that is disabled."""
KINDS = {UNAVAILABLE: "unavailable_error", NOT_IMPLEMENTED: "not_supported_error"}
"""Types of errors by status, where they differ from OpenAI's."""


def error_body(error: ApiError) -> dict[str, Any]:
    """Returns the error body."""
    kind = KINDS.get(error.status_code, error.type)
    own = {"code": error.status_code, "message": error.detail, "type": kind, "param": error.param}
    return {"error": {**own, **error.facts}}
