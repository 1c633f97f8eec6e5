"""TCP connections from workers to the engine and to each other, which begin with the token of the listener."""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from ferrule.errors import EngineError

TOKEN_BYTES = 32
HELLO = struct.Struct(f"<{TOKEN_BYTES}sI")
"""First bytes of a worker: the token of the listener, and the number of the worker."""
HELLO_SECONDS = 10.0
"""Seconds in which a connection must send its hello; others are closed."""
MAX_PENDING = 64
"""Maximum number of connections that have not sent their hello; the oldest is closed for another."""
POLL_SECONDS = 0.2
"""Interval in seconds at which the end of workers is noticed."""
KEEPALIVE_SECONDS, KEEPALIVE_PROBES = 10, 6
"""Seconds between probes of a silent connection, and probes without an answer after which its host counts as lost."""


@dataclass(frozen=True)
class Destination:
    """Address that workers connect to, and the token that they send."""

    host: str
    port: int
    token: bytes = field(repr=False)


@dataclass
class _Pending:
    """Connection that has not sent its whole hello."""

    deadline: float
    received: bytes = field(default=b"")


class Listener:
    """Listens for workers on an address of this host; a context manager that stops listening."""

    def __init__(self, host: str) -> None:
        """Listens on a free port.

        Raises OSError if `host` is not an address of this host.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=MAX_PENDING)
        self._socket.setblocking(False)
        self.destination = Destination(host, self._socket.getsockname()[1], secrets.token_bytes(TOKEN_BYTES))

    def accept(self, workers: Sequence[int], seconds: float, check: Callable[[], None]) -> list[socket.socket]:
        """Returns the connections of the workers with these numbers, in this order.

        `check` is called repeatedly and may raise an error. Connections that send something else than a hello of a
        missing worker are closed.

        Raises EngineError if a worker has not connected within `seconds`.
        """
        found: dict[int, socket.socket] = {}
        pending: dict[socket.socket, _Pending] = {}
        end = time.monotonic() + seconds
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._socket, selectors.EVENT_READ)
                while len(found) < len(workers):
                    check()
                    if time.monotonic() > end:
                        missing = ", ".join(str(worker) for worker in workers if worker not in found)
                        raise EngineError(f"workers have not connected within {seconds:.0f} s: {missing}")
                    for key, _ in selector.select(POLL_SECONDS):
                        if key.fileobj is self._socket:
                            self._accept_pending(pending, selector)
                            continue
                        connection = cast("socket.socket", key.fileobj)
                        worker = self._read_hello(connection, pending[connection])
                        if worker is None:
                            continue
                        selector.unregister(connection)
                        del pending[connection]
                        if worker in found or worker not in workers:
                            connection.close()
                        else:
                            configure(connection)
                            found[worker] = connection
                    for connection in [each for each, hello in pending.items() if hello.deadline < time.monotonic()]:
                        selector.unregister(connection)
                        del pending[connection]
                        connection.close()
            return [found.pop(worker) for worker in workers]
        finally:
            for connection in [*pending, *found.values()]:
                connection.close()

    def close(self) -> None:
        """Stops listening."""
        self._socket.close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept_pending(self, pending: dict[socket.socket, _Pending], selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError:  # it was closed before it was accepted
            return
        if len(pending) >= MAX_PENDING:
            oldest = next(iter(pending))
            selector.unregister(oldest)
            del pending[oldest]
            oldest.close()
        connection.setblocking(False)
        pending[connection] = _Pending(time.monotonic() + HELLO_SECONDS)
        selector.register(connection, selectors.EVENT_READ)

    def _read_hello(self, connection: socket.socket, pending: _Pending) -> int | None:
        """Reads what has arrived of a hello. Returns its worker, None if it is incomplete, -1 if it is not a hello."""
        try:
            received = connection.recv(HELLO.size - len(pending.received))
        except BlockingIOError:
            return None
        except OSError:  # reset
            return -1
        pending.received += received
        if not received:
            return -1
        if len(pending.received) < HELLO.size:
            return None
        token, worker = HELLO.unpack(pending.received)
        return worker if hmac.compare_digest(token, self.destination.token) else -1


def connect(destination: Destination, worker: int, seconds: float) -> socket.socket:
    """Connects to a listener and sends the hello of worker `worker`.

    Raises OSError.
    """
    connection = socket.create_connection((destination.host, destination.port), timeout=seconds)
    connection.sendall(HELLO.pack(destination.token, worker))
    configure(connection)
    return connection


def configure(connection: socket.socket) -> None:
    """Makes a connection blocking, without delay of small messages, and lets it end if the other host is lost."""
    connection.setblocking(True)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_NODELAY", 1),
        ("TCP_KEEPIDLE", KEEPALIVE_SECONDS),
        ("TCP_KEEPINTVL", KEEPALIVE_SECONDS),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
    ):
        _set(connection, name, value)


def end_unless_acknowledged(connection: socket.socket) -> None:
    """Lets a connection end if the other host does not acknowledge what is sent, for which there are no probes.

    Only for the engine's end of connections to workers: the limit includes the time in which the other side does not
    read. A worker waits for the engine during the steps of other stages, and for other workers of its stage while they
    compute. When the host of a worker is lost, the engine closes its connections to all workers, which then end.
    """
    _set(connection, "TCP_USER_TIMEOUT", 1000 * KEEPALIVE_SECONDS * KEEPALIVE_PROBES)


def _set(connection: socket.socket, name: str, value: int) -> None:
    option = getattr(socket, name, None)  # not on every system
    if option is not None:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
