"""`client.beta.messages` of Anthropic's own client against a live server with the embedded model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import pytest
from anthropic.types.beta import BetaMessageParam
from pydantic import BaseModel

from ferrule import LLM, SamplingParams
from server.live import Live

pytestmark = pytest.mark.native

MESSAGES: list[BetaMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0}
BETAS: Any = ["context-1m-2025-08-07", "interleaved-thinking-2025-05-14"]


class City(BaseModel):
    """Schema of an answer."""

    name: Literal["Paris", "Rome"]
    large: bool


@pytest.fixture(scope="module")
def client(tiny: Live) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=tiny.url, api_key="none", max_retries=0) as client:
        yield client


def test_message_equals_library_output(client: anthropic.Anthropic, solo: LLM) -> None:
    conversation: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        *(dict(message) for message in MESSAGES),
    ]
    expected = solo.chat(conversation, SamplingParams(temperature=0, max_tokens=12))[0]
    fields: dict[str, Any] = {
        "model": "tiny",
        "system": "Be brief.",
        "messages": MESSAGES,
        "betas": BETAS,
        "user_profile_id": "u",
        "workspace_id": "w",
    }
    found = client.beta.messages.create(max_tokens=12, extra_body=GREEDY, **fields)
    (block,) = found.content
    assert block.type == "text"
    assert (block.text, found.stop_reason) == (expected.outputs[0].text, "end_turn")
    assert found.usage.output_tokens == len(expected.outputs[0].token_ids)
    counted = client.beta.messages.count_tokens(**fields)
    assert counted.input_tokens == len(expected.prompt_token_ids)
    with client.beta.messages.stream(max_tokens=12, extra_body=GREEDY, **fields) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == block.text
    assert (final.stop_reason, final.usage.output_tokens) == (found.stop_reason, found.usage.output_tokens)
    raw = list(client.beta.messages.create(max_tokens=12, stream=True, extra_body=GREEDY, **fields))
    assert [raw[0].type, raw[-1].type] == ["message_start", "message_stop"]
    deltas = [event.delta for event in raw if event.type == "content_block_delta"]
    assert "".join(delta.text for delta in deltas if delta.type == "text_delta") == block.text


def test_output_format_is_enforced(client: anthropic.Anthropic) -> None:
    fields: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "output_format": City, "extra_body": {"top_k": 1}}
    parsed = client.beta.messages.parse(messages=MESSAGES, **fields)
    assert isinstance(parsed.parsed_output, City)
    with client.beta.messages.stream(messages=MESSAGES, **fields) as stream:
        assert stream.get_final_message().parsed_output == parsed.parsed_output
    # The content of a response is accepted as input.
    message: BetaMessageParam = {"role": "assistant", "content": parsed.content}
    again = client.beta.messages.parse(messages=[*MESSAGES, message, *MESSAGES], **fields)
    assert isinstance(again.parsed_output, City)


def message_of(block: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [block]}]}


def with_tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"name": "f", "input_schema": {"type": "object"}, **fields}]}


SOURCE = {"type": "url", "url": "http://localhost/x"}
COUNTED: list[tuple[dict[str, Any], str]] = [
    ({"compaction": {"type": "enabled"}}, "compaction"),
    ({"mcp_servers": [{"type": "url", "name": "m", "url": "http://localhost"}]}, "mcp_servers"),
    ({"output_config": {"task_budget": {"type": "tokens", "total": 5}}}, "output_config.task_budget"),
    ({"thinking": {"type": "enabled", "display": "omitted"}}, "thinking.display"),
    ({"tools": [{"type": "memory_20250818", "name": "memory"}]}, "tools[0].type"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ({"tools": [{"type": "code_execution_20250825", "name": "code_execution"}]}, "tools[0].type"),
    ({"tools": [{"type": "computer_20251124", "name": "computer"}]}, "tools[0].type"),
    ({"tools": [{"type": "mcp_toolset", "mcp_server_name": "m"}]}, "tools[0].type"),
    (with_tool(defer_loading=True), "tools[0].defer_loading"),
    (with_tool(allowed_callers=["code_execution_20250825"]), "tools[0].allowed_callers"),
    (with_tool(input_examples=[{}]), "tools[0].input_examples"),
    (message_of({"type": "image", "source": SOURCE}), "messages[0].content[0].source.url"),
    (message_of({"type": "image", "source": {"type": "file", "file_id": "f"}}), "messages[0].content[0].source"),
    (
        message_of({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}),
        "messages[0].content[0].source.data",
    ),
    (message_of({"type": "document", "source": SOURCE}), "messages[0].content[0]"),
    (message_of({"type": "container_upload", "file_id": "f"}), "messages[0].content[0]"),
    (message_of({"type": "compaction", "content": "x"}), "messages[0].content[0]"),
    (message_of({"type": "redacted_thinking", "data": "x"}), "messages[0].content[0]"),
    (message_of({"type": "server_tool_use", "id": "1", "name": "web_search", "input": {}}), "messages[0].content[0]"),
    (message_of({"type": "mcp_tool_use", "id": "1", "name": "f", "input": {}}), "messages[0].content[0]"),
    (message_of({"type": "text", "text": "a", "cache_control": {"type": "forever"}}), "messages[0].content[0]."),
]
CREATED: list[tuple[dict[str, Any], str]] = [
    *COUNTED,
    ({"container": "c"}, "container"),
    ({"fallbacks": [{"model": "other"}]}, "fallbacks"),
    ({"thread": {"type": "continue", "previous_message_id": "m"}}, "thread"),
]


@pytest.mark.parametrize(("fields", "named"), CREATED)
def test_unsupported_field_is_rejected_by_create(
    client: anthropic.Anthropic, fields: dict[str, Any], named: str
) -> None:
    request: dict[str, Any] = {"model": "tiny", "max_tokens": 4, "messages": MESSAGES, **fields}
    for stream in (False, True):
        with pytest.raises(anthropic.BadRequestError) as caught:
            client.beta.messages.create(**request, stream=stream)
        assert _names(caught.value, named)


@pytest.mark.parametrize(("fields", "named"), COUNTED)
def test_unsupported_field_is_rejected_by_count_tokens(
    client: anthropic.Anthropic, fields: dict[str, Any], named: str
) -> None:
    request: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, **fields}
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.beta.messages.count_tokens(**request)
    assert _names(caught.value, named)


def _names(error: anthropic.BadRequestError, field: str) -> bool:
    body: Any = error.body
    assert body["error"]["type"] == "invalid_request_error"
    return body["error"]["message"].startswith(field if field.endswith(".") else f"{field} ")


def test_batches_return_not_found(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.beta.messages.batches.list()
    assert caught.value.type == "not_found_error"
