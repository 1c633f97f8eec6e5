"""Parsing and validation of request bodies; large ones in a worker thread, so that the event loop is not blocked."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from ferrule._engine.workers import input_size, workers_for
from ferrule.server.context import Context
from ferrule.server.errors import BAD_REQUEST, ApiError
from ferrule.server.request_record import current_record
from ferrule.server.schema.base import check_other_fields
from ferrule.server.settings import REJECT, WARN
from ferrule.server.validation import validation_error

LARGE_BODY = 64 << 10
"""Bytes from which a body is parsed in a worker thread."""


class BodyRoute(APIRoute):
    """A route that validates the request body itself; FastAPI receives the finished model."""

    any_content_type: ClassVar[bool] = False
    """Whether every body is parsed as JSON, whatever its Content-Type."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Returns FastAPI's handler, called with a request whose `json` is the validated model."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        annotation: Any = self.body_field.field_info.annotation
        body: TypeAdapter[Any] = TypeAdapter(annotation)

        async def read(request: Request) -> Response:
            scope = _as_json(request.scope) if self.any_content_type else request.scope
            return await handle(_ValidatedRequest(scope, request, body))

        return read


class AnyTypeBodyRoute(BodyRoute):
    """A route of an API whose clients send JSON with any Content-Type, or with none."""

    any_content_type = True


def _as_json(scope: Scope) -> Scope:
    """Returns the scope of a request with the Content-Type that FastAPI requires."""
    name = b"content-type"
    headers = [each for each in scope["headers"] if each[0] != name]
    return {**scope, "headers": [*headers, (name, b"application/json")]}


class _ValidatedRequest(Request):
    def __init__(self, scope: Scope, request: Request, model: TypeAdapter[Any]) -> None:
        super().__init__(scope, request.receive)
        self._model = model

    async def body(self) -> bytes:
        """Returns the whole body; the pieces of a large one are joined in a worker thread."""
        if not hasattr(self, "_body"):
            pieces = [piece async for piece in self.stream()]
            size = sum(map(len, pieces))
            input_size.set(size)
            self._body = b"".join(pieces) if size < LARGE_BODY else await workers_for().run(b"".join, pieces)
        return self._body

    async def json(self) -> Any:
        """Returns the body as its model.

        Raises json.JSONDecodeError, ApiError.
        """
        content = await self.body()
        if len(content) < LARGE_BODY:
            model, unknown = _parse(self._model, content)
        else:
            model, unknown = await workers_for().run(_parse, self._model, content)
        if unknown:
            server: Context = self.app.state.server
            _handle_unknown(server.settings.unknown_fields, unknown)
        return model


def read_json(content: bytes) -> Any:
    """Returns the value of a body, as `json.loads` does.

    pydantic's parser reads long strings ten times as fast, and holds the GIL for so much less time. It refuses whatever
    is not strict JSON, and lone surrogates, which `json` reads or describes in its error.

    Raises json.JSONDecodeError, UnicodeDecodeError.
    """
    try:
        return from_json(content)
    except ValueError:
        return json.loads(content)


def _parse(model: TypeAdapter[Any], content: bytes) -> tuple[Any, list[str]]:
    body = read_json(content)
    try:
        parsed = model.validate_python(body)
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        located = {**found, "loc": ("body", *found["loc"])}
        raise validation_error(RequestValidationError([located], body=body)) from None
    return parsed, check_other_fields(parsed)


def _handle_unknown(policy: str, unknown: list[str]) -> None:
    if policy == REJECT:
        message = f"unknown field: {unknown[0]}; leave it out, or start the server with --unknown-fields warn"
        raise ApiError(BAD_REQUEST, message, code="unknown_parameter", param=unknown[0])
    record = current_record.get()
    if policy == WARN and record is not None:
        record.ignored_fields = unknown
