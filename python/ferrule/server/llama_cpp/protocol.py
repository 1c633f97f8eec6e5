"""Request and response models of llama.cpp's own routes."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, Discriminator, Field, Tag

from ferrule.server.schema.base import FieldRules, RequestModel, Unsupported
from ferrule.server.schema.limits import BoundedDict, BoundedList, TokenIds
from ferrule.server.schema.llama_cpp import OTHER_FIELDS, LlamaCppFields
from ferrule.server.schema.logprobs import TopLogprob
from ferrule.server.schema.response_fields import omitted_if_none
from ferrule.server.schema.sampling import sampling_field
from ferrule.server.schema.timings import PromptProgress, Timings

INFILL_FIELDS: FieldRules = {
    **OTHER_FIELDS,
    "input_extra": Unsupported("put the text into input_prefix", neutral=([],)),
}
PROMPT_FIELDS: FieldRules = {"multimodal_data": Unsupported("the server reads text only", neutral=([],))}
EMBEDDING_FIELDS: FieldRules = {"encoding_format": Unsupported("use /v1/embeddings", neutral=("float",))}


def _prompt_kind(value: object) -> str:
    match value:
        case str():
            return "<str>"
        case list():
            items = cast("list[object]", value)
            return "<ids>" if all(type(item) is int for item in items) else "<parts>"
        case _:
            return "<object>"


def _part_kind(value: object) -> str:
    return "<id>" if isinstance(value, int) else _prompt_kind(value)


class PromptObject(RequestModel):
    """Prompt as an object."""

    other_fields = PROMPT_FIELDS

    prompt_string: str


_Text = Annotated[str, Tag("<str>")]
_Ids = Annotated[TokenIds, Tag("<ids>")]
_Object = Annotated[PromptObject, Tag("<object>")]
_Id = Annotated[int, Tag("<id>")]
_Pair = Annotated[list[int | str | float | Literal[False]], Field(min_length=2, max_length=2)]
_Mixed = Annotated[
    BoundedList[Annotated[_Text | _Id, Discriminator(_part_kind)]],
    Tag("<parts>"),
]
Part = Annotated[_Text | _Id | _Ids | _Object | _Mixed, Discriminator(_part_kind)]
NativePrompt = Annotated[
    _Text | _Ids | _Object | Annotated[BoundedList[Part], Tag("<parts>")], Discriminator(_prompt_kind)
]
"""A text, token ids, both in one list, or a list of prompts."""
Bias = Annotated[
    Annotated[
        BoundedList[_Pair],
        Tag("<pairs>"),
    ]
    | Annotated[BoundedDict[float | Literal[False]], Tag("<object>")],
    Discriminator(lambda value: "<pairs>" if isinstance(value, list) else "<object>"),
]
"""Numbers to add to the logits of token ids, or of the tokens of texts; false forbids them."""


class NativeFields(LlamaCppFields):
    """Fields that requests for text share."""

    other_fields = OTHER_FIELDS

    model: str | None = None
    stream: bool = False
    max_tokens: int | None = sampling_field("max_tokens")
    logit_bias: Bias | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    return_tokens: bool = False
    """Whether a whole answer has the token ids of the output; events of a stream always have theirs."""
    response_fields: BoundedList[str] | None = None
    """Fields of a whole answer to return, such as `timings/predicted_n`; default: all."""
    post_sampling_probs: bool = False
    """Whether `n_probs` asks for probabilities after all samplers, of the tokens that remain."""
    n_indent: int = 0
    """Minimum indentation of lines after the first one, in spaces and tabs: a line with less ends the output."""
    t_max_predict_ms: int = -1
    """Milliseconds after the first token from which on the end of a line ends the output; below 1 there is no limit."""


class NativeCompletionRequest(NativeFields):
    """Request of POST /completion."""

    prompt: NativePrompt


class InfillRequest(NativeFields):
    """Request of POST /infill."""

    other_fields = INFILL_FIELDS

    input_prefix: str
    input_suffix: str
    prompt: str = ""
    """Beginning of the text between prefix and suffix, which the completion continues."""


class NativeEmbeddingRequest(RequestModel):
    """Request of POST /embedding."""

    other_fields = EMBEDDING_FIELDS

    content: NativePrompt
    embd_normalize: int = 2
    """Norm of the vectors: 2 (Euclidean) or -1 (not normalized)."""
    model: str | None = None


class NativeLogprob(TopLogprob):
    """A token with its log-probability."""

    id: int


class NativeTokenLogprob(NativeLogprob):
    """A generated token with its log-probability and the most likely alternatives."""

    top_logprobs: list[NativeLogprob]


class NativeProb(BaseModel):
    """A token with its probability after all samplers."""

    id: int
    token: str
    bytes: list[int]
    prob: float


class NativeTokenProb(NativeProb):
    """A generated token with its probability after all samplers, and the most likely tokens that remained."""

    top_probs: list[NativeProb]


class CompletionPart(BaseModel):
    """Event of a stream of POST /completion."""

    index: int
    content: str
    tokens: list[int]
    stop: bool = False
    id_slot: int = -1
    """Always -1: sequences have no fixed slots."""
    tokens_predicted: int
    tokens_evaluated: int
    completion_probabilities: list[NativeTokenLogprob] | list[NativeTokenProb] | None = omitted_if_none()
    prompt_progress: PromptProgress | None = omitted_if_none()
    """Progress of the prompt; only events of a stream have it."""
    timings: Timings | None = omitted_if_none()


class CompletionResult(CompletionPart):
    """Response of POST /completion, and the last event of its stream."""

    stop: bool = True
    model: str
    generation_settings: dict[str, Any]
    """Parameters of the request under llama.cpp's names."""
    prompt: str
    """Prompt with special tokens."""
    has_new_line: bool
    truncated: bool
    """Whether the end of the context ended the answer; prompts are never truncated."""
    stop_type: Literal["eos", "limit", "word", "none"]
    stopping_word: str
    tokens_cached: int


class NativeEmbedding(BaseModel):
    """Embedding of a text; `embedding` is a list of one vector."""

    index: int
    embedding: list[list[float]]


class Slot(BaseModel):
    """A sequence that the engine can run, free or in use."""

    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool


class DefaultSettings(BaseModel):
    """Parameters that requests have by default."""

    n_ctx: int
    params: dict[str, Any]


class Props(BaseModel):
    """Response of GET /props; for a model that is not loaded, without the fields that its files determine."""

    default_generation_settings: DefaultSettings | None = omitted_if_none()
    total_slots: int | None = omitted_if_none()
    """Maximum number of sequences that run at once."""
    model_alias: str
    model_path: str
    chat_template: str | None = omitted_if_none()
    bos_token: str | None = omitted_if_none()
    eos_token: str | None = omitted_if_none()
    modalities: dict[str, bool]
    build_info: str
    is_sleeping: bool
    """Whether the model is not loaded; a request for text or embeddings loads it."""
