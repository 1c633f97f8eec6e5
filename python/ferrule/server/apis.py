"""API of a path: the form of its errors and the header of its request id."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ferrule.server import anthropic, llama_cpp, ollama
from ferrule.server.errors import ApiError


@dataclass(frozen=True)
class Api:
    """Properties of an API that hold for all of its routes."""

    path: str
    """Prefix of its paths, or with `whole` its one path."""
    error_body: Callable[[ApiError], dict[str, Any]]
    """Makes the error body."""
    request_id_header: str | None = None
    """Header of the request id besides X-Request-Id."""
    whole: bool = False
    """Whether `path` is a whole path."""

    def has(self, path: str) -> bool:
        """Returns whether a path belongs to the API."""
        return path == self.path if self.whole else path.startswith(self.path)


APIS = (
    Api("/v1/messages", anthropic.error_body, "Request-Id"),
    Api("/api/", ollama.error_body),
    Api("/slots/", llama_cpp.error_body),
    *(Api(path, llama_cpp.error_body, whole=True) for path in llama_cpp.PATHS),
)
OPENAI = Api("/", ApiError.body)


def api_of(path: str) -> Api:
    """Returns the first API that has the path; OpenAI's otherwise."""
    return next((api for api in APIS if api.has(path)), OPENAI)
