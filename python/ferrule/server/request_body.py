"""Bodies of requests, parsed and checked; large ones in a thread, so that nobody waits for them."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from ferrule._engine.workers import WORKERS
from ferrule.server.validation import validation_error

LARGE = 64 << 10
"""Bytes from which on a thread is worth its while."""


class BodyRoute(APIRoute):
    """A route whose body is read here: FastAPI finds it as the model that it wants, and lets it be."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, with requests of ours."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        annotation: Any = self.body_field.field_info.annotation
        body: TypeAdapter[Any] = TypeAdapter(annotation)

        async def read(request: Request) -> Response:
            return await handle(_ValidatedRequest(request, body))

        return read


class _ValidatedRequest(Request):
    def __init__(self, request: Request, body: TypeAdapter[Any]) -> None:
        super().__init__(request.scope, request.receive)
        self._expected = body

    async def json(self) -> Any:
        """The body as its model.

        Raises json.JSONDecodeError, ApiError.
        """
        given = await self.body()
        return _read(self._expected, given) if len(given) < LARGE else await WORKERS.run(_read, self._expected, given)


def _read(expected: TypeAdapter[Any], given: bytes) -> Any:
    body = json.loads(given)
    try:
        return expected.validate_python(body)
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        located = {**found, "loc": ("body", *found["loc"])}
        raise validation_error(RequestValidationError([located], body=body)) from None
