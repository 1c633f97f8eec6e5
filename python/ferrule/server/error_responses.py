"""Conversion of the library's errors to HTTP errors, and of these to responses.

The names of fields are attributes of the errors: messages are never parsed. A protocol that names a field otherwise
than the library (`max_completion_tokens`, `num_predict`, `stop_sequences`) sets its names with `name_fields`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

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
from ferrule.server.errors import BAD_REQUEST, UNAVAILABLE, UNPROCESSABLE, ApiError
from ferrule.server.request_record import current_record

_NAME = r"[a-zA-Z_]\w*(?:\.[\w.]+|\[[^\]]*\])*"
_FIELD = re.compile(_NAME + "(?= )")
_FIELD_OF_PROMPT = re.compile(_NAME + "(?= is |: )")
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
"""Status and code of each class of errors; the first class that matches applies."""


def api_error(error: FerruleError) -> ApiError:
    """Converts an error of the library to an HTTP error, with the request's name of the field."""
    status, code = next((status, code) for kind, status, code in _CODES if isinstance(error, kind))
    record = current_record.get()
    names: Mapping[str, str] = {} if record is None else record.field_names
    message = str(error)
    param = None
    if isinstance(error, InvalidParameterError | PromptError):
        message = _renamed(message, names)
        whole = isinstance(error, PromptError)
        field = (_FIELD_OF_PROMPT if whole else _FIELD).match(message)
        if error.field is not None:
            param = _renamed(error.field, names)
        else:
            param = field.group() if field is not None else names.get("prompt", "prompt") if whole else None
    elif isinstance(error, ChatTemplateError):
        param = names.get("messages", "messages")
    return ApiError(status, message, code=code, param=param)


def _renamed(message: str, names: Mapping[str, str]) -> str:
    for name, own in names.items():
        if re.match(rf"{re.escape(name)}(?!\w)", message):
            return own + message[len(name) :]
    return message


def error_response(error: ApiError) -> JSONResponse:
    """Makes the response of an error in the form of the request's API, and notes its code in the request's record."""
    record = current_record.get()
    body = error.body()
    if record is not None:
        record.error = error.code
        body = body if record.error_body is None else record.error_body(error)
    return JSONResponse(body, error.status_code, headers=dict(error.headers or {}))
