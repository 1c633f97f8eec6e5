"""`ServerReplica`: the application of the server with an engine, in an actor of Ray Serve."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray import serve
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message

from ferrule._api.async_llm import AsyncLLM
from ferrule.ray.adapters import MultiplexedModels
from ferrule.ray.predictor import assigned_threads
from ferrule.server.app import create_app
from ferrule.server.context import Context
from ferrule.server.settings import ServerSettings

REPLICA_HEADER = "X-Ferrule-Replica"
"""Response header with the id of the replica."""
MAX_PENDING = 64
"""Number of messages of a response at which the application waits until they are read."""


@dataclass(frozen=True)
class ReplicaResponse:
    """The whole response of a replica."""

    replica: str
    """Id of the replica."""
    status: int
    headers: Mapping[str, str]
    body: bytes


class ServerReplica:
    """The application of the server with a separate engine. Serve restarts it if `check_health` raises."""

    def __init__(
        self,
        model: str | None,
        names: Sequence[str],
        listed: Sequence[str],
        settings: ServerSettings,
        options: Mapping[str, Any],
        *,
        max_loaded_adapters: int | None = None,
    ) -> None:
        """Loads the model, which has `names` in requests.

        `listed` are the names of all models of the application, and `options` arguments of AsyncLLM. The adapters of
        `lora_modules` are loaded when a request first needs them.

        Raises the errors of AsyncLLM.
        """
        context: Any = serve.get_replica_context()
        self._id: str = context.replica_id.unique_id
        self._running: set[asyncio.Task[None]] = set()
        given: dict[str, Any] = {"threads": assigned_threads(options), **options}
        adapters: Mapping[str, str] = given.pop("lora_modules", None) or {}
        self._llm = AsyncLLM(model, **given)
        self._models = MultiplexedModels(names, self._llm, adapters, max_loaded=max_loaded_adapters, listed=listed)
        self._application = create_app(self._models, settings)

    async def check_health(self) -> None:
        """Raises ApiError if the engine has failed."""
        await self._models.check_health()

    async def respond(
        self, scope: Mapping[str, Any], body: bytes, *, prefix: str | None = None, adapter: str | None = None
    ) -> AsyncGenerator[list[Message]]:
        """Yields the messages of the response to a request, several at once if the reader is slow.

        `prefix` and `adapter` are for the router. A closed or cancelled generator aborts the request.
        """
        messages: list[Message] = []
        changed, taken, disconnected = asyncio.Event(), asyncio.Event(), asyncio.Event()
        body_sent = False

        async def receive() -> Message:
            nonlocal body_sent
            if body_sent:
                await disconnected.wait()
                return {"type": "http.disconnect"}
            body_sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REPLICA_HEADER] = self._id
            messages.append(message)
            changed.set()
            if len(messages) >= MAX_PENDING and not disconnected.is_set():
                taken.clear()
                await taken.wait()

        request = asyncio.create_task(self._application(dict(scope), receive, send))
        self._running.add(request)  # the event loop has only weak references to its tasks
        request.add_done_callback(self._end)
        request.add_done_callback(lambda _: changed.set())
        try:
            while not request.done() or messages:
                await changed.wait()
                changed.clear()
                batch, messages = messages, []
                taken.set()
                if batch:
                    yield batch
            request.result()
        finally:
            disconnected.set()
            taken.set()

    async def response(self, scope: Mapping[str, Any]) -> ReplicaResponse:
        """Returns the response to a request without a body."""
        start, *rest = [message async for batch in self.respond(scope, b"") for message in batch]
        body = b"".join(message.get("body", b"") for message in rest)
        return ReplicaResponse(self._id, start["status"], dict(Headers(raw=start["headers"])), body)

    def _end(self, request: asyncio.Task[None]) -> None:
        self._running.discard(request)
        if not request.cancelled():
            request.exception()  # of an aborted request, which nobody awaits

    def __del__(self) -> None:
        """Closes the engine. Serve calls it when the last request has ended."""
        if hasattr(self, "_application"):
            self._llm.close()
            server: Context = self._application.state.server
            if server.tracing is not None:
                server.tracing.close()
