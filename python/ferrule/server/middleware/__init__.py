"""What a request passes before a route sees it: each guard is a layer that knows nothing of the others.

From the outside: `log` names the request and writes its line, `headers` bounds them, `hosts` turns foreign pages away,
`keys` those without a key, `admission` whom there is no room for, `bodies` what is too large or too slow, and
`disconnects` ends the work for a client that has gone. Below them all, `wire` bounds headers as their bytes come in.
"""

from __future__ import annotations

from fastapi import FastAPI

from ferrule.server.context import Context
from ferrule.server.middleware.admission import Admission
from ferrule.server.middleware.bodies import Bodies
from ferrule.server.middleware.disconnects import Disconnects
from ferrule.server.middleware.headers import HeaderSizes
from ferrule.server.middleware.hosts import Hosts
from ferrule.server.middleware.keys import Keys
from ferrule.server.middleware.log import RequestLog

MIDDLEWARE = (RequestLog, HeaderSizes, Hosts, Keys, Admission, Bodies, Disconnects)
"""From the outside to the inside."""


def add_middleware(app: FastAPI, server: Context) -> None:
    """Puts the guards around an application."""
    for layer in reversed(MIDDLEWARE):
        app.add_middleware(layer, server=server)
