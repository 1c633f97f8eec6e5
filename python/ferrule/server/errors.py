"""What goes wrong, as HTTP: a status and OpenAI's error object, `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from ferrule.errors import (
    ChatTemplateError,
    EngineError,
    FerruleError,
    InsufficientMemoryError,
    InvalidParameterError,
    LogitsProcessorError,
    ModelFileError,
    ModelNotFoundError,
    PromptError,
    QueueFullError,
    RequestFailedError,
    TokenizerError,
    UnsupportedTaskError,
)
from ferrule.server.record import current

RETRY_AFTER = 1
"""Seconds after which a request that found no room may come again."""
BAD_REQUEST, UNPROCESSABLE, UNAVAILABLE = 400, 422, 503
"""The second is for what would fail again: clients try a 503 once more."""
_NAME = r"[a-zA-Z_]\w*(?:\.[\w.]+|\[[^\]]*\])*"
_FIELD = re.compile(_NAME + "(?= )")
_FIELD_OF_PROMPT = re.compile(_NAME + "(?= is |: )")
"""Errors about a prompt name a field only where it is not the whole of it."""
_CODES: tuple[tuple[type[FerruleError], int, str], ...] = (
    (QueueFullError, UNAVAILABLE, "queue_full"),
    (RequestFailedError, UNPROCESSABLE, "request_failed"),
    (EngineError, UNAVAILABLE, "engine_unavailable"),
    (InsufficientMemoryError, UNAVAILABLE, "insufficient_memory"),
    (LogitsProcessorError, UNAVAILABLE, "logits_processor_failed"),
    (ModelNotFoundError, 404, "model_not_found"),
    (ModelFileError, BAD_REQUEST, "model_file_invalid"),
    (PromptError, BAD_REQUEST, "invalid_prompt"),
    (ChatTemplateError, BAD_REQUEST, "chat_template_error"),
    (TokenizerError, BAD_REQUEST, "tokenizer_error"),
    (UnsupportedTaskError, BAD_REQUEST, "unsupported_task"),
    (InvalidParameterError, BAD_REQUEST, "invalid_value"),
    (FerruleError, BAD_REQUEST, "invalid_value"),
)
"""The first class that fits decides."""


class ApiError(HTTPException):
    """An answer that is an error. As one of Starlette's it passes through FastAPI unchanged, wherever it is raised."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        given = dict(headers or {})
        if status == UNAVAILABLE:
            given.setdefault("Retry-After", str(RETRY_AFTER))
        super().__init__(status, message, given)
        self.code = code
        self.param = param

    @property
    def type(self) -> str:
        """OpenAI's family of errors."""
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
        """The error object."""
        return {"error": {"message": self.detail, "type": self.type, "param": self.param, "code": self.code}}


def api_error(error: FerruleError) -> ApiError:
    """An error of the library as an answer; the field that the message begins with is the `param`."""
    status, code = next((status, code) for kind, status, code in _CODES if isinstance(error, kind))
    record = current.get()
    names: Mapping[str, str] = {} if record is None else record.names
    message = str(error)
    param = None
    if isinstance(error, InvalidParameterError | PromptError):
        message = _renamed(message, names)
        whole = isinstance(error, PromptError)
        field = (_FIELD_OF_PROMPT if whole else _FIELD).match(message)
        param = field.group() if field is not None else names.get("prompt", "prompt") if whole else None
    elif isinstance(error, ChatTemplateError):
        param = names.get("messages", "messages")
    return ApiError(status, message, code=code, param=param)


def response(error: ApiError) -> JSONResponse:
    """An error as a response in the form of the API that was asked, noted in the request's record."""
    record = current.get()
    body = error.body()
    if record is not None:
        record.error = error.code
        body = body if record.error_body is None else record.error_body(error)
    return JSONResponse(body, error.status_code, headers=dict(error.headers or {}))


def call_fields(names: Mapping[str, str]) -> None:
    """From now on, the request's errors name fields of the library, the keys, as whoever asked has called them."""
    record = current.get()
    if record is not None:
        record.names = names


def _renamed(message: str, names: Mapping[str, str]) -> str:
    for name, own in names.items():
        if re.match(rf"{re.escape(name)}(?!\w)", message):
            return own + message[len(name) :]
    return message


def unsupported(param: str, message: str) -> ApiError:
    """A field, or a value of it, that is known but not supported."""
    return ApiError(BAD_REQUEST, message, code="unsupported_parameter", param=param)
