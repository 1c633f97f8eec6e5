"""Request and response models of Ollama's API."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import BaseModel, Field

from ferrule.server.ollama.fields import CHAT_FIELDS, GENERATE_FIELDS, OPTIONS
from ferrule.server.schema.base import RequestModel
from ferrule.server.schema.duration import Duration
from ferrule.server.schema.limits import BoundedList, StrOrList, ToolList
from ferrule.server.schema.logprobs import TokenLogprob
from ferrule.server.schema.response_fields import omitted_if_none
from ferrule.server.schema.sampling import sampling_field
from ferrule.server.schema.tools import ToolDefinition
from ferrule.server.schema.unions import StrOrObject


class Options(RequestModel):
    """Sampling options. Defaults are those of the model's generation_config.json, not Ollama's."""

    other_fields = OPTIONS

    temperature: float | None = sampling_field("temperature")
    top_k: int | None = sampling_field("top_k")
    top_p: float | None = sampling_field("top_p")
    min_p: float | None = sampling_field("min_p")
    typical_p: float | None = sampling_field("typical_p")
    repeat_penalty: float | None = sampling_field("repetition_penalty")
    presence_penalty: float | None = sampling_field("presence_penalty")
    frequency_penalty: float | None = sampling_field("frequency_penalty")
    mirostat: int | None = sampling_field("mirostat")
    mirostat_tau: float | None = sampling_field("mirostat_tau")
    mirostat_eta: float | None = sampling_field("mirostat_eta")
    seed: int | None = sampling_field("seed")
    stop: StrOrList | None = sampling_field("stop")
    num_predict: int | None = None
    """Maximum number of tokens; -1 and -2 mean the rest of the context."""


class GenerationRequest(RequestModel):
    """Fields that requests for text share."""

    model: str
    format: StrOrObject | None = None
    """`json` or a JSON schema."""
    options: Options | None = None
    stream: bool | None = None
    """Whether to stream (default true)."""
    think: bool | Literal["low", "medium", "high"] | None = None
    """Whether to reason first: the arguments `enable_thinking`, `thinking` and `reasoning_effort` of the chat template,
    which decides by default."""
    keep_alive: Duration | None = None
    """Time for which a model that was loaded on demand stays loaded after the request; negative for no end."""
    logprobs: bool | None = None
    top_logprobs: int | None = None


class CalledFunction(RequestModel):
    """Name and arguments of a called function."""

    index: int | None = None
    name: str
    arguments: dict[str, Any]


class MessageToolCall(RequestModel):
    """Tool call of the model."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class ChatMessage(RequestModel):
    """Message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    images: BoundedList[str] | None = None
    """Images in base64, which precede the content."""
    thinking: str | None = None

    tool_calls: BoundedList[MessageToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class ChatRequest(GenerationRequest):
    """Request of POST /api/chat."""

    other_fields = CHAT_FIELDS

    messages: BoundedList[ChatMessage] = Field(default_factory=list[ChatMessage])
    tools: ToolList[ToolDefinition] | None = None


class GenerateRequest(GenerationRequest):
    """Request of POST /api/generate."""

    other_fields = GENERATE_FIELDS

    prompt: str = ""
    suffix: str = ""
    """Text after the middle to generate (fill-in-the-middle); the prompt is then used without the chat template."""
    system: str = ""
    images: BoundedList[str] | None = None
    """Images in base64, which precede the prompt."""
    raw: bool | None = None
    """Whether to use the prompt without the chat template."""


class EmbedRequest(RequestModel):
    """Request of POST /api/embed."""

    model: str
    input: StrOrList
    truncate: bool | None = None
    """Whether to truncate a text that is too long (default true)."""
    dimensions: int | None = None
    options: Options | None = None
    """Options about loading; sampling options do not apply to embeddings."""
    keep_alive: Duration | None = None


class EmbeddingsRequest(RequestModel):
    """Request of POST /api/embeddings, the older form of /api/embed."""

    model: str
    prompt: str = ""
    """Text; a text that is too long is truncated, an empty one has an empty embedding."""
    options: Options | None = None
    """Options about loading; sampling options do not apply to embeddings."""
    keep_alive: Duration | None = None


class ShowRequest(RequestModel):
    """Request of POST /api/show."""

    model: str
    verbose: bool | None = None
    """Accepted without effect: the vocabulary is not returned."""


class ResponseToolCall(BaseModel):
    """Complete tool call."""

    id: str
    function: dict[str, Any]


class ResponseMessage(BaseModel):
    """Message of the assistant, or its new part in a stream."""

    role: Literal["assistant"] = "assistant"
    content: str
    thinking: str | None = omitted_if_none()
    tool_calls: list[ResponseToolCall] | None = omitted_if_none()


class GenerationLine(BaseModel):
    """Line of a stream. Only the last line, with `done`, has the fields after `done`. Durations are in nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: str | None = omitted_if_none()
    total_duration: int | None = omitted_if_none()
    load_duration: int | None = omitted_if_none()
    prompt_eval_count: int | None = omitted_if_none()
    prompt_eval_duration: int | None = omitted_if_none()
    eval_count: int | None = omitted_if_none()
    eval_duration: int | None = omitted_if_none()
    logprobs: list[TokenLogprob] | None = omitted_if_none()


class ChatResponse(GenerationLine):
    """Response of POST /api/chat."""

    message: ResponseMessage


class GenerateResponse(GenerationLine):
    """Response of POST /api/generate."""

    response: str
    thinking: str | None = omitted_if_none()


class EmbedResponse(BaseModel):
    """Response of POST /api/embed."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class EmbeddingsResponse(BaseModel):
    """Response of POST /api/embeddings."""

    embedding: list[float]


class ModelDetails(BaseModel):
    """Architecture, size and format of a model."""

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
    """Size of the loaded weights, in bytes."""
    digest: str
    """Digest of the model's path, architecture and quantization, the same for all names of a model; not a checksum of
    the weights."""
    details: ModelDetails


class RunningModel(ModelTag):
    """A loaded model."""

    expires_at: str
    """Time at which the idle model is unloaded; in the far future, as in Ollama, for a model that stays loaded."""
    size_vram: Literal[0] = 0
    """Bytes in GPU memory: always 0."""
    context_length: int


class RunningModels(BaseModel):
    """Response of GET /api/ps."""

    models: list[RunningModel]


class ModelTags(BaseModel):
    """Response of GET /api/tags."""

    models: list[ModelTag]


class ShowResponse(BaseModel):
    """Response of POST /api/show."""

    parameters: str
    template: str
    """Chat template, in Jinja; Ollama's own are Go templates."""
    modified_at: str
    details: ModelDetails
    model_info: Mapping[str, Any]
    capabilities: list[str]


class Version(BaseModel):
    """Response of GET /api/version."""

    version: str


def timestamp(seconds: float) -> str:
    """Formats seconds since 1970 as Ollama does."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
