"""Request and response models of /v1/responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BaseModel, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from ferrule.server.responses.carried_reasoning import unwrap_reasoning
from ferrule.server.responses.fields import (
    CALL_FIELDS,
    CUSTOM_TOOL_FIELDS,
    IMAGE_PART_FIELDS,
    ITEM_FIELDS,
    REASONING_FIELDS,
    RESPONSE_FIELDS,
    STREAM_FIELDS,
    TEXT_FIELDS,
    TEXT_PART_FIELDS,
)
from ferrule.server.schema.base import RequestModel
from ferrule.server.schema.custom_tools import InputGrammar, Syntax, tool_kind
from ferrule.server.schema.images import part_kind
from ferrule.server.schema.limits import BoundedDict, BoundedList, ToolList
from ferrule.server.schema.logprobs import TokenLogprob
from ferrule.server.schema.response_fields import omitted_if_none
from ferrule.server.schema.sampling import SamplingFields, sampling_field
from ferrule.server.schema.timings import Timings
from ferrule.server.schema.unions import str_or_list, str_or_object

Status = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
LOGPROBS = "message.output_text.logprobs"
"""Value of `include` for log-probabilities."""
ENCRYPTED_REASONING = "reasoning.encrypted_content"
"""Value of `include` for reasoning in the form that clients without storage send back."""


class TextPart(RequestModel):
    """Text part of a message or of a tool's result."""

    other_fields = TEXT_PART_FIELDS

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: BoundedList[Any] | None = None
    """Accepted without effect, like `logprobs`: parts of an earlier answer that is sent back."""
    logprobs: BoundedList[Any] | None = None


class ImagePart(RequestModel):
    """Image part of a message or of a tool's result."""

    other_fields = IMAGE_PART_FIELDS

    type: Literal["input_image"]
    image_url: str
    detail: str | None = None
    """Accepted without effect: the model's configuration sets the resolution."""


Part = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[ImagePart, Tag("<image>")],
    Discriminator(part_kind),
]
TextOrParts = Annotated[
    Annotated[str, Tag("<str>")] | Annotated[BoundedList[Part], Tag("<list>")], Discriminator(str_or_list)
]


class MessageItem(RequestModel):
    """Message of a conversation."""

    other_fields = ITEM_FIELDS

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: TextOrParts
    id: str | None = None
    status: Status | None = None


class FunctionCallItem(RequestModel):
    """Tool call of the model."""

    other_fields = CALL_FIELDS

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None


class FunctionCallOutputItem(RequestModel):
    """Result of a tool call."""

    type: Literal["function_call_output"]
    call_id: str
    output: TextOrParts
    id: str | None = None
    status: Status | None = None


class CustomCallItem(RequestModel):
    """Call of a custom tool."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    id: str | None = None
    status: Status | None = None


class CustomCallOutputItem(FunctionCallOutputItem):
    """Result of a custom tool."""

    type: Literal["custom_tool_call_output"]  # type: ignore[assignment]


class SummaryText(RequestModel):
    """Part of a reasoning summary."""

    type: Literal["summary_text"]
    text: str


class ReasoningText(RequestModel):
    """Part of the model's reasoning."""

    type: Literal["reasoning_text"]
    text: str


def _check_carried(contents: str) -> str:
    try:
        unwrap_reasoning(contents)
    except ValueError:
        message = "is reasoning of another server, which this one cannot read; leave it out"
        raise PydanticCustomError("foreign_reasoning", message) from None
    return contents


class ReasoningItem(RequestModel):
    """Reasoning of the model; the chat template decides whether it is rendered."""

    other_fields = ITEM_FIELDS

    type: Literal["reasoning"]
    summary: list[SummaryText] = Field(default_factory=list[SummaryText], max_length=0, fail_fast=True)
    """Must be empty: the server summarizes no reasoning."""
    content: BoundedList[ReasoningText] | None = None
    encrypted_content: Annotated[str, AfterValidator(_check_carried)] | None = None
    """Reasoning in the form of `include`; read where there is no `content`."""
    id: str | None = None
    status: Status | None = None


