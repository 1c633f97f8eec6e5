"""Checks of every stream of Anthropic's Messages."""

from __future__ import annotations

import json
from typing import Any

DELTAS = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}
EMPTY = {"text": "", "thinking": "", "tool_use": {}}


def without_names(message: dict[str, Any]) -> dict[str, Any]:
    """Fields that two answers to the same request share; cached tokens depend on the order."""
    usage = message["usage"]
    read = usage["input_tokens"] + usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"]
    content = [{**block, "id": ""} if block["type"] == "tool_use" else block for block in message["content"]]
    return {**message, "id": "", "content": content, "usage": {"read": read, "written": usage["output_tokens"]}}


def check_stream(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Checks a stream's order, and returns the message that its events add up to."""
    first, *rest, delta, last = events
    assert first["type"] == "message_start"
    message = first["message"]
    assert (message["content"], message["stop_reason"], message["usage"]["output_tokens"]) == ([], None, 0)
    assert (delta["type"], last) == ("message_delta", {"type": "message_stop"})
    following = iter(rest)
    for event in following:
        assert (event["type"], event["index"]) == ("content_block_start", len(message["content"]))
        block = event["content_block"]
        field = "input" if block["type"] == "tool_use" else block["type"]
        assert block[field] == EMPTY[block["type"]]
        streamed = ""
        for each in following:
            assert each["index"] == event["index"]
            if each["type"] == "content_block_stop":
                break
            assert (each["type"], each["delta"]["type"]) == ("content_block_delta", DELTAS[block["type"]])
            streamed += each["delta"]["partial_json" if block["type"] == "tool_use" else field]
        else:
            raise AssertionError("a block does not end")
        message["content"].append({**block, field: json.loads(streamed) if block["type"] == "tool_use" else streamed})
    return {**message, **delta["delta"], "usage": {**message["usage"], **delta["usage"]}}
