"""Conversion of the library's errors to HTTP errors, and of these to responses.

The names of fields are attributes of the errors: messages are never parsed. A protocol that names a field otherwise
than the library (`max_completion_tokens`, `num_predict`, `stop_sequences`) sets its names with `name_fields`.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import JSONResponse

from ferrule.errors import (
    ChatTemplateError,
    EngineError,
    FerruleError,
    ImageError,
    InsufficientMemoryError,
    InvalidParameterError,
    LogitsProcessorError,
    ModelFileError,
    ModelNotFoundError,
    PromptError,
    PromptTooLongError,
    QueueFullError,
    RequestFailedError,
    TokenizerError,
    UnsupportedTaskError,
    shown,
)
from ferrule.server.errors import BAD_REQUEST, TOO_LONG, UNAVAILABLE, UNPROCESSABLE, ApiError
from ferrule.server.request_record import current_record

_CODES: tuple[tuple[type[FerruleError], int, str], ...] = (
    (QueueFullError, UNAVAILABLE, "queue_full"),
    (RequestFailedError, UNPROCESSABLE, "request_failed"),
    (EngineError, UNAVAILABLE, "engine_unavailable"),
    (InsufficientMemoryError, UNAVAILABLE, "insufficient_memory"),
    (LogitsProcessorError, UNAVAILABLE, "logits_processor_failed"),
    (ModelNotFoundError, 404, "model_not_found"),
    (ModelFileError, BAD_REQUEST, "model_file_invalid"),
    (PromptTooLongError, BAD_REQUEST, TOO_LONG),
    (ImageError, BAD_REQUEST, "invalid_image"),
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
    message, param = str(error), None
    match error:
        case InvalidParameterError(field=str(field), value=value, requirement=requirement):
            param = _request_name(field, names)
            message = f"{param} must be {requirement}, got {shown(value)}"
        case PromptError():
            param = _request_name(error.field or "prompt", names)
            if error.field is not None and message.startswith(error.field):
                message = param + message[len(error.field) :]
        case ChatTemplateError():
            param = _request_name("messages", names)
        case _:
            pass
    facts = {"n_prompt_tokens": error.tokens, "n_ctx": error.context} if isinstance(error, PromptTooLongError) else {}
    return ApiError(status, message, code=code, param=param, facts=facts)


def _request_name(field: str, names: Mapping[str, str]) -> str:
    """Returns the request's name of a field, or of the part of it that `field` is."""
    for name, request_name in names.items():
        rest = field.removeprefix(name)
        if field.startswith(name) and (not rest or rest[0] in ".["):
            return request_name + rest
    return field


def error_response(error: ApiError) -> JSONResponse:
    """Makes the response of an error in the form of the request's API, and notes its code in the request's record."""
    record = current_record.get()
    body = error.body()
    if record is not None:
        record.error = error.code
        body = body if record.error_body is None else record.error_body(error)
    return JSONResponse(body, error.status_code, headers=dict(error.headers or {}))
