"""API keys, which all paths except those of the health check require."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac

from starlette.types import ASGIApp, Scope

from ferrule.server.context import Context
from ferrule.server.errors import ApiError
from ferrule.server.middleware.base import Middleware, header, route_path

OPEN = frozenset({"/health", "/v1/health"})
"""Paths without authentication, for load balancers."""


class Keys(Middleware):
    """Requires one of the configured API keys; the comparison takes constant time."""

    def __init__(self, app: ASGIApp, *, server: Context) -> None:
        super().__init__(app, server=server)
        self._digests = [_digest(key.encode()) for key in server.settings.api_keys]

    def check(self, scope: Scope) -> None:
        """Raises ApiError."""
        if not self._digests or route_path(scope) in OPEN:
            return
        given = _digest(_key(scope))
        # Every key is compared, so that the time does not depend on the match.
        if not sum(hmac.compare_digest(given, digest) for digest in self._digests):
            raise ApiError(
                401,
                "invalid or missing API key; send it as Authorization: Bearer, X-Api-Key, or password of HTTP Basic",
                code="invalid_api_key",
                headers={"WWW-Authenticate": 'Basic realm="ferrule", charset="UTF-8"'},
            )


def _digest(key: bytes) -> bytes:
    """Returns a digest, which has the same length for every key."""
    return hashlib.sha256(key).digest()


def _key(scope: Scope) -> bytes:
    """Returns the key of a request; empty without one."""
    scheme, _, value = (header(scope, "authorization") or "").partition(" ")
    match scheme.lower():
        case "bearer":
            return _bytes(value.strip())
        case "basic":
            try:
                return base64.b64decode(value).partition(b":")[2]
            except (binascii.Error, ValueError):
                return b""
        case _:
            return _bytes(header(scope, "x-api-key") or "")


def _bytes(value: str) -> bytes:
    """Returns the bytes of a header, which Starlette decodes as Latin-1."""
    return value.encode("latin-1")
