"""Parts of requests and responses that chat completions and completions share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Tag

from ferrule.server.openai.fields import (
    SERVICE_FIELDS,
    STREAM_FIELDS,
)
from ferrule.server.schema.base import RequestModel
from ferrule.server.schema.limits import BoundedList, TokenIds
from ferrule.server.schema.llama_cpp import LlamaCppFields
from ferrule.server.schema.unions import prompt_kind

Prompts = Annotated[
    Annotated[str, Tag("<str>")]
    | Annotated[BoundedList[str], Tag("<strs>")]
    | Annotated[TokenIds, Tag("<ids>")]
    | Annotated[BoundedList[TokenIds], Tag("<lists>")],
    Discriminator(prompt_kind),
]
"""One prompt or several, as text or token ids."""


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


PromptLogprobs = list[dict[int, dict[str, Any]] | None]
