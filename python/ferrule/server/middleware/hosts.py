"""Checks of the headers Host and Origin, and CORS.

A page of another site can make a visitor's browser send requests to localhost, or resolve its own name to localhost
(DNS rebinding). The first is visible in Origin, the second in Host: an IP address in Host cannot be a foreign page's.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ferrule._validation import shown
from ferrule.server.errors import ApiError
from ferrule.server.middleware.base import Middleware, header

ANY, LOCALHOST = "*", "localhost"
METHODS = "GET, POST, DELETE, OPTIONS"
EXPOSED_HEADERS = "X-Request-Id, Retry-After, X-Ferrule-Ignored-Fields, X-Ferrule-Served-By"
"""Headers of responses that pages of other origins may read."""
LONGEST_PREFLIGHT = "600"
"""Seconds that a browser may cache the answer to a preflight request."""


class Hosts(Middleware):
    """Accepts localhost, IP addresses, and the hosts and origins of the settings."""

    def check(self, scope: Scope) -> None:
        """Raises ApiError."""
        host = header(scope, "host") or ""
        if not self._is_ours(host):
            raise ApiError(
                403,
                f"header Host must be localhost, an IP address or a name of --allowed-host, got {shown(host)}",
                code="host_not_allowed",
            )
        origin = header(scope, "origin")
        if origin is not None and not self._may_ask(origin, host):
            raise ApiError(
                403,
                f"header Origin must be an origin of --allowed-origin, got {shown(origin)}",
                code="origin_not_allowed",
            )

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on and adds the CORS headers to its response."""
        origin = header(scope, "origin")
        if origin is None or self._is_own(origin, header(scope, "host") or ""):
            await self.app(scope, receive, send)
            return
        given = {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}
        if scope["method"] == "OPTIONS" and header(scope, "access-control-request-method") is not None:
            asked = header(scope, "access-control-request-headers")
            given["Access-Control-Allow-Methods"] = METHODS
            given["Access-Control-Max-Age"] = LONGEST_PREFLIGHT
            if asked is not None:
                given["Access-Control-Allow-Headers"] = asked
            await Response(headers=given)(scope, receive, send)
            return
        given["Access-Control-Expose-Headers"] = EXPOSED_HEADERS

        async def send_allowed(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(given)
            await send(message)

        await self.app(scope, receive, send_allowed)

    def _is_ours(self, host: str) -> bool:
        allowed = self.settings.allowed_hosts
        name = _name(host)
        return ANY in allowed or name in allowed or name == LOCALHOST or _is_address(name)

    def _may_ask(self, origin: str, host: str) -> bool:
        allowed = self.settings.allowed_origins
        if ANY in allowed or origin in allowed or self._is_own(origin, host):
            return True
        return LOCALHOST in allowed and _is_of_this_machine(origin)

    @staticmethod
    def _is_own(origin: str, host: str) -> bool:
        # The scheme is not compared: a proxy may terminate TLS.
        try:
            return urlsplit(origin).netloc.lower() == host.lower() != ""
        except ValueError:
            return False


def _name(host: str) -> str:
    """Returns the host name without the port."""
    name = host.lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0]


def _is_of_this_machine(origin: str) -> bool:
    """Returns whether an origin is localhost or a loopback address, with any port."""
    try:
        name = urlsplit(origin).hostname or ""
        return name == LOCALHOST or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
