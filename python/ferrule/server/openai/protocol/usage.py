"""Token counts in responses."""

from __future__ import annotations

from pydantic import BaseModel

from ferrule.server.schema.response_fields import omitted_if_none


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
    prompt_tokens_details: PromptTokensDetails | None = omitted_if_none()
    completion_tokens_details: CompletionTokensDetails | None = omitted_if_none()
