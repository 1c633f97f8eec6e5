"""Conversion of a line of a batch file to a request, and of the server's response to an answer."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from ferrule._batch.files import MAX_LINE_BYTES, BatchInput, Line
from ferrule._validation import shown
from ferrule.errors import InvalidParameterError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
WITHOUT_PRIORITY = ("/v1/embeddings",)
"""Endpoints whose requests have no scheduling priority."""
FIELDS = ("custom_id", "method", "url", "body")
UNAVAILABLE = 503
"""Status of a response that another attempt may change."""
Send: TypeAlias = Callable[[str, bytes], Awaitable[tuple[int, bytes]]]
"""Function that sends the body of a POST request to a path and returns status and body of the response."""


class LineError(Exception):
    """A line is not a valid request; `code` identifies the error."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def read_request(line: Line, priority: int | None = None) -> tuple[str, bytes]:
    """Returns the path and the body of the request in a line.

    `priority` is the lowest value of the scheduling priority; None leaves it as it is.

    Raises LineError.
    """
    if line.content is None:
        raise LineError("line_too_long", f"line {line.number} must have at most {MAX_LINE_BYTES} bytes")
    try:
        read = line.read()
    except ValueError as error:
        raise LineError("invalid_json", f"line {line.number} is not valid JSON: {error}") from error
    if not isinstance(read, dict):
        raise LineError("invalid_request", f"line {line.number} must be an object, got {shown(read)}")
    request = cast("dict[str, object]", read)
    for name in FIELDS:
        if name not in request:
            raise LineError("invalid_request", f"{name} is missing")
    unknown = [name for name in request if name not in FIELDS]
    if unknown:
        raise LineError("invalid_request", f"unknown field {shown(unknown[0])}; the fields are {', '.join(FIELDS)}")
    custom_id, method, url, body = (request[name] for name in FIELDS)
    if not isinstance(custom_id, str) or not custom_id:
        raise LineError("invalid_request", f"custom_id must be a non-empty string, got {shown(custom_id)}")
    if line.same_id is not None:
        raise LineError(
            "duplicate_custom_id",
            f"custom_id must be unique, got {shown(custom_id)} again (first in line {line.same_id})",
        )
    if method != "POST":
        raise LineError("invalid_request", f"method must be 'POST', got {shown(method)}")
    if url not in ENDPOINTS:
        raise LineError("invalid_request", f"url must be one of {', '.join(ENDPOINTS)}, got {shown(url)}")
    if not isinstance(body, dict):
        raise LineError("invalid_request", f"body must be an object, got {shown(body)}")
    if cast("dict[str, object]", body).get("stream"):
        raise LineError("invalid_request", "body.stream must be false in a batch, got true")
    url = cast("str", url)
    return url, json.dumps(_with_priority(url, cast("dict[str, object]", body), priority)).encode()


def _with_priority(url: str, body: dict[str, object], lowest: int | None) -> dict[str, object]:
    if lowest is None or url in WITHOUT_PRIORITY:
        return body
    given = body.get("priority")
    if given is None:
        return {**body, "priority": lowest}
    # The application refuses other values.
    return {**body, "priority": max(given, lowest)} if isinstance(given, int) else body


def sender(application: ASGIApp, check_health: Callable[[], Awaitable[None]]) -> Send:
    """Returns a function that sends requests to an application of this process.

    `check_health` raises if requests that were answered with 503 would fail again.
    """

    async def send(path: str, body: bytes) -> tuple[int, bytes]:
        status, answer = await _call(application, path, body)
        if status == UNAVAILABLE:
            await check_health()
        return status, answer

    return send


async def _call(app: ASGIApp, path: str, body: bytes) -> tuple[int, bytes]:
    """Sends a POST request to an ASGI application and returns status and body (https://asgi.readthedocs.io)."""
    status, answer = 0, b""
    body_sent = False

    async def receive() -> MutableMapping[str, Any]:
        nonlocal body_sent
        if body_sent:  # the client stays connected
            await asyncio.Event().wait()
        body_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status, answer
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            answer += message.get("body", b"")

    headers = [
        (b"host", b"localhost"),
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 0),
    }
    try:
        await app(scope, receive, send)
    except Exception:
        if not status:  # Starlette sends a 500 response for an exception, then raises it again for the log
            raise
    return status, answer


def check_model_names(requests: BatchInput, names: Sequence[str]) -> None:
    """Checks that at least one request names one of the models or no model, and rewinds the requests.

    Raises InvalidParameterError if all requests name other models.
    """
    other = None
    for line in requests:
        try:
            _, body = read_request(line)
        except LineError:
            continue
        asked: object = json.loads(body).get("model")
        if not isinstance(asked, str) or asked in names:
            break
        other = other or (line.number, asked)
    else:
        if other is not None:
            number, asked = other
            known = " or ".join(names)
            where = f"line {number} of {requests.path}"
            requirement = f"{known} in {where} (or pass --served-model-name {shlex.quote(asked)})"
            raise InvalidParameterError("model", asked, requirement)
    requests.rewind()
