"""API of a path: the form of its errors and the header of its request id."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ferrule.server import anthropic, ollama
from ferrule.server.errors import ApiError


@dataclass(frozen=True)
class Api:
    """Properties of an API that hold for all of its routes."""

    path: str
    """Prefix of its paths."""
    error_body: Callable[[ApiError], dict[str, Any]]
    """Makes the error body."""
    request_id_header: str | None = None
    """Header of the request id besides X-Request-Id."""


APIS = (
    Api("/v1/messages", anthropic.error_body, "Request-Id"),
    Api("/api/", ollama.error_body),
)
OPENAI = Api("/", ApiError.body)


def api_of(path: str) -> Api:
    """Returns the first API whose prefix matches; OpenAI's otherwise."""
    return next((api for api in APIS if path.startswith(api.path)), OPENAI)
