"""The bodies of POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, Discriminator, Field, Tag

from ferrule.server.schema.base import RequestModel
from ferrule.server.schema.limits import BoundedList, ToolList
from ferrule.server.schema.unions import str_or_list

MIN_THINKING_BUDGET = 1024
"""Tokens; Anthropic's limit."""


class CacheControl(RequestModel):
    """Accepted, and of no effect: prefixes are cached whoever asks for it."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(RequestModel):
    """Something that was said."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: None = None


class ThinkingBlock(RequestModel):
    """What the model thought; the template says what becomes of it."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None
    """Of an answer that is handed back: nothing is signed here."""


class ToolUseBlock(RequestModel):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None


TextOrBlocks = Annotated[
    Annotated[str, Tag("<str>")] | Annotated[BoundedList[TextBlock], Tag("<list>")], Discriminator(str_or_list)
]


class ToolResultBlock(RequestModel):
    """What the tool returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: TextOrBlocks = ""
    is_error: bool = False
    """Told to the model in front of the content: `Error: `."""
    cache_control: CacheControl | None = None


def _kind(block: object) -> str:
    if isinstance(block, Mapping):
        kind = cast("Mapping[str, object]", block).get("type")
        return f"<{kind}>"
    return f"<{getattr(block, 'type', None)}>"


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    Discriminator(
        _kind,
        custom_error_type="unsupported_block",
        custom_error_message="its type must be text, thinking, tool_use or tool_result",
    ),
]


class InputMessage(RequestModel):
    """A turn."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[str, Tag("<str>")] | Annotated[BoundedList[Block], Tag("<list>")], Discriminator(str_or_list)
    ]


class Tool(RequestModel):
    """A function that may be called."""

    type: Literal["custom"] | None = None
    name: str = Field(min_length=1)
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    """A call is held to the schema where `tool_choice` is `any` or `tool`, strict or not. Elsewhere the model writes it
    in its own form."""
    cache_control: CacheControl | None = None


class FreeChoice(RequestModel):
    """Whether tools are called."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool = False


class NamedChoice(RequestModel):
    """The one tool that is to be called."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool = False


class Thinking(RequestModel):
    """Whether to think first, which the chat template is told; left out, and with `adaptive`, it decides itself."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    """A target and no limit, as Anthropic says itself; `max_tokens` is the limit of both."""


class Metadata(RequestModel):
    """Accepted, and of no effect."""

    user_id: str | None = None


class OutputFormat(RequestModel):
    """What an answer is to be."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestModel):
    """How to answer."""

    format: OutputFormat | None = None
    effort: str | None = None
    """Handed to the chat template, as `reasoning_effort`."""


class CountTokensRequest(RequestModel):
    """POST /v1/messages/count_tokens."""

    messages: Annotated[BoundedList[InputMessage], Field(min_length=1)]
    model: str | None = None
    """A model, or an adapter; left out, the first model."""
    system: TextOrBlocks | None = None
    tools: ToolList[Tool] | None = None
    tool_choice: Annotated[FreeChoice | NamedChoice, Field(discriminator="type")] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: int
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: BoundedList[str] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    """Accepted, and of no effect."""


class TextContent(BaseModel):
    """What was said."""

    type: Literal["text"] = "text"
    text: str
    citations: None = None


class ThinkingContent(BaseModel):
    """What was thought."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str = ""


class ToolUseContent(BaseModel):
    """A call of a tool."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]
    """Where the model wrote no JSON object, or was cut off: what it wrote, as `INVALID_JSON`."""


Content = TextContent | ThinkingContent | ToolUseContent


class MessageUsage(BaseModel):
    """Tokens; those of the prompt are the sum of the first three."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class Message(BaseModel):
    """The answer to POST /v1/messages."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Content]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(BaseModel):
    """The answer to POST /v1/messages/count_tokens."""

    input_tokens: int


class ErrorDetail(BaseModel):
    """What went wrong."""

    type: str
    message: str
    details: dict[str, Any] | None = None
    """For programs, where there is more to know."""


class ErrorBody(BaseModel):
    """The body of every answer that is an error."""

    type: Literal["error"] = "error"
    error: ErrorDetail
    request_id: str | None
