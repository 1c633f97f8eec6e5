"""Request ids and the request log: one JSON line for each request, without its contents."""

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
from urllib.parse import quote

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ferrule._validation import shown
from ferrule.server.apis import api_of
from ferrule.server.context import Context
from ferrule.server.error_responses import error_response
from ferrule.server.errors import BAD_REQUEST, ApiError
from ferrule.server.middleware.base import Middleware, header, route_path
from ferrule.server.request_record import RequestRecord, current_record
from ferrule.server.settings import MAX_SECONDS

LOGGER = logging.getLogger("ferrule.server")
CLIENT_CLOSED_REQUEST = 499
"""Status in the log of a request whose client disconnected before the response."""
POLLED = frozenset({"/health", "/metrics"})
"""Paths that are polled; their successful requests are logged at level DEBUG."""
MAX_LOGGED_FIELDS = 1024
"""Maximum number of different unknown fields that are logged."""
_INDEX = re.compile(r"\[\d+\]")
_ID = re.compile(r"[\x21-\x7e]{1,128}")


class JSONFormatter(logging.Formatter):
    """Formats log records as JSON lines; exceptions as type and place."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line of a record."""
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields: dict[str, object] = getattr(record, "fields", {})
        if record.exc_info is not None and record.exc_info[1] is not None:
            fields = {**place_of(record.exc_info[1]), **fields}
        return json.dumps({"time": when, "level": record.levelname.lower(), "event": record.getMessage(), **fields})


class RequestLog(Middleware):
    """Outermost middleware: every request ends with a response and a log line."""

    def __init__(self, app: ASGIApp, *, server: Context) -> None:
        super().__init__(app, server=server)
        self._logged_fields: set[str] = set()

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on and handles all of its exceptions."""
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
                if record.ignored_fields:
                    # A header must not end with a space, which an empty name would leave.
                    names = (quote(name, safe=".[]") or '""' for name in record.ignored_fields)
                    headers["X-Ferrule-Ignored-Fields"] = ", ".join(names)
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
            # uvicorn cancels the remaining requests at shutdown.
            ended = ApiError(503, "the server shut down before the request was finished", code="draining")
            await error_response(ended)(scope, receive, send_named)
        except Exception as error:  # a bug: the log has its place
            _log_internal_error(record, error)
            if not status:
                failure = ApiError(500, "internal server error; see the log of the server", code="internal_error")
                await error_response(failure)(scope, receive, send_named)
        finally:
            current_record.reset(token)
            self._log_ignored(scope, record)
            self.server.counters.observe(record, status or CLIENT_CLOSED_REQUEST)
            if self.server.tracing is not None:
                self.server.tracing.export(
                    record, header(scope, "traceparent"), route_path(scope), status or CLIENT_CLOSED_REQUEST
                )
            level = logging.DEBUG if route_path(scope) in POLLED and status < 400 else logging.INFO
            LOGGER.log(level, "request", extra={"fields": _fields(scope, record, status or CLIENT_CLOSED_REQUEST)})

    def _timeout(self, asked: str | None) -> float | None:
        """Returns the timeout of a request: the server's, or a lower one that the request asks for.

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
            message = f"header X-Request-Timeout must be a number of seconds > 0, got {shown(asked)}"
            raise ApiError(BAD_REQUEST, message, code="invalid_value", param="X-Request-Timeout")
        return wanted if limit is None else min(wanted, limit)

    def _log_ignored(self, scope: Scope, record: RequestRecord) -> None:
        """Logs unknown fields of a request, each once."""
        for name in record.ignored_fields:
            field = f"{route_path(scope)[:200]} {_INDEX.sub('[]', name)}"
            if field not in self._logged_fields and len(self._logged_fields) < MAX_LOGGED_FIELDS:
                self._logged_fields.add(field)
                fields = {"request_id": record.request_id, "path": route_path(scope)[:200], "field": name}
                LOGGER.warning("unknown field ignored", extra={"fields": fields})


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
    if record.fallback is not None:
        fields["fallback"] = record.fallback
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
    """Logs an uncaught exception of an event loop, as its exception handler; asyncio's message has arguments."""
    error = context.get("exception")
    LOGGER.error("internal error", extra={"fields": place_of(error) if isinstance(error, BaseException) else {}})


def _log_internal_error(record: RequestRecord, error: Exception) -> None:
    LOGGER.error("internal error", extra={"fields": {"request_id": record.request_id, **place_of(error)}})


def place_of(error: BaseException) -> dict[str, object]:
    """Returns type and place of an error, without its text, which may contain parts of the request."""
    where = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
    return {"type": type(error).__name__, "where": where}
