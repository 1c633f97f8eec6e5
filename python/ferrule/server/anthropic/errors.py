"""Errors in Anthropic's form, `{"type": "error", "error": {type, message}, "request_id"}`.

Statuses stay what they are for every API: a server that is full answers 503, which proxies know, where Anthropic's own
answers 529; the type is theirs, and their client tries both again.
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
}
"""Of those that mean a server which is there, and has no room or no time."""
_THREAD = "thread"
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": [_THREAD]}
"""By this Anthropic's client knows that its tool runner, which asks for a thread, must send whole conversations."""


def error_body(error: ApiError) -> dict[str, Any]:
    """The error object."""
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
