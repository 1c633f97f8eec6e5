"""Request and response models of OpenAI's API, with vLLM's extensions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, RootModel, Tag

from ferrule.server.openai.fields import (
    CHAT_FIELDS,
    EMBEDDING_FIELDS,
    POOLING_FIELDS,
    RERANK_FIELDS,
    SERVICE_FIELDS,
    STREAM_FIELDS,
)
from ferrule.server.openai.messages import Message
from ferrule.server.schema.base import RequestModel
from ferrule.server.schema.custom_tools import tool_kind
from ferrule.server.schema.limits import BoundedList, StrOrList, TokenIds, ToolList
from ferrule.server.schema.llama_cpp import LlamaCppFields
from ferrule.server.schema.logprobs import TokenLogprob
from ferrule.server.schema.sampling import sampling_field
from ferrule.server.schema.timings import PromptProgress, Timings
from ferrule.server.schema.tools import Tool
from ferrule.server.schema.unions import prompt_kind, str_or_object

Prompts = Annotated[
    Annotated[str, Tag("<str>")]
    | Annotated[BoundedList[str], Tag("<strs>")]
    | Annotated[TokenIds, Tag("<ids>")]
    | Annotated[BoundedList[TokenIds], Tag("<lists>")],
    Discriminator(prompt_kind),
]
"""One prompt or several, as text or token ids."""


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


class StreamOptions(RequestModel):
    """Options of a stream."""

    other_fields = STREAM_FIELDS

    include_usage: bool = False
    """Whether to send a last chunk with the usage and no choices; the usage of other chunks is then null."""
    continuous_usage_stats: bool = False
    """Whether to report the usage so far in each chunk (vLLM's field)."""


class GenerationFields(LlamaCppFields):
    """Fields that chat completions and completions share."""

    other_fields = SERVICE_FIELDS

    model: str | None = None
    """Name of a model or an adapter; default: the first model."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    priority: int = 0
    """Scheduling priority; lower values are scheduled earlier."""
    allow_fallback: bool | None = None
    """Whether the request may be sent to the server's fallback (default true)."""
    cache_salt: str | None = None
    """Salt of the prefix cache: requests share cached prefixes only with requests of the same salt."""
    return_token_ids: bool = False
    """Whether to return the token ids of prompt and output."""
    return_tokens_as_token_ids: bool = False
    """Whether log-probabilities name tokens `token_id:123`, which distinguishes tokens with the same text."""
    truncate_prompt_tokens: int | None = None
    """Number of last tokens of the prompt to keep; -1 keeps as many as leave room for the output."""
    use_beam_search: bool = False
    """Whether to search for the most likely completions, with `best_of` or else `n` beams, instead of sampling."""
    length_penalty: float | None = None
    """Exponent of the length that divides a completion's sum of log-probabilities in a beam search (default 1)."""
    early_stopping: bool | Literal["never"] | None = None
    """When a beam search ends, as in `BeamSearchParams`."""


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


class CompletionRequest(GenerationFields):
    """Request of POST /v1/completions."""

    prompt: Prompts
    suffix: str | None = None
    max_tokens: int | None = 16
    echo: bool | None = None
    logprobs: int | None = sampling_field("logprobs")
    add_special_tokens: Literal[True] = True


class EmbeddingRequest(RequestModel):
    """Request of POST /v1/embeddings."""

    other_fields = EMBEDDING_FIELDS

    input: Prompts
    model: str | None = None
    allow_fallback: bool | None = None
    """Whether the request may be sent to the server's fallback (default true)."""
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: int | None = None


class ClassifyRequest(RequestModel):
    """Request of POST /classify."""

    other_fields = POOLING_FIELDS

    input: Prompts
    model: str | None = None
    truncate_prompt_tokens: int | None = None


class PoolingRequest(EmbeddingRequest):
    """Request of POST /pooling."""

    other_fields = POOLING_FIELDS

    task: Literal["embed", "token_embed", "classify"] | None = None
    """Task: the embedding of each text, of each token (default, except for classifiers), or the probabilities of a
    classifier's labels."""


class ScoreRequest(RequestModel):
    """Request of POST /v1/score."""

    other_fields = POOLING_FIELDS

    text_1: StrOrList | None = None
    text_2: StrOrList | None = None
    queries: StrOrList | None = None
    """Another name of `text_1`, as `data_1`."""
    documents: StrOrList | None = None
    """Another name of `text_2`, as `data_2`."""
    data_1: StrOrList | None = None
    data_2: StrOrList | None = None
    model: str | None = None
    truncate_prompt_tokens: int | None = None


class RerankDocument(RequestModel):
    """Document as an object (Cohere's and Jina's second form)."""

    text: str


class RerankRequest(RequestModel):
    """Request of POST /v1/rerank, with `documents` or, in the form of text-embeddings-inference, with `texts`."""

    other_fields = RERANK_FIELDS

    query: str
    documents: (
        Annotated[
            BoundedList[
                Annotated[
                    Annotated[str, Tag("<str>")] | Annotated[RerankDocument, Tag("<object>")],
                    Discriminator(str_or_object),
                ]
            ],
            Field(min_length=1),
        ]
        | None
    ) = None
    texts: Annotated[BoundedList[str], Field(min_length=1)] | None = None
    """Documents; the response is then a list of indices and scores."""
    return_text: bool = False
    """Whether the response to `texts` has the texts."""
    truncate: bool = False
    """Whether to truncate `texts` that are too long."""
    model: str | None = None
    top_n: int | None = None
    instruction: str | None = None
    return_documents: bool = True
    truncate_prompt_tokens: int | None = None


class TokenizeRequest(TemplateFields):
    """Request of POST /tokenize, with a text, in `prompt` or `content`, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: BoundedList[Message] | None = None
    add_special_tokens: bool | None = None
    """Whether to add special tokens to a text (default true); a chat template writes its own."""
    return_token_strs: bool = False
    content: str | None = None
    """Text, without special tokens unless `add_special` is true (llama.cpp's field)."""
    add_special: bool = False
    with_pieces: bool = False
    """Whether `tokens` is a list of objects with `id` and `piece` (llama.cpp's field)."""
    tools: ToolList[Tool] | None = None


class TemplateRequest(TemplateFields):
    """Request of POST /apply-template."""

    model: str | None = None
    messages: BoundedList[Message]
    tools: ToolList[Tool] | None = None


class DetokenizeRequest(RequestModel):
    """Request of POST /detokenize."""

    model: str | None = None
    tokens: TokenIds


class LoadAdapterRequest(RequestModel):
    """Request of POST /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    model: str | None = None


class UnloadAdapterRequest(RequestModel):
    """Request of POST /v1/unload_lora_adapter."""

    lora_name: str


def _extra(name: str | None = None) -> Any:
    """Returns a field that is left out where it is None, with its name in JSON."""
    return Field(default=None, serialization_alias=name, exclude_if=lambda value: value is None)


class PromptTokensDetails(BaseModel):
    """Details of the prompt tokens."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """Details of the completion tokens."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = _extra()
    completion_tokens_details: CompletionTokensDetails | None = _extra()


class ChatLogprobs(BaseModel):
    """Log-probabilities of the tokens of an answer."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(BaseModel):
    """Log-probabilities of the tokens of a text, in the form of the completions API."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class FunctionCall(BaseModel):
    """Function call, or its new part in a stream."""

    name: str | None = _extra()
    arguments: str


class ToolCall(BaseModel):
    """Tool call of a message."""

    id: str | None = _extra()
    type: Literal["function"] | None = _extra()
    function: FunctionCall


class ToolCallDelta(ToolCall):
    """New part of a tool call."""

    index: int


class CustomCall(BaseModel):
    """Call of a custom tool, or its new part in a stream."""

    name: str | None = _extra()
    input: str


class CustomToolCall(BaseModel):
    """Call of a custom tool in a message."""

    id: str | None = _extra()
    type: Literal["custom"] | None = _extra()
    custom: CustomCall


class CustomToolCallDelta(CustomToolCall):
    """New part of a call of a custom tool."""

    index: int


class ChatMessage(BaseModel):
    """Message of the assistant."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning: str | None = _extra()
    """Reasoning (vLLM's and OpenRouter's name)."""
    reasoning_content: str | None = _extra()
    """Reasoning again (DeepSeek's and older vLLM's name)."""
    tool_calls: list[ToolCall | CustomToolCall] | None = _extra()


class ChatDelta(BaseModel):
    """New part of the assistant's message."""

    role: Literal["assistant"] | None = _extra()
    content: str | None = _extra()
    reasoning: str | None = _extra()
    reasoning_content: str | None = _extra()
    tool_calls: list[ToolCallDelta | CustomToolCallDelta] | None = _extra()


PromptLogprobs = list[dict[int, dict[str, Any]] | None]


class ChatChoice(BaseModel):
    """One of `n` completions of a conversation."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    stop_reason: int | str | None = None
    token_ids: list[int] | None = _extra()


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
    prompt_logprobs: PromptLogprobs | None = _extra()
    prompt_token_ids: list[int] | None = _extra()
    timings: Timings | None = _extra()
    verbose: Verbose | None = _extra("__verbose")


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
    token_ids: list[int] | None = _extra()


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
    prompt_token_ids: list[int] | None = _extra()
    prompt_progress: PromptProgress | None = _extra()
    timings: Timings | None = _extra()


class CompletionChoice(BaseModel):
    """One of the completions of a text, or its new part in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = _extra()
    prompt_logprobs: PromptLogprobs | None = _extra()
    prompt_token_ids: list[int] | None = _extra()


class Completion(BaseModel):
    """Response of POST /v1/completions, and an event of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    """Usage; streams leave it out unless `stream_options` asks for it."""
    prompt_progress: PromptProgress | None = _extra()
    """Progress of a prompt; only events of a stream have it."""
    timings: Timings | None = _extra()


class Embedding(BaseModel):
    """Embedding of a text, as numbers or as base64 of little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingList(BaseModel):
    """Response of POST /v1/embeddings."""

    object: Literal["list"] = "list"
    model: str
    data: list[Embedding]
    usage: Usage


class Classification(BaseModel):
    """Probabilities of a classifier's labels for a text."""

    index: int
    label: str
    """The most likely label."""
    probs: list[float]
    num_classes: int


class ClassificationList(BaseModel):
    """Response of POST /classify."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Classification]
    usage: Usage


class Pooled(BaseModel):
    """Numbers computed for a text: a list, a list for each token, or base64 of little-endian float32."""

    object: Literal["pooling"] = "pooling"
    index: int
    data: list[float] | list[list[float]] | str


class PoolingList(BaseModel):
    """Response of POST /pooling."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Pooled]
    usage: Usage


class Score(BaseModel):
    """Relevance of one text to another."""

    object: Literal["score"] = "score"
    index: int
    score: float


class ScoreList(BaseModel):
    """Response of POST /v1/score."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: Usage


class RerankResult(BaseModel):
    """Index and score of a document."""

    index: int
    relevance_score: float
    document: dict[str, str] | None = _extra()


class RerankList(BaseModel):
    """Response of POST /v1/rerank."""

    id: str
    model: str
    results: list[RerankResult]
    usage: Usage


class TextRank(BaseModel):
    """Index and score of a text, in the form of text-embeddings-inference."""

    index: int
    score: float
    text: str | None = _extra()


class TextRanks(RootModel[list[TextRank]]):
    """Response of POST /v1/rerank to a request with `texts`."""


class TokenPiece(BaseModel):
    """A token with its text; its bytes where they are not UTF-8."""

    id: int
    piece: str | list[int]


class Tokens(BaseModel):
    """Response of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int] | list[TokenPiece]
    token_strs: list[str] | None = _extra()


class TokenizerInfo(BaseModel):
    """Response of GET /tokenizer_info."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    chat_template: str | None


class Text(BaseModel):
    """Response of POST /detokenize."""

    prompt: str
    content: str
    """The same text (llama.cpp's name)."""


class Rendered(BaseModel):
    """Response of POST /apply-template."""

    prompt: str


class ModelStatus(BaseModel):
    """State of a model, as llama.cpp's server reports it."""

    value: Literal["unloaded", "loading", "loaded"]


class ModelCard(BaseModel):
    """A model or an adapter of one."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "ferrule"
    root: str
    parent: str | None = _extra()
    max_model_len: int | None
    """Maximum number of tokens; None for a model that was never loaded."""
    answer_defaults: dict[str, int | float] | None = _extra()
    """Sampling parameters that the chat page sends unless the user changes them; None for a model of embeddings,
    and for one that was never loaded."""
    status: ModelStatus


class ModelList(BaseModel):
    """Response of GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorDetail(BaseModel):
    """Message, type, field and code of an error."""

    message: str
    type: str
    param: str | None
    code: str | None
    n_prompt_tokens: int | None = _extra()
    """Number of tokens of a prompt that is too long, or as many as were counted."""
    n_ctx: int | None = _extra()
    """Maximum number of tokens of prompt and output together."""


class ErrorResponse(BaseModel):
    """Body of every error response."""

    error: ErrorDetail = Field(description="Message, type, field and code of the error.")
