"""Request and responses of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Tag

from ferrule.server.openai.fields import (
    CHAT_FIELDS,
)
from ferrule.server.openai.messages import Message
from ferrule.server.openai.protocol.generation import GenerationFields, PromptLogprobs
from ferrule.server.openai.protocol.usage import Usage
from ferrule.server.schema.base import RequestModel
from ferrule.server.schema.custom_tools import tool_kind
from ferrule.server.schema.limits import BoundedList, ToolList
from ferrule.server.schema.logprobs import TokenLogprob
from ferrule.server.schema.response_fields import omitted_if_none
from ferrule.server.schema.sampling import sampling_field
from ferrule.server.schema.timings import PromptProgress, Timings
from ferrule.server.schema.tools import Tool


class FunctionName(RequestModel):
    """Name of a function."""

    name: str


class NamedTool(RequestModel):
    """Tool choice that names the function to call."""

    type: Literal["function"]
    function: FunctionName


class NamedCustomTool(RequestModel):
    """Tool choice that names the custom tool to call."""

    type: Literal["custom"]
    custom: FunctionName


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<str>")]
    | Annotated[NamedTool, Tag("<function>")]
    | Annotated[NamedCustomTool, Tag("<custom>")],
    Discriminator(lambda given: "<str>" if isinstance(given, str) else tool_kind(given)),
]


class TemplateFields(RequestModel):
    """Fields about the rendering of a conversation."""

    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool | str = False

    @property
    def begins_answer(self) -> bool:
        """Whether the chat template begins an answer.

        By default it does, except after a message that the answer continues.
        """
        given = "add_generation_prompt" in self.model_fields_set
        return self.add_generation_prompt and (given or not self.continue_final_message)


class ChatCompletionRequest(GenerationFields, TemplateFields):
    """Request of POST /v1/chat/completions."""

    other_fields = CHAT_FIELDS

    messages: BoundedList[Message]
    max_tokens: int | None = sampling_field("max_tokens")
    max_completion_tokens: int | None = sampling_field("max_tokens")
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: ToolList[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    """Reasoning effort, an argument of the chat template."""
    reasoning_format: Literal["auto", "deepseek", "none"] | None = None
    """Place of the reasoning (llama.cpp's field): with `none` it stays in the content, with its tags."""
    verbose: bool | None = None
    """Whether a whole answer has the prompt and the output as text in `__verbose` (llama.cpp's field)."""
    documents: BoundedList[dict[str, Any]] | None = None
    echo: bool | None = None
    """Whether the answer begins with the content of the last message, where that is the assistant's."""
    stop_on_loop: bool = False
    """Whether to stop an answer that repeats itself endlessly, with the `stop_reason` "loop". It requires `n` = 1 and
    has no effect with `ignore_eos`."""


class ChatLogprobs(BaseModel):
    """Log-probabilities of the tokens of an answer."""

    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(BaseModel):
    """Function call, or its new part in a stream."""

    name: str | None = omitted_if_none()
    arguments: str


class ToolCall(BaseModel):
    """Tool call of a message."""

    id: str | None = omitted_if_none()
    type: Literal["function"] | None = omitted_if_none()
    function: FunctionCall


class ToolCallDelta(ToolCall):
    """New part of a tool call."""

    index: int


class CustomCall(BaseModel):
    """Call of a custom tool, or its new part in a stream."""

    name: str | None = omitted_if_none()
    input: str


class CustomToolCall(BaseModel):
    """Call of a custom tool in a message."""

    id: str | None = omitted_if_none()
    type: Literal["custom"] | None = omitted_if_none()
    custom: CustomCall


class CustomToolCallDelta(CustomToolCall):
    """New part of a call of a custom tool."""

    index: int


class ChatMessage(BaseModel):
    """Message of the assistant."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning: str | None = omitted_if_none()
    """Reasoning (vLLM's and OpenRouter's name)."""
    reasoning_content: str | None = omitted_if_none()
    """Reasoning again (DeepSeek's and older vLLM's name)."""
    tool_calls: list[ToolCall | CustomToolCall] | None = omitted_if_none()


class ChatDelta(BaseModel):
    """New part of the assistant's message."""

    role: Literal["assistant"] | None = omitted_if_none()
    content: str | None = omitted_if_none()
    reasoning: str | None = omitted_if_none()
    reasoning_content: str | None = omitted_if_none()
    tool_calls: list[ToolCallDelta | CustomToolCallDelta] | None = omitted_if_none()


class ChatChoice(BaseModel):
    """One of `n` completions of a conversation."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    stop_reason: int | str | None = None
    token_ids: list[int] | None = omitted_if_none()


class Verbose(BaseModel):
    """Prompt and output of a chat as the model reads and writes them."""

    prompt: str
    """Prompt with special tokens."""
    content: str
    """Output of the first choice before reasoning and tool calls are taken out of it."""


class ChatCompletion(BaseModel):
    """Response of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = omitted_if_none()
    prompt_token_ids: list[int] | None = omitted_if_none()
    timings: Timings | None = omitted_if_none()
    verbose: Verbose | None = omitted_if_none("__verbose")


class ChatTokens(BaseModel):
    """Response of POST /v1/chat/completions/input_tokens."""

    input_tokens: int


class ChatChunkChoice(BaseModel):
    """New part of one of `n` completions of a conversation."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = omitted_if_none()


class ChatChunk(BaseModel):
    """Event of a stream of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    """Usage; streams leave it out unless `stream_options` asks for it."""
    prompt_token_ids: list[int] | None = omitted_if_none()
    prompt_progress: PromptProgress | None = omitted_if_none()
    timings: Timings | None = omitted_if_none()
