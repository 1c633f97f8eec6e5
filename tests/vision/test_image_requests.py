"""Images in requests of all protocols: their places in the messages, and the names of their fields in errors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ferrule._text.chat import ImageSource, take_images
from ferrule.server.anthropic.conversation import conversation as anthropic_conversation
from ferrule.server.anthropic.protocol import MessagesRequest
from ferrule.server.ollama.protocol import ChatRequest
from ferrule.server.ollama.requests import _messages as ollama_messages
from ferrule.server.openai.messages import template_messages
from ferrule.server.openai.protocol.chat import ChatCompletionRequest
from ferrule.server.responses.history import continued
from ferrule.server.responses.items import conversation as responses_conversation
from ferrule.server.responses.protocol import ResponsesRequest
from ferrule.server.responses.store import ResponseStore

URL = "data:image/png;base64,aGk="
ANY = "data:image/*;base64,aGk="
BASE64 = {"type": "base64", "media_type": "image/png", "data": "aGk="}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def contents(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Contents of messages."""
    return [message["content"] for message in messages]


def anthropic(*blocks: object, role: str = "user") -> list[Any]:
    """Contents of the messages that a message of blocks becomes, after a system message."""
    messages = [{"role": role, "content": list(blocks)}]
    request = MessagesRequest.model_validate({"system": "Hi", "max_tokens": 1, "messages": messages})
    return contents(anthropic_conversation(request).messages)[1:]


def responses(*items: object) -> ResponsesRequest:
    return ResponsesRequest.model_validate({"instructions": "Hi", "input": list(items)})


def test_chat_completions() -> None:
    parts = [
        text("a"),
        {"type": "image_url", "image_url": {"url": URL, "detail": "high"}},
        {"type": "image_url", "image_url": URL},
    ]
    request = ChatCompletionRequest.model_validate(
        {"messages": [{"role": "system", "content": "Hi"}, {"role": "user", "content": parts, "name": "b"}]}
    )
    _, user = template_messages(request.messages)
    images = [ImageSource(URL, f"messages[1].content[{place}") for place in ("1].image_url.url", "2].image_url")]
    assert user == {"role": "user", "name": "b", "content": [text("a"), *images]}
    assert take_images([user], supported=True)[1] == images


def test_responses() -> None:
    image = {"type": "input_image", "image_url": URL, "detail": "auto"}
    request = responses(
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, image]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [image]},
    )
    assert contents(responses_conversation(request).messages) == [
        "Hi",
        [text("a"), ImageSource(URL, "input[0].content[1].image_url")],
        "",
        [ImageSource(URL, "input[2].output[0].image_url")],
    ]


def test_stored_items_of_responses_keep_images(tmp_path: Path) -> None:
    image = {"type": "input_image", "image_url": URL}
    request = responses({"role": "user", "content": [{"type": "text", "text": "a"}, image]})
    store = ResponseStore(tmp_path / "responses.db", 10)
    try:
        _, stored = continued(store, request)
    finally:
        store.close()
    (item,) = json.loads(stored)
    assert item["content"] == [{"type": "input_text", "text": "a"}, {**image, "detail": "auto"}]
    again = responses(item)
    assert contents(responses_conversation(again).messages) == contents(responses_conversation(request).messages)


def test_messages_of_anthropic() -> None:
    image = {"type": "image", "source": BASE64, "cache_control": {"type": "ephemeral"}}
    url = {"type": "image", "source": {"type": "url", "url": URL}}
    assert anthropic(text("a"), text("b"), image, text("c"), text("d"), url) == [
        [
            text("a\nb"),
            ImageSource(ANY, "messages[0].content[2].source.data"),
            text("c\nd"),
            ImageSource(URL, "messages[0].content[5].source.url"),
        ]
    ]
    assert anthropic(image) == [[ImageSource(ANY, "messages[0].content[0].source.data")]]
    assert anthropic(text("a"), text("b")) == ["a\nb"]


@pytest.mark.parametrize("is_error", [False, True])
def test_tool_results_of_anthropic(is_error: bool) -> None:
    image = {"type": "image", "source": BASE64}
    result = {"type": "tool_result", "tool_use_id": "1", "is_error": is_error}
    prefix = "Error: " if is_error else ""
    assert anthropic({**result, "content": "a"}) == [f"{prefix}a"]
    assert anthropic({**result, "content": [text("a"), text("b")]}) == [f"{prefix}a\nb"]
    assert anthropic(result) == [prefix]
    (content,) = anthropic({**result, "content": [text("a"), image]})
    expected = [text("a"), ImageSource(ANY, "messages[0].content[0].content[1].source.data")]
    assert content == ([text("Error: "), *expected] if is_error else expected)


def test_chats_of_ollama() -> None:
    request = ChatRequest.model_validate(
        {
            "model": "m",
            "messages": [
                {"role": "user", "content": "a", "images": ["aGk=", "aGk="]},
                {"role": "assistant", "content": "b", "images": []},
            ],
        }
    )
    images = [ImageSource(ANY, f"messages[0].images[{index}]") for index in (0, 1)]
    assert contents(ollama_messages(request)) == [[*images, text("a")], "b"]
