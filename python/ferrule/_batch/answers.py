"""A line of the output file: the response or the error of a request."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ferrule._validation import shown
from ferrule.errors import InvalidParameterError

OK = 200
FIELDS = {"custom_id", "response", "error"}


@dataclass(frozen=True)
class Answer:
    """A line of the output."""

    content: bytes
    """Content of the line, with its newline."""
    custom_id: Any
    """Custom id of the request; None if it has none."""
    failure: str | None
    """Error message in one line; None for a successful response."""


def refusal(custom_id: Any, code: str, message: str) -> Answer:
    """Returns the answer to a line that is not a request."""
    return _answer(custom_id, None, {"code": code, "message": message})


def response(custom_id: Any, status: int, body: bytes) -> Answer:
    """Returns the answer with a response of the server application."""
    request_id = f"req_{uuid.uuid4().hex}"
    return _answer(custom_id, {"status_code": status, "request_id": request_id, "body": json.loads(body)}, None)


def error_code(body: bytes) -> str | None:
    """Returns the code of the error in a response body; None if there is none."""
    code = _field(_field(json.loads(body), "error"), "code")
    return code if isinstance(code, str) else None


def read_answer(content: bytes, path: Path, number: int) -> Answer:
    """Reads an answer of an earlier run; `path` and the line `number` are for errors.

    Raises InvalidParameterError for a line that is not an answer.
    """
    try:
        read: object = json.loads(content)
    except (ValueError, RecursionError):
        read = None
    answer = cast("dict[str, Any]", read) if isinstance(read, dict) else {}
    if not answer.keys() >= FIELDS:
        raise InvalidParameterError("output_file", str(path), f"a file of batch responses (line {number} is not one)")
    return Answer(content, answer["custom_id"], _failure(answer["response"], answer["error"]))


def _answer(custom_id: Any, response: dict[str, Any] | None, error: dict[str, str] | None) -> Answer:
    record = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
    content = json.dumps(record, ensure_ascii=False).encode(errors="surrogatepass") + b"\n"
    return Answer(content, custom_id, _failure(response, error))


def _failure(response: object, error: object) -> str | None:
    """Returns the error of an answer from a file with arbitrary contents."""
    if error is not None:
        return _message(error)
    status, body = (_field(response, name) for name in ("status_code", "body"))
    return None if status == OK else f"{shown(status)}: {_message(_field(body, 'error'))}"


def _message(error: object) -> str:
    message = _field(error, "message")
    return message if isinstance(message, str) else shown(error)


def _field(value: object, name: str) -> object:
    return cast("dict[str, object]", value).get(name) if isinstance(value, dict) else None
