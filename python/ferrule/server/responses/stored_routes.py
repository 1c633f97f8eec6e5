"""Stored responses: GET and DELETE /v1/responses/{response_id}, its input items, and cancelling."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from starlette.responses import Response

from ferrule._engine.workers import WORKERS
from ferrule._validation import shown
from ferrule.errors import InvalidParameterError
from ferrule.server.ascii_json import json_response
from ferrule.server.context import Context
from ferrule.server.errors import BAD_REQUEST, ApiError, unsupported
from ferrule.server.responses.background import BackgroundResponses
from ferrule.server.responses.history import page
from ferrule.server.responses.protocol import DeletedResponse, ItemPage, ResponseBody
from ferrule.server.responses.store import StoredResponse
from ferrule.server.streaming import EventStream

EVENT_END = b"\n\n"
MAX_LISTED = 100
"""Maximum number of items of a page, as in OpenAI's API."""


def router(server: Context, background: BackgroundResponses | None) -> APIRouter:
    """Creates the routes; without `background` they answer an error that says how to enable them."""
    routes = APIRouter()

    def enabled() -> BackgroundResponses:
        if background is None:
            message = "responses are not stored; start the server with --responses-db"
            raise ApiError(404, message, code="responses_not_stored")
        return background

    async def stored(response_id: str) -> StoredResponse:
        found = await WORKERS.run(enabled().store.get, response_id)
        if found is None:
            message = f"no stored response has the id {shown(response_id)}"
            raise ApiError(404, message, code="response_not_found", param="response_id")
        return found

    @routes.get("/responses/{response_id}", response_model=ResponseBody, include_in_schema=False)
    @routes.get("/v1/responses/{response_id}", response_model=ResponseBody)
    async def get_response(
        response_id: str, stream: bool = False, starting_after: Annotated[int | None, Query(ge=0)] = None
    ) -> Response:
        """Returns a stored response, or with `stream` the events of a background response."""
        running = enabled().find(response_id)
        if starting_after is not None and not stream:
            raise InvalidParameterError("starting_after", starting_after, "left out unless stream is true")
        start = 0 if starting_after is None else starting_after + 1
        if running is not None:
            return (
                EventStream(running.follow(start), server.settings.keep_alive)
                if stream
                else json_response(running.writer.progress())
            )
        found = await stored(response_id)
        if not stream:
            return Response(found.body, media_type="application/json")
        if found.events is None:
            raise unsupported("stream", "stream is supported for background responses only")
        return EventStream(_events(found.events, start), server.settings.keep_alive)

    @routes.delete("/responses/{response_id}", include_in_schema=False)
    @routes.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str) -> DeletedResponse:
        """Deletes a stored response; a background response is cancelled."""
        if enabled().find(response_id) is not None:
            await enabled().cancel(response_id)
        await stored(response_id)
        await WORKERS.run(enabled().store.delete, response_id)
        return DeletedResponse(id=response_id)

    @routes.post("/responses/{response_id}/cancel", response_model=ResponseBody, include_in_schema=False)
    @routes.post("/v1/responses/{response_id}/cancel", response_model=ResponseBody)
    async def cancel_response(response_id: str) -> Response:
        """Cancels a background response; one that has ended is returned as it is."""
        if enabled().find(response_id) is not None:
            await enabled().cancel(response_id)
        found = await stored(response_id)
        if not json.loads(found.body)["background"]:
            message = "only background responses can be cancelled; for others, close the connection"
            raise ApiError(BAD_REQUEST, message, code="not_in_background", param="response_id")
        return Response(found.body, media_type="application/json")

    @routes.get("/responses/{response_id}/input_items", include_in_schema=False)
    @routes.get("/v1/responses/{response_id}/input_items")
    async def list_input_items(
        response_id: str,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> ItemPage:
        """Lists the items that a stored response answers, with those of the responses before it."""
        items = json.loads((await stored(response_id)).items)
        return page(items, after, limit, newest_first=order == "desc")

    return routes


async def _events(stored: bytes, start: int) -> AsyncGenerator[bytes, None]:
    """Yields stored events from the number `start` on."""
    for event in stored.split(EVENT_END)[start:-1]:
        yield event + EVENT_END
