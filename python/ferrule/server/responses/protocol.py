"""The bodies of POST /v1/responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, Discriminator, Field, Tag

from ferrule.server.schema.base import RequestModel
from ferrule.server.schema.limits import BoundedDict, BoundedList, ToolList
from ferrule.server.schema.logprobs import TokenLogprob
from ferrule.server.schema.sampling import SamplingFields
from ferrule.server.schema.unions import str_or_list, str_or_object

Status = Literal["in_progress", "completed", "incomplete"]
LOGPROBS = "message.output_text.logprobs"
"""What `include` may ask for."""


class TextPart(RequestModel):
    """A part of a message, or of what a tool returned."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: BoundedList[Any] | None = None
    """Of an answer that is handed back; so are the log-probabilities. Neither is read."""
    logprobs: BoundedList[Any] | None = None


TextOrParts = Annotated[
    Annotated[str, Tag("<str>")] | Annotated[BoundedList[TextPart], Tag("<list>")], Discriminator(str_or_list)
]


class MessageItem(RequestModel):
    """Something that was said."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: TextOrParts
    id: str | None = None
    status: Status | None = None


class FunctionCallItem(RequestModel):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None


class FunctionCallOutputItem(RequestModel):
    """What the tool returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: TextOrParts
    id: str | None = None
    status: Status | None = None


class SummaryText(RequestModel):
    """A part of the summary of a reasoning."""

    type: Literal["summary_text"]
    text: str


class ReasoningText(RequestModel):
    """A part of a reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(RequestModel):
    """What the model thought; the template says what becomes of it."""

    type: Literal["reasoning"]
    summary: list[SummaryText] = Field(default_factory=list[SummaryText], max_length=0, fail_fast=True)
    """Empty: this server summarizes nothing."""
    content: BoundedList[ReasoningText] | None = None
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
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    Discriminator(
        _kind,
        custom_error_type="unsupported_item",
        custom_error_message="its type must be message, function_call, function_call_output or reasoning",
    ),
]


class FunctionTool(RequestModel):
    """A function that may be called."""

    type: Literal["function"]
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """A call is held to the parameters where `tool_choice` is `required` or names the function, strict or not.
    Elsewhere the model writes it in its own form."""


class FunctionChoice(RequestModel):
    """The one function that is to be called."""

    type: Literal["function"]
    name: str


class PlainFormat(RequestModel):
    """Text, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormat(RequestModel):
    """What a schema allows."""

    type: Literal["json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    """Accepted, and of no effect: a schema is always held; so are its name and its description."""


def _format(given: object) -> str:
    kind = cast("Mapping[str, object]", given).get("type") if isinstance(given, Mapping) else None
    return "<plain>" if kind in ("text", "json_object") else f"<{kind}>"


TextFormat = Annotated[
    Annotated[PlainFormat, Tag("<plain>")] | Annotated[SchemaFormat, Tag("<json_schema>")],
    Discriminator(
        _format,
        custom_error_type="unsupported_format",
        custom_error_message="its type must be text, json_object or json_schema",
    ),
]


class TextConfig(RequestModel):
    """What the text of an answer is to be."""

    format: TextFormat | None = None


class Reasoning(RequestModel):
    """How long to think."""

    effort: str | None = None
    """Handed to the chat template, as `reasoning_effort`."""
    summary: None = None


class StreamOptions(RequestModel):
    """Options of a stream. The last event always reports the usage."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False
    """Accepted without effect: no padding is sent."""


class ResponsesRequest(SamplingFields):
    """POST /v1/responses; how tokens are chosen can be said in all the words of /v1/chat/completions."""

    input: Annotated[
        Annotated[str, Tag("<str>")] | Annotated[BoundedList[Item], Tag("<list>")], Discriminator(str_or_list)
    ]
    model: str | None = None
    """A model, or an adapter; left out, the first model."""
    instructions: str | None = None
    tools: ToolList[FunctionTool] | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("<str>")] | Annotated[FunctionChoice, Tag("<object>")],
            Discriminator(str_or_object),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: int | None = None
    include: BoundedList[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: BoundedDict[str] | None = None
    """Comes back with the answer."""
    store: bool | None = None
    """Nothing is stored: true is refused, and so is what the next three ask for."""
    previous_response_id: str | None = None
    background: bool | None = None
    truncation: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    """Accepted, and of no effect; so are the next three."""
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    priority: int = 0
    """Lower is scheduled earlier."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with those of the same salt."""
    chat_template_kwargs: dict[str, Any] | None = None


class OutputText(BaseModel):
    """The text of an answer."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = Field(default_factory=list[Any])
    logprobs: list[TokenLogprob] = Field(default_factory=list[TokenLogprob])


class OutputMessage(BaseModel):
    """What was said."""

    type: Literal["message"] = "message"
    id: str
    role: Literal["assistant"] = "assistant"
    status: Status
    content: list[OutputText]


class OutputCall(BaseModel):
    """A call of a function."""

    type: Literal["function_call"] = "function_call"
    id: str
    call_id: str
    name: str
    arguments: str
    status: Status


class OutputReasoningText(BaseModel):
    """What was thought, in one part."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputReasoning(BaseModel):
    """What was thought."""

    type: Literal["reasoning"] = "reasoning"
    id: str
    summary: list[Any] = Field(default_factory=list[Any])
    content: list[OutputReasoningText]
    status: Status


OutputItem = OutputMessage | OutputCall | OutputReasoning


class InputDetails(BaseModel):
    """Of the tokens of a prompt."""

    cached_tokens: int
    cache_write_tokens: int = 0
    """Of interest to whoever pays for it."""


class OutputDetails(BaseModel):
    """Of the tokens of an answer."""

    reasoning_tokens: int
    """Of the reasoning's text, without what marks it as such."""


class ResponseUsage(BaseModel):
    """Tokens."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseFailure(BaseModel):
    """Why there is no answer."""

    code: str
    message: str


class ResponseBody(BaseModel):
    """The answer to POST /v1/responses, and its state in the events of a stream."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
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
    previous_response_id: None = None
    reasoning: dict[str, str | None]
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, str]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    store: Literal[False] = False
    service_tier: Literal["default"] = "default"
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
