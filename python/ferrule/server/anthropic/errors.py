"""Errors in Anthropic's form, `{"type": "error", "error": {type, message}, "request_id"}`.

The HTTP status is the same for every API: a full server answers 503, which proxies know, where Anthropic's answers 529.
The error type is Anthropic's; its client retries both statuses.
"""

from __future__ import annotations

from typing import Any

from ferrule.server.errors import ApiError
from ferrule.server.request_record import current_record

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
_TYPES_OF_CODES = {
    "deadline_exceeded": "timeout_error",
    "draining": "overloaded_error",
    "loading": "overloaded_error",
    "queue_full": "overloaded_error",
    "too_many_uploads": "overloaded_error",
}
"""Error types of codes that mean a server without capacity or time."""
_THREAD = "thread"
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": [_THREAD]}
"""Details by which the tool runner of Anthropic's client falls back from threads to whole conversations."""


def error_body(error: ApiError) -> dict[str, Any]:
    """Returns the error body."""
    record = current_record.get()
    kind = _TYPES_OF_CODES.get(error.code) or _TYPES.get(error.status_code)
    if kind is None:
        kind = "api_error" if error.status_code >= 500 else "invalid_request_error"
    return {
        "type": "error",
        "error": {
            "type": kind,
            "message": error.detail,
            **({"details": _NO_THREADS} if error.param == _THREAD else {}),
        },
        "request_id": None if record is None else record.request_id,
    }