def _kind(item: object) -> str:
    if isinstance(item, Mapping):
        kind = cast("Mapping[str, object]", item).get("type", "message")
        return f"<{kind}>"
    return f"<{getattr(item, 'type', None)}>"


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionCallOutputItem, Tag("<function_call_output>")]
    | Annotated[CustomCallItem, Tag("<custom_tool_call>")]
    | Annotated[CustomCallOutputItem, Tag("<custom_tool_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    Discriminator(
        _kind,
        custom_error_type="unsupported_item",
        custom_error_message="must be an item of type message, function_call, function_call_output, custom_tool_call, "
        "custom_tool_call_output or reasoning",
    ),
]


class FunctionTool(RequestModel):
    """Function that the model may call."""

    type: Literal["function"]
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Whether arguments match the parameters and have every property and no other. Arguments always match where
    `tool_choice` is `required` or names the function; elsewhere where one tool is strict and calls are JSON in tags."""

    @property
    def is_strict(self) -> bool:
        """Whether calls are constrained wherever their format allows it."""
        return self.strict is True


class CustomFormat(RequestModel):
    """Format of the input of a custom tool."""

    type: Literal["text", "grammar"]
    syntax: Syntax | None = None
    definition: str | None = None

    @property
    def grammar(self) -> InputGrammar | None:
        """Grammar of the input; None for any text."""
        if self.definition is None:
            return None
        return InputGrammar(syntax=self.syntax or "lark", definition=self.definition)


class CustomTool(RequestModel):
    """Tool whose input is text; the model calls it as a function with one argument."""

    other_fields = CUSTOM_TOOL_FIELDS

    type: Literal["custom"]
    name: str = Field(min_length=1)
    description: str | None = None
    format: CustomFormat | None = None

    @property
    def grammar(self) -> InputGrammar | None:
        """Grammar of the input; None for any text."""
        return None if self.format is None else self.format.grammar

    @property
    def is_strict(self) -> bool:
        """Whether calls are constrained wherever their format allows it."""
        return self.grammar is not None and self.grammar.enforced


Tool = Annotated[
    Annotated[FunctionTool, Tag("<function>")] | Annotated[CustomTool, Tag("<custom>")], Discriminator(tool_kind)
]


class ToolChoice(RequestModel):
    """Tool choice that names the tool to call."""

    type: Literal["function", "custom"]
    name: str


class PlainFormat(RequestModel):
    """Format of an answer that is text or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormat(RequestModel):
    """Format of an answer that follows a JSON schema."""

    type: Literal["json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    """Whether objects have every property and no other; the schema is always enforced."""


def _format(given: object) -> str:
    kind = cast("Mapping[str, object]", given).get("type") if isinstance(given, Mapping) else None
    return "<plain>" if kind in ("text", "json_object") else f"<{kind}>"


TextFormat = Annotated[
    Annotated[PlainFormat, Tag("<plain>")] | Annotated[SchemaFormat, Tag("<json_schema>")],
    Discriminator(
        _format,
        custom_error_type="unsupported_format",
        custom_error_message="must be a format of type text, json_object or json_schema",
    ),
]


class TextConfig(RequestModel):
    """Format of the answer's text."""

    other_fields = TEXT_FIELDS

    format: TextFormat | None = None


class Reasoning(RequestModel):
    """Reasoning effort."""

    other_fields = REASONING_FIELDS

    effort: str | None = None
    """Reasoning effort, the argument `reasoning_effort` of the chat template."""


class StreamOptions(RequestModel):
    """Options of a stream. The last event always reports the usage."""

    other_fields = STREAM_FIELDS


class ResponsesRequest(SamplingFields):
    """Request of POST /v1/responses, with the sampling parameters of /v1/chat/completions."""

    other_fields = RESPONSE_FIELDS

    input: Annotated[
        Annotated[str, Tag("<str>")] | Annotated[BoundedList[Item], Tag("<list>")], Discriminator(str_or_list)
    ]
    allow_fallback: bool | None = None
    """Whether the request may be sent to the server's fallback (default true)."""
    model: str | None = None
    """Name of a model or an adapter; default: the first model."""
    instructions: str | None = None
    tools: ToolList[Tool] | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("<str>")] | Annotated[ToolChoice, Tag("<object>")],
            Discriminator(str_or_object),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: int | None = sampling_field("max_tokens")
    include: (
        BoundedList[
            Literal[
                "message.output_text.logprobs",
                "reasoning.encrypted_content",
                "code_interpreter_call.outputs",
                "computer_call_output.output.image_url",
                "file_search_call.results",
                "message.input_image.image_url",
                "web_search_call.action.sources",
                "web_search_call.results",
            ]
        ]
        | None
    ) = None
    """Additional parts of the answer; only the first two values have an effect, since the server has no other tools."""
    top_logprobs: int | None = None
    store: bool | None = None
    """Whether to store the response; default: if the server stores responses."""
    previous_response_id: str | None = None
    """Stored response that this one continues: its conversation precedes the input, without its instructions."""
    background: bool | None = None
    """Whether to answer at once and to generate the response meanwhile; it must be stored."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    timings_per_token: bool | None = None
    """Whether to report timings with the answer, and with each new text of a stream (llama.cpp's field)."""
    return_progress: bool | None = None
    """Whether a stream reports the progress of the prompt, in events `response.in_progress` (llama.cpp's field)."""
    metadata: BoundedDict[str] | None = None
    """Returned with the answer, like the next three fields; none has another effect."""
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    priority: int = 0
    """Scheduling priority; lower values are scheduled earlier."""
    cache_salt: str | None = None
    """Salt of the prefix cache: requests share cached prefixes only with requests of the same salt."""
    chat_template_kwargs: dict[str, Any] | None = None


class OutputText(BaseModel):
    """Text of an answer."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = Field(default_factory=list[Any])
    logprobs: list[TokenLogprob] = Field(default_factory=list[TokenLogprob])


class OutputMessage(BaseModel):
    """Message of an answer."""

    type: Literal["message"] = "message"
    id: str
    role: Literal["assistant"] = "assistant"
    status: Status
    content: list[OutputText]


class OutputCall(BaseModel):
    """Function call of an answer."""

    type: Literal["function_call"] = "function_call"
    id: str
    call_id: str
    name: str
    arguments: str
    status: Status


class OutputCustomCall(BaseModel):
    """Call of a custom tool of an answer."""

    type: Literal["custom_tool_call"] = "custom_tool_call"
    id: str
    call_id: str
    name: str
    input: str
    status: Status


class OutputReasoningText(BaseModel):
    """Text of the reasoning."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputReasoning(BaseModel):
    """Reasoning of an answer."""

    type: Literal["reasoning"] = "reasoning"
    id: str
    summary: list[Any] = Field(default_factory=list[Any])
    content: list[OutputReasoningText]
    encrypted_content: str | None = omitted_if_none()
    """The reasoning in base64, for clients that send back only this field; it is not encrypted."""
    status: Status


OutputItem = OutputMessage | OutputCall | OutputCustomCall | OutputReasoning


class InputDetails(BaseModel):
    """Details of the input tokens."""

    cached_tokens: int
    cache_write_tokens: int = 0
    """Always 0; OpenAI bills cache writes."""


class OutputDetails(BaseModel):
    """Details of the output tokens."""

    reasoning_tokens: int
    """Tokens of the reasoning text, without its markers."""


class ResponseUsage(BaseModel):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseFailure(BaseModel):
    """Code and message of a failed response."""

    code: str
    message: str


class ResponseBody(BaseModel):
    """Response of POST /v1/responses, and its state in the events of a stream."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: ResponseStatus
    error: ResponseFailure | None = None
    incomplete_details: dict[str, str] | None = None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, str]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["disabled"] = "disabled"
    background: bool
    store: bool
    service_tier: Literal["default"] = "default"
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    timings: Timings | None = omitted_if_none()


class DeletedResponse(BaseModel):
    """Answer to the deletion of a response."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ItemPage(BaseModel):
    """Page of the items that a response answers."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(BaseModel):
    """Response of POST /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
