"""The bodies of requests and responses, as OpenAI's API and vLLM's extras have them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from ferrule.server.openai.messages import Message
from ferrule.server.schema.base import RequestModel
from ferrule.server.schema.limits import BoundedDict, BoundedList, TokenIds, ToolList
from ferrule.server.schema.logprobs import TokenLogprob
from ferrule.server.schema.sampling import SamplingFields
from ferrule.server.schema.tools import ToolDefinition
from ferrule.server.schema.unions import prompt_kind, str_or_object

Prompts = Annotated[
    Annotated[str, Tag("<str>")]
    | Annotated[BoundedList[str], Tag("<strs>")]
    | Annotated[TokenIds, Tag("<ids>")]
    | Annotated[BoundedList[TokenIds], Tag("<lists>")],
    Discriminator(prompt_kind),
]
"""One, or several."""


class FunctionName(RequestModel):
    """The function of a named tool choice."""

    name: str


class NamedTool(RequestModel):
    """The one tool that is to be called."""

    type: Literal["function"]
    function: FunctionName


class StreamOptions(RequestModel):
    """What a stream says beside the deltas."""

    include_usage: bool = False
    """Whether a last chunk, without choices, tells the usage; in the others it is null then."""
    continuous_usage_stats: bool = False
    """Whether each chunk tells the usage so far (vLLM's)."""
    include_obfuscation: bool = False
    """OpenAI's padding against whoever watches the line: there is none here."""


class GenerationFields(SamplingFields):
    """What requests of both APIs have."""

    model: str | None = None
    """A model, or an adapter; left out, the first model."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    user: str | None = None
    """Accepted, and of no effect; so are the next five."""
    metadata: BoundedDict[str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    """Nothing is stored: true is refused."""
    priority: int = 0
    """Lower is scheduled earlier."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with those of the same salt."""
    return_token_ids: bool = False
    """Whether the answer has the ids of prompt and tokens."""
    return_tokens_as_token_ids: bool = False
    """Whether log-probabilities name tokens `token_id:123`, which tells them apart where their texts do not."""


class ChatCompletionRequest(GenerationFields):
    """POST /v1/chat/completions."""

    messages: BoundedList[Message]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: ToolList[ToolDefinition] | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("<str>")] | Annotated[NamedTool, Tag("<object>")],
            Discriminator(str_or_object),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    """Handed to the chat template."""
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: BoundedList[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool | str = False


class CompletionRequest(GenerationFields):
    """POST /v1/completions."""

    prompt: Prompts
    suffix: str | None = None
    max_tokens: int | None = 16
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: Literal[True] = True


class EmbeddingRequest(RequestModel):
    """POST /v1/embeddings."""

    input: Prompts
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: int | None = None
    user: str | None = None


class RerankDocument(RequestModel):
    """A document in Cohere's and Jina's longer form."""

    text: str


class RerankRequest(RequestModel):
    """POST /v1/rerank."""

    query: str
    documents: BoundedList[
        Annotated[
            Annotated[str, Tag("<str>")] | Annotated[RerankDocument, Tag("<object>")], Discriminator(str_or_object)
        ]
    ]
    model: str | None = None
    top_n: int | None = None
    instruction: str | None = None
    return_documents: bool = True
    truncate_prompt_tokens: int | None = None


class TokenizeRequest(RequestModel):
    """POST /tokenize: of a text, or of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: BoundedList[Message] | None = None
    add_special_tokens: bool | None = None
    """Of a text; True if left out. A conversation's are the template's."""
    return_token_strs: bool = False
    tools: ToolList[ToolDefinition] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool | str = False


class DetokenizeRequest(RequestModel):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds


class LoadAdapterRequest(RequestModel):
    """POST /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    model: str | None = None


class UnloadAdapterRequest(RequestModel):
    """POST /v1/unload_lora_adapter."""

    lora_name: str


def _extra() -> Any:
    """A field that is there only where it says something."""
    return Field(default=None, exclude_if=lambda value: value is None)


class PromptTokensDetails(BaseModel):
    """Of the tokens of a prompt."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """Of the tokens of a completion."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    """Tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = _extra()
    completion_tokens_details: CompletionTokensDetails | None = _extra()


class ChatLogprobs(BaseModel):
    """Of an answer's tokens."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(BaseModel):
    """Of a text's tokens, in the older API's form."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class FunctionCall(BaseModel):
    """A call, or in a stream what is new of it."""

    name: str | None = _extra()
    arguments: str


class ToolCall(BaseModel):
    """A call of a message."""

    id: str | None = _extra()
    type: Literal["function"] | None = _extra()
    function: FunctionCall


class ToolCallDelta(ToolCall):
    """What is new of a call."""

    index: int


class ChatMessage(BaseModel):
    """An answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = _extra()
    tool_calls: list[ToolCall] | None = _extra()


class ChatDelta(BaseModel):
    """What is new of an answer."""

    role: Literal["assistant"] | None = _extra()
    content: str | None = _extra()
    reasoning_content: str | None = _extra()
    tool_calls: list[ToolCallDelta] | None = _extra()


PromptLogprobs = list[dict[int, dict[str, Any]] | None]


class ChatChoice(BaseModel):
    """One of `n` answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    stop_reason: int | str | None = None
    token_ids: list[int] | None = _extra()


class ChatCompletion(BaseModel):
    """The answer to POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = _extra()
    prompt_token_ids: list[int] | None = _extra()


class ChatChunkChoice(BaseModel):
    """What is new of one of `n` answers."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = _extra()


class ChatChunk(BaseModel):
    """An event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    """Left out of a stream that was not asked for it."""
    prompt_token_ids: list[int] | None = _extra()


class CompletionChoice(BaseModel):
    """One of the continuations, or in a stream what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = _extra()
    prompt_logprobs: PromptLogprobs | None = _extra()
    prompt_token_ids: list[int] | None = _extra()


class Completion(BaseModel):
    """The answer to POST /v1/completions, and an event of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    """Left out of a stream that was not asked for it."""


class Embedding(BaseModel):
    """A text as numbers; base64 of little-endian float32 if asked."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingList(BaseModel):
    """The answer to POST /v1/embeddings."""

    object: Literal["list"] = "list"
    model: str
    data: list[Embedding]
    usage: Usage


class RerankResult(BaseModel):
    """A document's place."""

    index: int
    relevance_score: float
    document: dict[str, str] | None = _extra()


class RerankList(BaseModel):
    """The answer to POST /v1/rerank."""

    id: str
    model: str
    results: list[RerankResult]
    usage: Usage


class Tokens(BaseModel):
    """The answer to POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = _extra()


class Text(BaseModel):
    """The answer to POST /detokenize."""

    prompt: str


class ModelCard(BaseModel):
    """A model, or an adapter of one."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "ferrule"
    root: str
    parent: str | None = _extra()
    max_model_len: int


class ModelList(BaseModel):
    """The answer to GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorDetail = Field(description="What went wrong, and of which field.")
