"""Response bodies as ASCII JSON, which can represent any text: a request may contain a lone surrogate."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from pydantic import BaseModel
from starlette.responses import Response


def encoded(body: object) -> bytes:
    """Serializes a body or a part of one."""
    return json.dumps(_plain(body), separators=(",", ":"), allow_nan=False).encode()


def json_response(body: BaseModel, headers: Mapping[str, str] | None = None) -> Response:
    """Makes a response from a body."""
    return Response(encoded(body), headers=headers, media_type="application/json")


def _plain(value: object) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump()
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in cast("Mapping[str, object]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in cast("list[object]", value)]
    return value
