"""The bodies of requests and answers below /api."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from ferrule.server.schema.base import RequestModel
from ferrule.server.schema.limits import BoundedList, StrOrList, ToolList
from ferrule.server.schema.logprobs import TokenLogprob
from ferrule.server.schema.tools import ToolDefinition
from ferrule.server.schema.unions import StrOrObject


class Options(RequestModel):
    """How tokens are chosen; what is left out, the model's generation_config.json decides, and not Ollama's defaults.

    Those of Ollama's that say how a model is to be loaded are not supported.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    seed: int | None = None
    stop: StrOrList | None = None
    num_predict: int | None = None
    """The most tokens; -1 and -2 for as many as there is room for."""
    num_ctx: int | None = None
    """Room for so many tokens is asked for; it is there, or this is an error."""


class GenerationRequest(RequestModel):
    """What requests have in common that generate."""

    model: str
    format: StrOrObject | None = None
    """`json`, or a schema."""
    options: Options | None = None
    stream: bool | None = None
    """Left out, true."""
    think: bool | Literal["low", "medium", "high"] | None = None
    """Told to the chat template, as `enable_thinking`, `thinking` and `reasoning_effort`; left out, it decides."""
    keep_alive: float | str | None = None
    """Accepted, and of no effect: models stay loaded."""
    logprobs: bool | None = None
    top_logprobs: int | None = None


class CalledFunction(RequestModel):
    """What was called."""

    index: int | None = None
    name: str
    arguments: dict[str, Any]


class MessageToolCall(RequestModel):
    """A call that the model made."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class ChatMessage(RequestModel):
    """A turn."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    images: Annotated[list[Any], Field(fail_fast=True, max_length=0)] | None = None
    """There is no model here that sees."""
    tool_calls: BoundedList[MessageToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class ChatRequest(GenerationRequest):
    """POST /api/chat."""

    messages: BoundedList[ChatMessage] = Field(default_factory=list[ChatMessage])
    tools: ToolList[ToolDefinition] | None = None


class GenerateRequest(GenerationRequest):
    """POST /api/generate."""

    prompt: str = ""
    suffix: str = ""
    """What comes after the text that is to be written; the prompt is as it is then, too."""
    system: str = ""
    raw: bool | None = None
    """Whether the prompt is as it is, without the chat template."""
    template: Literal[""] | None = None
    """The model's own, alone."""


class EmbedRequest(RequestModel):
    """POST /api/embed."""

    model: str
    input: StrOrList
    truncate: bool | None = None
    """Whether what is too long is cut; left out, true."""
    dimensions: int | None = None
    options: Options | None = None
    """Of them `num_ctx` alone: texts that are only read have no others."""
    keep_alive: float | str | None = None


class ShowRequest(RequestModel):
    """POST /api/show."""

    model: str
    verbose: bool | None = None
    """Accepted, and of no effect: the vocabulary is never told."""


def _extra() -> Any:
    """A field that is there only where it says something."""
    return Field(default=None, exclude_if=lambda value: value is None)


class ResponseToolCall(BaseModel):
    """A call, once it is whole."""

    id: str
    function: dict[str, Any]


class ResponseMessage(BaseModel):
    """An answer, or what is new of it."""

    role: Literal["assistant"] = "assistant"
    content: str
    thinking: str | None = _extra()
    tool_calls: list[ResponseToolCall] | None = _extra()


class GenerationLine(BaseModel):
    """A line of a stream; the last one is done, and has what comes after `done`. Durations are nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: str | None = _extra()
    total_duration: int | None = _extra()
    load_duration: int | None = _extra()
    prompt_eval_count: int | None = _extra()
    prompt_eval_duration: int | None = _extra()
    eval_count: int | None = _extra()
    eval_duration: int | None = _extra()
    logprobs: list[TokenLogprob] | None = _extra()


class ChatResponse(GenerationLine):
    """The answer to POST /api/chat."""

    message: ResponseMessage


class GenerateResponse(GenerationLine):
    """The answer to POST /api/generate."""

    response: str
    thinking: str | None = _extra()


class EmbedResponse(BaseModel):
    """The answer to POST /api/embed."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class ModelDetails(BaseModel):
    """What a model is."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ModelTag(BaseModel):
    """A model in a list."""

    name: str
    model: str
    modified_at: str
    size: int
    """Bytes of its weights, as they are held."""
    digest: str
    """Names that stand for the same model have the same, and other models another. Of what is known of a model without
    reading its weights again: no checksum of these."""
    details: ModelDetails


class RunningModel(ModelTag):
    """A model in memory, as all are."""

    expires_at: str
    """Centuries from now, as Ollama has it for a model that stays."""
    size_vram: Literal[0] = 0
    """Weights are in no memory but the processor's."""
    context_length: int


class RunningModels(BaseModel):
    """The answer to GET /api/ps."""

    models: list[RunningModel]


class ModelTags(BaseModel):
    """The answer to GET /api/tags."""

    models: list[ModelTag]


class ShowResponse(BaseModel):
    """The answer to POST /api/show."""

    parameters: str
    template: str
    """In Jinja's language, where Ollama's own are in Go's."""
    modified_at: str
    details: ModelDetails
    model_info: Mapping[str, Any]
    capabilities: list[str]


class Version(BaseModel):
    """The answer to GET /api/version."""

    version: str


def timestamp(seconds: float) -> str:
    """Seconds since 1970 as Ollama writes times."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
