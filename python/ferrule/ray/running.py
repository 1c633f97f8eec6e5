"""`run_app`: serves an application of Ray Serve until a signal, for `ferrule serve --ray`."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import ray
from ray import serve

from ferrule.errors import EngineError, InvalidParameterError
from ferrule.ray.connection import connect

NAME = "ferrule"
"""Name of the application."""
POLL_INTERVAL = 0.2
"""Seconds between checks whether the replicas have ended."""


def run_app(address: str, app: Any, *, host: str, port: int, on_ready: Callable[[str], None]) -> None:
    """Serves an application on a cluster until SIGTERM or SIGINT; then its replicas finish their requests.

    `on_ready` receives the URL once requests are served. The proxies on all hosts listen on `host` and `port`, unless
    Ray Serve runs on the cluster already.

    Raises InvalidParameterError for an address without a cluster and where the cluster serves this application already,
    EngineError if the replicas cannot be started.
    """
    connect(address)
    untyped_ray: Any = ray
    untyped: Any = serve
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        untyped.start(http_options={"host": host, "port": port})
        if NAME in untyped.status().applications:
            raise InvalidParameterError("ray", address, f"a cluster that does not serve the application {NAME} yet")
        try:
            untyped.run(app, name=NAME)
            on_ready(f"http://{host}:{port}")
            while True:
                signal.pause()
        except RuntimeError as error:
            raise EngineError(f"Ray Serve cannot start the replicas: {error}") from error
        except KeyboardInterrupt:
            pass
        finally:
            untyped.delete(NAME, _blocking=False)  # otherwise it waits for at most a minute
            while NAME in untyped.status().applications:
                time.sleep(POLL_INTERVAL)
            if not untyped.status().applications:
                untyped.shutdown()  # also the proxies, which have this host and port
    finally:
        untyped_ray.shutdown()


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
