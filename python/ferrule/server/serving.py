"""`serve`: runs the server until a signal, then drains and shuts down."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from urllib.parse import quote

import uvicorn

from ferrule._api.async_llm import AsyncLLM
from ferrule._engine.workers import LARGE_WORKERS, WORKERS
from ferrule.server.app import create_app
from ferrule.server.batches.jobs import Batches
from ferrule.server.fallback import Fallback
from ferrule.server.middleware.http_protocol import LimitedH11Protocol, raise_file_limit
from ferrule.server.middleware.log import LOGGER, log_uncaught
from ferrule.server.models import Models
from ferrule.server.residency import OnDemand
from ferrule.server.responses.background import BackgroundResponses
from ferrule.server.settings import ServerSettings
from ferrule.server.tracing import Tracing

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000
BACKLOG = 2048
"""Maximum number of connections that wait to be accepted."""
ACCEPT_BATCH = 16
"""Connections that are accepted in one iteration of the event loop before they are counted again."""
RESPONSE_GRACE = 5
"""Seconds to send the last responses after the requests have ended."""


def serve(
    load: Callable[[], Mapping[str, AsyncLLM | OnDemand]],
    settings: ServerSettings | None = None,
    *,
    host: str = DEFAULT_HOST,
    port: int = DEFAULT_PORT,
    uds: str | None = None,
    tls: ssl.SSLContext | None = None,
    on_listening: Callable[[str], None] | None = None,
    on_ready: Callable[[], None] | None = None,
    parent: int | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT, then drains. The server listens before the models are loaded.

    `load` runs in a thread; those of its models that are `OnDemand` are loaded later. `uds` is the path of a Unix
    socket to listen on instead of `host` and `port`; the file is removed at the end. `tls` is the context of HTTPS.
    `on_listening` receives the URL, with the chosen port where `port` is 0; `on_ready` is called once requests are
    served. With `parent`, the process id of the parent, the server also drains when that process exits; the caller must
    have read the id early.

    Raises OSError where the port or the path is in use, and the exceptions of `load`.
    """
    settings = settings or ServerSettings()
    raise_file_limit()
    with contextlib.ExitStack() as ends:
        listener = ends.enter_context(contextlib.closing(listen(host, port) if uds is None else listen_at_path(uds)))
        if uds is not None:
            ends.callback(Path(uds).unlink, missing_ok=True)
        if on_listening is not None:
            on_listening(_url(listener, "http" if tls is None else "https"))
        Server(load, settings, host, parent=parent, tls=tls, on_ready=on_ready).run_until_ended(listener)


def listen(host: str, port: int) -> socket.socket:
    """Opens a listening socket.

    Raises OSError where the port is in use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        # Clients can connect from here on; they wait until the server accepts.
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def listen_at_path(path: str) -> socket.socket:
    """Opens a listening Unix socket, in the place of a socket file on which nobody listens any more.

    Raises OSError where a server listens at the path, or where another file is there.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_abandoned(path):
            Path(path).unlink()
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno is None:  # the path is too long
            raise OSError(errno.ENAMETOOLONG, str(error)) from None
        raise
    return listener


def _is_abandoned(path: str) -> bool:
    if not Path(path).is_socket():
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        return client.connect_ex(path) == errno.ECONNREFUSED


def http_url(host: str, port: int, scheme: str = "http") -> str:
    """Returns the URL of a server; an IPv6 address is in brackets."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _url(listener: socket.socket, scheme: str) -> str:
    if listener.family == socket.AF_UNIX:
        return f"{scheme}+unix://{quote(str(Path(listener.getsockname()).absolute()), safe='')}"
    host, port = listener.getsockname()[:2]
    return http_url(host, port, scheme)


class Server(uvicorn.Server):
    """uvicorn's server, which drains before it stops listening: new requests are then answered with 503."""

    def __init__(
        self,
        load: Callable[[], Mapping[str, AsyncLLM | OnDemand]],
        settings: ServerSettings,
        host: str,
        *,
        parent: int | None = None,
        tls: ssl.SSLContext | None = None,
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        """Creates the server; it drains when the process `parent` exits."""
        self._parent = parent
        self._on_ready = on_ready
        self._tls = tls
        self._load = load
        self._settings = settings
        self.models = Models()
        """Models of the server, empty until they are loaded."""
        app = create_app(self.models, settings)
        self._batches: Batches | None = app.state.batches
        self._background: BackgroundResponses | None = app.state.background
        self._fallback: Fallback | None = app.state.server.fallback
        self._tracing: Tracing | None = app.state.server.tracing
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                http=LimitedH11Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                h11_max_incomplete_event_size=settings.max_header_bytes,
                timeout_graceful_shutdown=RESPONSE_GRACE,
                backlog=ACCEPT_BATCH,
            )
        )

    def run_until_ended(self, listener: socket.socket) -> None:
        """Runs the server. Raises the exceptions of loading."""
        asyncio.run(self._run(listener))
        for workers in (WORKERS, LARGE_WORKERS):
            workers.settle(0 if self.force_exit else RESPONSE_GRACE)
        if self._failure is not None:
            raise self._failure

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drains at the first signal and exits at the second."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._end)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts listening with a long backlog: asyncio has one number for the backlog and for a batch of accepts."""
        self.config.ssl = self._tls
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)

    async def on_tick(self, counter: int) -> bool:
        """Checks for the parent process, ten times a second."""
        if self._parent is not None and os.getppid() != self._parent and self._ending is None:
            self._end()
        return await super().on_tick(counter)

    async def _run(self, listener: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(log_uncaught)
        loading = asyncio.create_task(self._load_models())
        try:
            await self.serve([listener])
        finally:
            # Loading cannot be interrupted and is not awaited: it ends with the process.
            loading.cancel()
            await asyncio.wait([loading])
            if self._batches is not None:
                await self._batches.aclose()
            if self._background is not None:
                await self._background.aclose(0 if self.force_exit else RESPONSE_GRACE)
            await self.models.aclose()
            for served in self.models.engines():
                await served.llm.aclose()
            if self._fallback is not None:
                await self._fallback.aclose()
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.close)

    async def _load_models(self) -> None:
        try:
            self.models.set(await WORKERS.run(self._load))
            if self.models.draining:
                return  # `_run` closes them
            if self._batches is not None:
                self._batches.start()
            if self._on_ready is not None:
                self._on_ready()
        except Exception as error:  # raised by run_until_ended
            self._failure = error
            self.should_exit = True

    def _end(self) -> None:
        if self._ending is not None:
            self.should_exit = self.force_exit = True
            return
        self._ending = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        LOGGER.info("draining", extra={"fields": {"seconds": self._settings.drain_timeout}})
        if self._batches is not None:  # they continue at the next start
            await self._batches.aclose()
        seconds = self._settings.drain_timeout
        sent = [] if self._fallback is None else [self._fallback.drain(seconds)]
        await asyncio.gather(self.models.drain(seconds), *sent)
        self.should_exit = True
