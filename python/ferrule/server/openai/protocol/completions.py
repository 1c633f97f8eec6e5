"""Request and responses of POST /v1/completions."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from ferrule.server.openai.protocol.generation import GenerationFields, PromptLogprobs, Prompts
from ferrule.server.openai.protocol.usage import Usage
from ferrule.server.schema.response_fields import omitted_if_none
from ferrule.server.schema.sampling import sampling_field
from ferrule.server.schema.timings import PromptProgress, Timings


class CompletionRequest(GenerationFields):
    """Request of POST /v1/completions."""

    prompt: Prompts
    suffix: str | None = None
    max_tokens: int | None = 16
    echo: bool | None = None
    logprobs: int | None = sampling_field("logprobs")
    add_special_tokens: Literal[True] = True


class CompletionLogprobs(BaseModel):
    """Log-probabilities of the tokens of a text, in the form of the completions API."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One of the completions of a text, or its new part in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = omitted_if_none()
    prompt_logprobs: PromptLogprobs | None = omitted_if_none()
    prompt_token_ids: list[int] | None = omitted_if_none()


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
    prompt_progress: PromptProgress | None = omitted_if_none()
    """Progress of a prompt; only events of a stream have it."""
    timings: Timings | None = omitted_if_none()
