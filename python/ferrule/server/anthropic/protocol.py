"""Request and response models of POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, Discriminator, Field, Tag

from ferrule._text.chat import ImageSource, data_url
from ferrule.server.anthropic.fields import MESSAGES_FIELDS, OUTPUT_FIELDS, TEXT_FIELDS, THINKING_FIELDS, TOOL_FIELDS
from ferrule.server.schema.base import RequestModel
from ferrule.server.schema.limits import BoundedList, ToolList
from ferrule.server.schema.sampling import sampling_field
from ferrule.server.schema.unions import str_or_list

MIN_THINKING_BUDGET = 1024
"""Minimum of `thinking.budget_tokens` in Anthropic's API."""


class CacheControl(RequestModel):
    """Cache marker, accepted without effect: all prefixes are cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(RequestModel):
    """Block of text."""

    other_fields = TEXT_FIELDS

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class Base64Source(RequestModel):
    """Image in base64; its format is found by its content."""

    type: Literal["base64"]
    media_type: str
    data: str


class UrlSource(RequestModel):
    """URL of an image; data URLs only."""

    type: Literal["url"]
    url: str


class ImageBlock(RequestModel):
    """Block of an image."""

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]
    cache_control: CacheControl | None = None

    def given(self, where: str) -> ImageSource:
        """Returns the image, which is the block at `where` of the request."""
        if isinstance(self.source, Base64Source):
            return ImageSource(data_url(self.source.data), f"{where}.source.data")
        return ImageSource(self.source.url, f"{where}.source.url")


class ThinkingBlock(RequestModel):
    """Block of the model's reasoning; the chat template decides whether it is rendered."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None
    """Accepted without effect: reasoning is not signed."""


class ToolUseBlock(RequestModel):
    """Tool call of the model."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None


TextOrBlocks = Annotated[
    Annotated[str, Tag("<str>")] | Annotated[BoundedList[TextBlock], Tag("<list>")], Discriminator(str_or_list)
]


ResultBlock = Annotated[TextBlock | ImageBlock, Field(discriminator="type")]
TextOrResultBlocks = Annotated[
    Annotated[str, Tag("<str>")] | Annotated[BoundedList[ResultBlock], Tag("<list>")], Discriminator(str_or_list)
]


class ToolResultBlock(RequestModel):
    """Result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: TextOrResultBlocks = ""
    is_error: bool = False
    """Whether the tool failed; the model then reads `Error: ` before the content."""
    cache_control: CacheControl | None = None


def _kind(block: object) -> str:
    if isinstance(block, Mapping):
        kind = cast("Mapping[str, object]", block).get("type")
        return f"<{kind}>"
    return f"<{getattr(block, 'type', None)}>"


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    Discriminator(
        _kind,
        custom_error_type="unsupported_block",
        custom_error_message="must be a block of type text, image, thinking, tool_use or tool_result",
    ),
]


class InputMessage(RequestModel):
    """Message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[str, Tag("<str>")] | Annotated[BoundedList[Block], Tag("<list>")], Discriminator(str_or_list)
    ]


class Tool(RequestModel):
    """Tool that the model may call."""

    other_fields = TOOL_FIELDS

    type: Literal["custom"] | None = None
    name: str = Field(min_length=1)
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    """Accepted without effect. Arguments are constrained to the schema where `tool_choice` is `any` or `tool`;
    elsewhere the model writes calls in its own format."""
    cache_control: CacheControl | None = None


class FreeChoice(RequestModel):
    """Tool choice that leaves the tool to the model."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool = False


class NamedChoice(RequestModel):
    """Tool choice that names the tool to call."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool = False


class Thinking(RequestModel):
    """Whether to reason first, an argument of the chat template; the template decides by default and for `adaptive`."""

    other_fields = THINKING_FIELDS

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    """Accepted without effect. Anthropic defines it as a target; `max_tokens` limits reasoning and text together."""


class OutputFormat(RequestModel):
    """JSON schema of the answer."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestModel):
    """Format of the answer and effort."""

    other_fields = OUTPUT_FIELDS

    format: OutputFormat | None = None
    effort: str | None = None
    """Reasoning effort, the argument `reasoning_effort` of the chat template."""


class CountTokensRequest(RequestModel):
    """Request of POST /v1/messages/count_tokens."""

    other_fields = MESSAGES_FIELDS

    messages: Annotated[BoundedList[InputMessage], Field(min_length=1)]
    model: str | None = None
    """Name of a model or an adapter; default: the first model."""
    system: TextOrBlocks | None = None
    tools: ToolList[Tool] | None = None
    tool_choice: Annotated[FreeChoice | NamedChoice, Field(discriminator="type")] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None


class MessagesRequest(CountTokensRequest):
    """Request of POST /v1/messages."""

    max_tokens: int
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: float | None = sampling_field("top_p")
    top_k: int | None = sampling_field("top_k")
    stop_sequences: BoundedList[str] | None = None
    stream: bool | None = None


class TextContent(BaseModel):
    """Block of text in an answer."""

    type: Literal["text"] = "text"
    text: str
    citations: None = None


class ThinkingContent(BaseModel):
    """Block of reasoning in an answer."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str = ""


class ToolUseContent(BaseModel):
    """Tool call in an answer."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]
    """Arguments; where the model's text is not a JSON object, the text under the key `INVALID_JSON`."""


Content = TextContent | ThinkingContent | ToolUseContent


class MessageUsage(BaseModel):
    """Token counts; the prompt has the sum of the first three."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class Message(BaseModel):
    """Response of POST /v1/messages."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Content]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(BaseModel):
    """Response of POST /v1/messages/count_tokens."""

    input_tokens: int


class ErrorDetail(BaseModel):
    """Type and message of an error."""

    type: str
    message: str
    details: dict[str, Any] | None = None
    """Machine-readable details."""


class ErrorBody(BaseModel):
    """Body of every error response."""

    type: Literal["error"] = "error"
    error: ErrorDetail
    request_id: str | None
