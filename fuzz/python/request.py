"""HTTP requests to a server with a fake engine: no body causes a server error.

The first line of an input selects the route, the rest is the body.
"""

import logging
import sys
import zlib
from functools import partial

import atheris

with atheris.instrument_imports(include=["ferrule.server", "ferrule._params"]):
    import fakes

    fakes.install()
    from ferrule import AsyncLLM
    from ferrule.server import ServerSettings
    from server.live import Live, serving

SETTINGS = ServerSettings(ollama=True)
logging.disable(logging.WARNING)


class ServerError(Exception):
    """A request that caused a server error."""


def send(live: Live, routes: list[str], data: bytes) -> None:
    """Sends a request, to a route that the first line names or else selects by its checksum."""
    first, _, body = data.partition(b"\n")
    path = first.decode(errors="replace")
    if path not in routes:
        path = routes[zlib.crc32(first) % len(routes)]
    answer = live.request(path, body, method="POST")
    # 503 is a full queue or an unavailable operation.
    if answer.status >= 500 and answer.status != 503:
        raise ServerError(path, body, answer.status, answer.body)


with serving(SETTINGS, llm=lambda: AsyncLLM(max_model_len=48)) as server:
    described = server.request("/openapi.json").json["paths"]
    posted = sorted(path for path, methods in described.items() if "post" in methods and "{" not in path)
    atheris.Setup(sys.argv, partial(send, server, posted))
    atheris.Fuzz()
