"""Abort of requests whose clients disconnected."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Receive, Scope, Send

from ferrule.server.middleware.base import Middleware
from ferrule.server.request_record import current_record


class Disconnects(Middleware):
    """Waits for a disconnect once the body is received, and then cancels the task of the request."""

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on and watches for a disconnect."""
        task = asyncio.current_task()
        watcher: asyncio.Task[None] | None = None
        answered = gone = False

        async def watch() -> None:
            nonlocal gone
            while (await receive())["type"] != "http.disconnect":
                pass
            # A complete response ends with a disconnect message too.
            if not answered and task is not None:
                gone = True
                task.cancel()

        async def receive_watched() -> Message:
            nonlocal watcher
            message = await receive()
            if watcher is None and message["type"] == "http.request" and not message.get("more_body", False):
                watcher = asyncio.create_task(watch())
            return message

        async def send_noted(message: Message) -> None:
            nonlocal answered
            answered = answered or (message["type"] == "http.response.body" and not message.get("more_body", False))
            await send(message)

        try:
            await self.app(scope, receive_watched, send_noted)
        except asyncio.CancelledError:
            if not gone or task is None or task.uncancel() > 0:
                raise
            record = current_record.get()
            if record is not None:
                record.error = "client_disconnected"
        finally:
            if watcher is not None:
                watcher.cancel()
