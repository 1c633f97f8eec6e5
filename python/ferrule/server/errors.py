"""`ApiError`: an error of the server with its HTTP status, error code and the name of the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException

RETRY_AFTER = 1
"""Value of the header Retry-After on a 503, in seconds."""
BAD_REQUEST, UNPROCESSABLE, UNAVAILABLE = 400, 422, 503
"""422 is for requests that would fail again: clients retry a 503."""
TOO_LONG = "context_length_exceeded"
"""OpenAI's code of a prompt that is longer than the context."""
TOO_LONG_TYPE = "exceed_context_size_error"
"""llama.cpp's type of the same error."""
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    500: "server_error",
    UNAVAILABLE: "service_unavailable_error",
}
"""Error types of OpenAI's API by status; other statuses are those of invalid requests."""


class ApiError(HTTPException):
    """An HTTP error with the attributes of OpenAI's error object.

    It derives from Starlette's HTTPException so that FastAPI passes it through wherever it is raised.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        facts: Mapping[str, int] | None = None,
    ) -> None:
        all_headers = dict(headers or {})
        if status == UNAVAILABLE:
            all_headers.setdefault("Retry-After", str(RETRY_AFTER))
        super().__init__(status, message, all_headers)
        self.code = code
        self.param = param
        self.facts: Mapping[str, int] = facts or {}
        """Further fields of the error object in OpenAI's and llama.cpp's form."""

    @property
    def type(self) -> str:
        """Error type of OpenAI's API; for a prompt that is too long that of llama.cpp, whose code is OpenAI's."""
        return TOO_LONG_TYPE if self.code == TOO_LONG else TYPES.get(self.status_code, "invalid_request_error")

    def body(self) -> dict[str, Any]:
        """Error body of OpenAI's API: `{"error": {message, type, param, code}}`, with the further fields."""
        own = {"message": self.detail, "type": self.type, "param": self.param, "code": self.code}
        return {"error": {**own, **self.facts}}


def unsupported(param: str, message: str) -> ApiError:
    """Error for a field, or a value of it, that the API defines and this server does not support."""
    return ApiError(BAD_REQUEST, message, code="unsupported_parameter", param=param)
