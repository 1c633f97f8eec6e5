"""Which API a path belongs to: the form that its errors have, whoever raises them, and where a request's id goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ferrule.server import anthropic, ollama
from ferrule.server.errors import ApiError


@dataclass(frozen=True)
class Api:
    """What clients of an API expect beside what its routes say."""

    path: str
    """What all of its paths begin with."""
    error_body: Callable[[ApiError], dict[str, Any]]
    request_id_header: str | None = None
    """Beside X-Request-Id."""


APIS = (
    Api("/v1/messages", anthropic.error_body, "Request-Id"),
    Api("/api/", ollama.error_body),
)
OPENAI = Api("/", ApiError.body)


def api_of(path: str) -> Api:
    """The first that fits; OpenAI's where none does."""
    return next((api for api in APIS if path.startswith(api.path)), OPENAI)
