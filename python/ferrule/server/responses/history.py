"""Items of a conversation as the API lists them and as the store keeps them, and requests that continue one."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter

from ferrule.errors import InvalidParameterError
from ferrule.server.ascii_json import encoded
from ferrule.server.errors import BAD_REQUEST, ApiError
from ferrule.server.responses.protocol import ImagePart, Item, ItemPage, MessageItem, ResponsesRequest, TextPart
from ferrule.server.responses.store import ResponseStore
from ferrule.server.schema.limits import MAX_ITEMS

CONTINUED = ("completed", "incomplete")
"""Statuses of responses that a request may continue."""
PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
"""Prefix of an item's id, by its type."""
ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


def continued(store: ResponseStore, request: ResponsesRequest) -> tuple[ResponsesRequest, bytes]:
    """Returns a request with the whole conversation as its input, and the items of this input as JSON.

    Raises ApiError, InvalidParameterError.
    """
    items = [_listed(item) for item in _given(request.input)]
    if request.previous_response_id is None:
        return request, encoded(items)
    items = _conversation(store, request.previous_response_id) + items
    if len(items) > MAX_ITEMS:
        limit = f"a list of at most {MAX_ITEMS} items with those of the responses before"
        raise InvalidParameterError("input", len(items), limit)
    return request.model_copy(update={"input": ITEMS.validate_python(items)}), encoded(items)


def _conversation(store: ResponseStore, response_id: str) -> list[dict[str, Any]]:
    """Returns the items of a response's conversation, with its own."""
    stored = store.get(response_id)
    name = "previous_response_id"
    if stored is None:
        message = f"{name} must be the id of a stored response; {response_id[:100]} is not, or was removed"
        raise ApiError(404, message, code="previous_response_not_found", param=name)
    body = json.loads(stored.body)
    if body["status"] not in CONTINUED:
        message = f"{name} must be a response that is complete, got one with status {body['status']}"
        raise ApiError(BAD_REQUEST, message, code="invalid_value", param=name)
    return [*json.loads(stored.items), *body["output"]]


def _given(given: str | Sequence[Item]) -> Sequence[Item]:
    return [MessageItem(role="user", content=given)] if isinstance(given, str) else given


def _listed(item: Item) -> dict[str, Any]:
    """Returns an item with the fields that the API lists: an id, a status, and content in parts."""
    listed = item.model_dump(exclude_none=True)
    if isinstance(item, MessageItem):
        kind = "output_text" if item.role == "assistant" else "input_text"
        parts = [TextPart(type="text", text=item.content)] if isinstance(item.content, str) else item.content
        annotations: dict[str, Any] = {"annotations": []} if item.role == "assistant" else {}
        listed["content"] = [
            {"detail": "auto"} | part.model_dump(exclude_none=True)
            if isinstance(part, ImagePart)
            else {"type": kind, "text": part.text, **annotations}
            for part in parts
        ]
    return {"id": f"{PREFIXES[item.type]}_{uuid.uuid4().hex}", "status": "completed", **listed}


def page(items: Sequence[dict[str, Any]], after: str | None, limit: int, *, newest_first: bool) -> ItemPage:
    """Returns at most `limit` items that follow the id `after`.

    Raises ApiError for an unknown id.
    """
    ordered = list(reversed(items)) if newest_first else list(items)
    if after is not None:
        at = next((index for index, item in enumerate(ordered) if item["id"] == after), None)
        if at is None:
            message = "after must be the id of an item of the response"
            raise ApiError(BAD_REQUEST, message, code="invalid_value", param="after")
        ordered = ordered[at + 1 :]
    data = ordered[:limit]
    ends = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return ItemPage(data=data, first_id=ends[0], last_id=ends[1], has_more=len(ordered) > limit)
