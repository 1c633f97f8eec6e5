"""API keys: without one, nothing but /health says anything."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac

from starlette.types import ASGIApp, Scope

from ferrule.server.context import Context
from ferrule.server.errors import ApiError
from ferrule.server.middleware.base import Middleware, header, route_path

OPEN = frozenset({"/health"})
"""What a load balancer asks for."""


class Keys(Middleware):
    """One of the settings' keys, where there are any, compared in a time that tells nothing of them."""

    def __init__(self, app: ASGIApp, *, server: Context) -> None:
        super().__init__(app, server=server)
        self._digests = [_digest(key.encode()) for key in server.settings.api_keys]

    def check(self, scope: Scope) -> None:
        """Raises ApiError."""
        if not self._digests or route_path(scope) in OPEN:
            return
        given = _digest(_key(scope))
        # Each is compared, whichever fits.
        if not sum(hmac.compare_digest(given, digest) for digest in self._digests):
            raise ApiError(
                401,
                "an API key is needed: Authorization: Bearer, X-Api-Key, or the password of HTTP Basic",
                code="invalid_api_key",
                headers={"WWW-Authenticate": 'Basic realm="ferrule", charset="UTF-8"'},
            )


def _digest(key: bytes) -> bytes:
    """Of one length, whatever the key's."""
    return hashlib.sha256(key).digest()


def _key(scope: Scope) -> bytes:
    """What the request brings; empty where it brings nothing."""
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
    """A header as it was sent: it is read as if it were Latin-1."""
    return value.encode("latin-1")
