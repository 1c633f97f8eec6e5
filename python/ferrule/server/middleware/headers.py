"""Limit of the size of headers.

Those that come in pieces are cut off where the bytes are read (`wire`); what comes at once is measured here.
"""

from __future__ import annotations

from starlette.types import Scope

from ferrule.server.errors import ApiError
from ferrule.server.middleware.base import Middleware


class HeaderSizes(Middleware):
    """Answers 431 for headers, including the path, above the limit."""

    def check(self, scope: Scope) -> None:
        """Raises ApiError."""
        size = len(scope["raw_path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) for name, value in scope["headers"])
        limit = self.settings.max_header_bytes
        if size > limit:
            message = f"headers must have at most {limit} bytes (max_header_bytes), got {size}"
            raise ApiError(431, message, code="headers_too_large")
