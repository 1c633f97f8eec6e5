"""ASGI middleware that every request passes before its route.

From the outside to the inside: `root_path` reads the prefix of paths, `log` assigns the request id and writes the log
line, `headers` limits header sizes, `hosts` rejects foreign hosts and origins, `keys` checks API keys, `bodies` limits
size and duration of bodies, `fallback` sends requests to another server that this one cannot serve, `admission` rejects
requests without capacity, `disconnects` aborts requests of clients that disconnected, `leases` keeps the models of a
request loaded. Below all of them, `http_protocol` limits headers while they are received.
"""

from __future__ import annotations

from fastapi import FastAPI

from ferrule.server.context import Context
from ferrule.server.middleware.admission import Admission
from ferrule.server.middleware.bodies import Bodies
from ferrule.server.middleware.disconnects import Disconnects
from ferrule.server.middleware.fallback import Fallbacks
from ferrule.server.middleware.headers import HeaderLimits
from ferrule.server.middleware.hosts import Hosts
from ferrule.server.middleware.keys import Keys
from ferrule.server.middleware.leases import Leases
from ferrule.server.middleware.log import RequestLog
from ferrule.server.middleware.root_path import RootPath

MIDDLEWARE = (RootPath, RequestLog, HeaderLimits, Hosts, Keys, Bodies, Fallbacks, Admission, Disconnects, Leases)
"""Middleware from the outside to the inside."""


def add_middleware(app: FastAPI, server: Context) -> None:
    """Adds all middleware to an application."""
    for layer in reversed(MIDDLEWARE):
        app.add_middleware(layer, server=server)
