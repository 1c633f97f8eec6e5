"""A name for each request, and a line of JSON when it has ended: how it went, and never what was in it."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import traceback
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from time import perf_counter

from starlette.datastructures import MutableHeaders
from starlette.types import Message, Receive, Scope, Send

from ferrule._validation import shown
from ferrule.server.apis import api_of
from ferrule.server.error_responses import error_response
from ferrule.server.errors import BAD_REQUEST, ApiError
from ferrule.server.middleware.base import Middleware, header, route_path
from ferrule.server.request_record import RequestRecord, current_record
from ferrule.server.settings import MAX_SECONDS

LOGGER = logging.getLogger("ferrule.server")
CLIENT_CLOSED_REQUEST = 499
"""The status, in the log alone, of a request whose client had gone before it was answered."""
POLLED = frozenset({"/health", "/metrics"})
"""What is asked for again and again; a line for each would hide the others."""
_ID = re.compile(r"[\x21-\x7e]{1,128}")


class JSONFormatter(logging.Formatter):
    """One JSON object a line; of an exception its type and its place."""

    def format(self, record: logging.LogRecord) -> str:
        """A line."""
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields: dict[str, object] = getattr(record, "fields", {})
        if record.exc_info is not None and record.exc_info[1] is not None:
            fields = {**_place(record.exc_info[1]), **fields}
        return json.dumps({"time": when, "level": record.levelname.lower(), "event": record.getMessage(), **fields})


class RequestLog(Middleware):
    """Outermost: whatever happens inside ends as a response, and as a line."""

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes it on, whatever happens to it."""
        given = header(scope, "x-request-id")
        record = RequestRecord(given if given is not None and _ID.fullmatch(given) else uuid.uuid4().hex)
        api = api_of(route_path(scope))
        record.error_body = api.error_body
        token = current_record.set(record)
        status = 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = record.request_id
                if api.request_id_header is not None:
                    headers[api.request_id_header] = record.request_id
            await send(message)

        try:
            record.timeout = self._timeout(header(scope, "x-request-timeout"))
            await self.app(scope, receive, send_named)
        except ApiError as error:
            await error_response(error)(scope, receive, send_named)
        except asyncio.CancelledError:
            if status or not self.server.models.draining:
                raise
            # The server ends, and what it still did for this request cannot be broken off otherwise.
            ended = ApiError(503, "the server ended before the request was answered", code="draining")
            await error_response(ended)(scope, receive, send_named)
        except Exception as error:  # a defect of ours: the response says that, the log where
            _log_internal_error(record, error)
            if not status:
                failure = ApiError(500, "a defect of the server: see its log", code="internal_error")
                await error_response(failure)(scope, receive, send_named)
        finally:
            current_record.reset(token)
            self.server.counters.note(record, status or CLIENT_CLOSED_REQUEST)
            if self.server.tracing is not None:
                self.server.tracing.note(
                    record, header(scope, "traceparent"), route_path(scope), status or CLIENT_CLOSED_REQUEST
                )
            level = logging.DEBUG if route_path(scope) in POLLED and status < 400 else logging.INFO
            LOGGER.log(level, "request", extra={"fields": _fields(scope, record, status or CLIENT_CLOSED_REQUEST)})

    def _timeout(self, asked: str | None) -> float | None:
        """What the server allows, or less where the request asks for less.

        Raises ApiError.
        """
        limit = self.settings.request_timeout
        if asked is None:
            return limit
        try:
            wanted = float(asked)
        except ValueError:
            wanted = math.nan
        if not 0 < wanted <= MAX_SECONDS:
            message = f"the header X-Request-Timeout is {shown(asked)}; it must be a number of seconds above 0"
            raise ApiError(BAD_REQUEST, message, code="invalid_value", param="X-Request-Timeout")
        return wanted if limit is None else min(wanted, limit)


def _fields(scope: Scope, record: RequestRecord, status: int) -> dict[str, object]:
    fields: dict[str, object] = {
        "request_id": record.request_id,
        "method": scope["method"],
        "path": route_path(scope)[:200],
        "status": status,
        "seconds": round(perf_counter() - record.arrival, 4),
    }
    if record.model is not None:
        fields["model"] = record.model
    if record.error is not None:
        fields["error"] = record.error
    if record.prompts:
        first = [each.metrics.time_to_first_token for each in record.prompts if each.metrics is not None]
        fields |= {
            "prompt_tokens": sum(each.prompt_tokens or 0 for each in record.prompts),
            "output_tokens": sum(each.output_tokens for each in record.prompts),
            "time_to_first_token": min((each for each in first if each is not None), default=None),
            "finish_reasons": [reason for each in record.prompts for reason in each.finish_reasons],
        }
    return fields


def log_uncaught(_loop: asyncio.AbstractEventLoop, context: Mapping[str, object]) -> None:
    """What nobody caught in an event loop, as its exception handler is told; asyncio's own message shows arguments."""
    error = context.get("exception")
    LOGGER.error("defect", extra={"fields": _place(error) if isinstance(error, BaseException) else {}})


def _log_internal_error(record: RequestRecord, error: Exception) -> None:
    LOGGER.error("defect", extra={"fields": {"request_id": record.request_id, **_place(error)}})


def _place(error: BaseException) -> dict[str, object]:
    # Not the error's text, which may hold what the request held.
    where = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
    return {"type": type(error).__name__, "where": where}
