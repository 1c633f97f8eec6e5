"""Which API a path belongs to: the form that its errors have, whoever raises them, and where a request's id goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ferrule.server import anthropic, ollama
from ferrule.server.errors import ApiError


@dataclass(frozen=True)
class Family:
    """What clients of an API expect beside what its routes say."""

    path: str
    """What all of its paths begin with."""
    error_body: Callable[[ApiError], dict[str, Any]]
    request_id_header: str | None = None
    """Beside X-Request-Id."""


FAMILIES = (
    Family("/v1/messages", anthropic.error_body, "Request-Id"),
    Family("/api/", ollama.error_body),
)
OPENAI = Family("/", ApiError.body)


def family_of(path: str) -> Family:
    """The first that fits; OpenAI's where none does."""
    return next((family for family in FAMILIES if path.startswith(family.path)), OPENAI)
