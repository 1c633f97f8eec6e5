"""`ApiError`: an error of the server with its HTTP status, error code and the name of the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException

RETRY_AFTER = 1
"""Value of the header Retry-After on a 503, in seconds."""
BAD_REQUEST, UNPROCESSABLE, UNAVAILABLE = 400, 422, 503
"""422 is for requests that would fail again: clients retry a 503."""


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
    ) -> None:
        all_headers = dict(headers or {})
        if status == UNAVAILABLE:
            all_headers.setdefault("Retry-After", str(RETRY_AFTER))
        super().__init__(status, message, all_headers)
        self.code = code
        self.param = param

    @property
    def type(self) -> str:
        """Error type of OpenAI's API."""
        match self.status_code:
            case 401:
                return "authentication_error"
            case 403:
                return "permission_error"
            case 404:
                return "not_found_error"
            case 500:
                return "server_error"
            case 503:
                return "service_unavailable_error"
            case _:
                return "invalid_request_error"

    def body(self) -> dict[str, Any]:
        """Error body of OpenAI's API: `{"error": {message, type, param, code}}`."""
        return {"error": {"message": self.detail, "type": self.type, "param": self.param, "code": self.code}}


def unsupported(param: str, message: str) -> ApiError:
    """Error for a field, or a value of it, that the API defines and this server does not support."""
    return ApiError(BAD_REQUEST, message, code="unsupported_parameter", param=param)
