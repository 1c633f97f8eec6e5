"""What a request passes before a route sees it: each guard is a layer that knows nothing of the others.

From the outside: `log` names the request and writes its line, `headers` bounds them, `hosts` turns foreign pages away,
`keys` those without a key, `admission` whom there is no room for, `bodies` what is too large or too slow, and
`disconnects` ends the work for a client that has gone. Below them all, `wire` bounds headers as their bytes come in.
"""

from __future__ import annotations

from fastapi import FastAPI

from ferrule.server.context import Context
from ferrule.server.guards.admission import Admission
from ferrule.server.guards.bodies import Bodies
from ferrule.server.guards.disconnects import Disconnects
from ferrule.server.guards.headers import HeaderSizes
from ferrule.server.guards.hosts import Hosts
from ferrule.server.guards.keys import Keys
from ferrule.server.guards.log import RequestLog

GUARDS = (RequestLog, HeaderSizes, Hosts, Keys, Admission, Bodies, Disconnects)
"""From the outside to the inside."""


def guard(app: FastAPI, server: Context) -> None:
    """Puts the guards around an application."""
    for layer in reversed(GUARDS):
        app.add_middleware(layer, server=server)
