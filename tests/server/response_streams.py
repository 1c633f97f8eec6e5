"""Checks of every stream of a response."""

from __future__ import annotations

import json
from typing import Any


def without_times(body: dict[str, Any]) -> dict[str, Any]:
    """Fields that two answers to the same request share."""
    text = json.dumps(
        {**body, "created_at": 0, "completed_at": 0, "usage": {**body["usage"], "input_tokens_details": 0}}
    )
    for call in (each["call_id"] for each in body["output"] if each["type"] == "function_call"):
        text = text.replace(call, "call")
    return json.loads(text.replace(body["id"].removeprefix("resp_"), "id"))


def check_stream(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Checks a stream's order, its numbers, and that its deltas are what is done; returns the response."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    response = events[-1]["response"]
    assert kinds[-1] == f"response.{response['status']}"
    rest = iter(events[2:-1])
    for index, item in enumerate(response["output"]):
        added = next(rest)
        assert (added["type"], added["output_index"]) == ("response.output_item.added", index)
        assert (added["item"]["id"], added["item"]["status"]) == (item["id"], "in_progress")
        part = item["type"] != "function_call"
        name = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
        kind = f"response.{name[item['type']]}"
        if part:
            assert added["item"]["content"] == []
            opened = next(rest)
            assert opened["type"] == "response.content_part.added"
            assert opened["part"]["text"] == ""
        streamed, logprobs = "", list[Any]()
        event = next(rest)
        while event["type"] == f"{kind}.delta":
            assert (event["item_id"], event["output_index"]) == (item["id"], index)
            streamed += event["delta"]
            logprobs += event.get("logprobs", [])
            event = next(rest)
        assert event["type"] == f"{kind}.done"
        whole = event["text"] if part else event["arguments"]
        assert streamed == whole == (item["content"][0]["text"] if part else item["arguments"])
        assert logprobs == event.get("logprobs", [])
        if part:
            closed = next(rest)
            assert closed["type"] == "response.content_part.done"
            assert closed["part"] == item["content"][0]
        done = next(rest)
        assert (done["type"], done["item"]) == ("response.output_item.done", item)
    assert next(rest, None) is None
    return response
