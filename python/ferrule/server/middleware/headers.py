"""Limit of the size of headers, and the rule about two lengths of one body.

Headers that come in pieces are cut off where the bytes are read (`http_protocol`); what comes at once is measured here.
"""

from __future__ import annotations

from starlette.types import Scope

from ferrule.server.errors import BAD_REQUEST, ApiError
from ferrule.server.middleware.base import Middleware, header


class HeaderLimits(Middleware):
    """Answers 431 for headers, including the path, above the limit, and 400 for a body with two lengths."""

    def check(self, scope: Scope) -> None:
        """Raises ApiError."""
        size = len(scope["raw_path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) for name, value in scope["headers"])
        limit = self.settings.max_header_bytes
        if size > limit:
            message = f"headers must have at most {limit} bytes (max_header_bytes), got {size}"
            raise ApiError(431, message, code="headers_too_large")
        if header(scope, "transfer-encoding") is not None and header(scope, "content-length") is not None:
            # A proxy may use the other length and read the rest as a request (request smuggling, RFC 9112, 6.3).
            message = "headers must not have both Content-Length and Transfer-Encoding"
            raise ApiError(BAD_REQUEST, message, code="invalid_http", headers={"Connection": "close"})
