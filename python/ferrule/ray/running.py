"""`run_app`: serves an application of Ray Serve until a signal, for `ferrule serve --ray`."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from ferrule.errors import EngineError, InvalidParameterError
from ferrule.ray.connection import connect
from ferrule.server.serving import http_url

NAME = "ferrule"
"""Name of the application."""
POLL_INTERVAL = 0.2
"""Seconds between checks whether the replicas have ended."""
STATUS_INTERVAL = 1.0
"""Seconds between checks whether the application still exists."""
CONTROLLER, NAMESPACE = "SERVE_CONTROLLER_ACTOR", "serve"
"""Name of the actor that controls Ray Serve, and its namespace."""
ALL_ADDRESSES = ("0.0.0.0", "::", "")  # noqa: S104  # compared, not bound
"""Hosts that are not the address of a machine."""


def run_app(address: str, app: Any, *, host: str, port: int, on_ready: Callable[[str], None]) -> None:
    """Serves an application on a cluster until SIGTERM or SIGINT; then its replicas finish their requests.

    `on_ready` receives the URL once requests are served. The proxies on all hosts listen on `host` and `port`. Ray
    Serve ends with the command that started it, unless it serves other applications.

    Raises InvalidParameterError for an address without a cluster, a cluster that serves this application or another one
    at / already or listens elsewhere, and a port that is in use; EngineError if the replicas cannot be started, another
    program deletes the application, or the cluster ends.
    """
    ray_api: Any = ray
    connect(address)
    try:
        with _interrupts() as interrupted:  # after `connect`, where Ray sets a handler of SIGTERM
            _run(address, app, host=host, port=port, on_ready=on_ready, interrupted=interrupted)
    except (RayError, RayServeException) as error:
        raise EngineError(f"the Ray cluster failed: {_last_line(error)}") from error
    finally:
        ray_api.shutdown()


def _run(
    address: str,
    app: Any,
    *,
    host: str,
    port: int,
    on_ready: Callable[[str], None],
    interrupted: list[int],
) -> None:
    serve_api: Any = serve
    started = deployed = False
    try:
        with contextlib.suppress(KeyboardInterrupt):  # at most one: a second signal ends `_end`
            controller = _controller()
            if controller is None:
                started = True
                _start(host, port)
            else:
                _check_address(controller, host, port)
            if NAME in serve_api.status().applications:
                raise InvalidParameterError("ray", address, f"a cluster that does not serve the application {NAME} yet")
            deployed = True
            _deploy(address, app)
            on_ready(http_url(_own_address() if host in ALL_ADDRESSES else host, port))
            while not interrupted and _is_served():
                time.sleep(STATUS_INTERVAL)  # a signal ends it
            if not interrupted:
                raise EngineError(f"the application {NAME} was deleted from Ray Serve by another program, or Ray ended")
    finally:
        with contextlib.suppress(RayError, RayServeException):  # the cluster has ended
            _end(started=started, deployed=deployed)


def _controller() -> Any:
    """Returns the actor that controls Ray Serve; None if Ray Serve does not run on the cluster."""
    ray_api: Any = ray
    try:
        return ray_api.get_actor(CONTROLLER, namespace=NAMESPACE)
    except ValueError:
        return None


def _check_address(controller: Any, host: str, port: int) -> None:
    """Raises InvalidParameterError if Ray Serve listens on another host or port."""
    ray_api: Any = ray
    found = ray_api.get(controller.get_http_config.remote())
    place = f"where Ray Serve listens on this cluster already ({http_url(str(found.host), found.port)})"
    if found.port != port:
        raise InvalidParameterError("port", port, f"{found.port}, {place}")
    if found.host != host:
        raise InvalidParameterError("host", host, f"{found.host}, {place}")


def _start(host: str, port: int) -> None:
    """Starts Ray Serve.

    Raises InvalidParameterError.
    """
    serve_api: Any = serve
    try:
        serve_api.start(http_options={"host": host, "port": port})
    except (RayError, RuntimeError, TimeoutError) as error:
        requirement = f"free on the address {host} of all hosts of the cluster ({_last_line(error)})"
        raise InvalidParameterError("port", port, requirement) from error


def _deploy(address: str, app: Any) -> None:
    """Starts the replicas of the application.

    Raises InvalidParameterError if another application has its path, and EngineError.
    """
    serve_api: Any = serve
    try:
        serve_api.run(app, name=NAME)
    except RayServeException as error:
        requirement = f"a cluster without an application at / ({_last_line(error)})"
        raise InvalidParameterError("ray", address, requirement) from error
    except (RayError, RuntimeError, TimeoutError) as error:
        raise EngineError(f"Ray Serve cannot start the replicas: {error}") from error


def _is_served() -> bool:
    serve_api: Any = serve
    try:
        return NAME in serve_api.status().applications
    except (RayError, RayServeException):
        return False


def _end(*, started: bool, deployed: bool) -> None:
    """Waits until the replicas have finished their requests, and ends Ray Serve if this command started it."""
    serve_api: Any = serve
    if deployed:
        serve_api.delete(NAME, _blocking=False)  # otherwise it waits for at most a minute
        while NAME in serve_api.status().applications:
            time.sleep(POLL_INTERVAL)
    if started and not serve_api.status().applications:
        serve_api.shutdown()  # also the proxies, which have this host and port


def _own_address() -> str:
    """Returns the address of this host in the cluster."""
    ray_api: Any = ray
    return ray_api.util.get_node_ip_address()


def _last_line(error: Exception) -> str:
    """Returns the line of an error of Ray that has the cause; the others are the traceback of an actor."""
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)


@contextmanager
def _interrupts() -> Generator[list[int]]:
    """Raises KeyboardInterrupt at SIGTERM and SIGINT, and yields the list of the signals that were received.

    Ray may catch the exception in a callback; the list then still has the signal.
    """
    received: list[int] = []

    def interrupt(number: int, _frame: FrameType | None) -> NoReturn:
        received.append(number)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
