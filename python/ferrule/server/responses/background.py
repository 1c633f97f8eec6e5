"""`BackgroundResponses`: responses that are generated while no client waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing

from ferrule._engine.workers import WORKERS
from ferrule.errors import FerruleError
from ferrule.server.ascii_json import encoded
from ferrule.server.context import Context
from ferrule.server.error_responses import api_error
from ferrule.server.errors import UNAVAILABLE, ApiError
from ferrule.server.request_record import RequestRecord, current_record
from ferrule.server.responses.answer import ResponseWriter
from ferrule.server.responses.protocol import ResponseBody
from ferrule.server.responses.store import ResponseStore, StoredResponse


class BackgroundResponse:
    """A response that is being generated, with the events of its stream so far."""

    def __init__(self, writer: ResponseWriter, items: bytes) -> None:
        self.writer = writer
        self.items = items
        self.events: list[bytes] = []
        self.cancelled = False
        """Whether a client has cancelled it."""
        self._changed = asyncio.Event()
        self._ended = False

    def add(self, event: bytes) -> None:
        """Adds an event of the stream."""
        self.events.append(event)
        self._notify()

    def end(self) -> None:
        """Ends the stream."""
        self._ended = True
        self._notify()

    async def follow(self, start: int) -> AsyncGenerator[bytes, None]:
        """Yields the events from the number `start` on, until the response ends."""
        while True:
            changed = self._changed
            while start < len(self.events):
                yield self.events[start]
                start += 1
            if self._ended:
                return
            await changed.wait()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class BackgroundResponses:
    """The background responses of a server that have not ended. Their results are stored."""

    def __init__(self, server: Context, store: ResponseStore) -> None:
        self.store = store
        self._server = server
        self._running: dict[str, tuple[BackgroundResponse, asyncio.Task[None]]] = {}

    def find(self, response_id: str) -> BackgroundResponse | None:
        """Returns a response that has not ended."""
        found = self._running.get(response_id)
        return None if found is None else found[0]

    async def start(self, writer: ResponseWriter, items: bytes) -> BackgroundResponse:
        """Starts to generate a response.

        Raises ApiError if too many are running.
        """
        limit = self._server.settings.max_concurrent_requests or self._server.models.capacity
        if len(self._running) >= limit:
            message = f"too many background responses ({len(self._running)}, limit {limit})"
            raise ApiError(UNAVAILABLE, message, code="queue_full")
        response_id = writer.generation.request_id
        response = BackgroundResponse(writer, items)
        await self._save(response, writer.progress(), ended=False)
        held = ExitStack()  # the lease of the request ends before the response does
        held.enter_context(writer.generation.served.hold())
        task = asyncio.create_task(self._run(response), name=response_id)
        task.add_done_callback(lambda _: held.close())
        self._running[response_id] = response, task
        return response

    async def cancel(self, response_id: str) -> None:
        """Cancels a response and waits until it has ended."""
        response, task = self._running[response_id]
        if response.writer.ended is None:  # else it is being stored
            response.cancelled = True
            task.cancel()
        await asyncio.wait([task])

    async def aclose(self, grace: float) -> None:
        """Waits `grace` seconds for all responses to end, interrupts the others, and closes the store."""
        tasks = [task for _, task in self._running.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=grace)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await WORKERS.run(self.store.close)

    async def _run(self, response: BackgroundResponse) -> None:
        """Generates a response and stores it. In the store, an interrupted one fails at the next start."""
        response_id = response.writer.generation.request_id
        # The deadline and the log line are those of the request that started it.
        current_record.set(RequestRecord(response_id))
        try:
            body, last = await self._generate(response)
            await self._save(response, body, last, ended=True)
            response.add(last)
        finally:
            response.end()
            del self._running[response_id]

    async def _generate(self, response: BackgroundResponse) -> tuple[ResponseBody, bytes]:
        """Adds all events but the last; returns the response and its last event."""
        writer = response.writer
        try:
            async with aclosing(writer.events()) as events:
                async for event in events:
                    if writer.ended is not None:
                        return writer.ended, event
                    response.add(event)
        except (ApiError, FerruleError) as error:
            last = writer.failed(error if isinstance(error, ApiError) else api_error(error))
        except asyncio.CancelledError:
            if not response.cancelled:
                raise
            last = writer.cancelled()
        else:
            raise RuntimeError(f"response {writer.generation.request_id} ended without a last event")
        return writer.progress(), last

    async def _save(self, response: BackgroundResponse, body: ResponseBody, *last: bytes, ended: bool) -> None:
        events = b"".join((*response.events, *last)) if ended else None
        stored = StoredResponse(encoded(body), response.items, events)
        await WORKERS.run(self.store.put, body.id, stored, ended=ended)
