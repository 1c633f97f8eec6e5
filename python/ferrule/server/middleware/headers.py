"""How large headers may be.

Those that come in pieces are cut off where the bytes are read (`wire`); what comes at once is measured here.
"""

from __future__ import annotations

from starlette.types import Scope

from ferrule.server.errors import ApiError
from ferrule.server.middleware.base import Middleware


class HeaderSizes(Middleware):
    """431 for more than the settings allow, the path included."""

    def check(self, scope: Scope) -> None:
        """Raises ApiError."""
        size = len(scope["raw_path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) for name, value in scope["headers"])
        limit = self.settings.max_header_bytes
        if size > limit:
            message = f"the headers have {size} bytes; the limit is max_header_bytes, {limit}"
            raise ApiError(431, message, code="headers_too_large")
