"""Body of an error response."""

from __future__ import annotations

from pydantic import BaseModel, Field

from ferrule.server.schema.response_fields import omitted_if_none


class ErrorDetail(BaseModel):
    """Message, type, field and code of an error."""

    message: str
    type: str
    param: str | None
    code: str | None
    n_prompt_tokens: int | None = omitted_if_none()
    """Number of tokens of a prompt that is too long, or as many as were counted."""
    n_ctx: int | None = omitted_if_none()
    """Maximum number of tokens of prompt and output together."""


class ErrorResponse(BaseModel):
    """Body of every error response."""

    error: ErrorDetail = Field(description="Message, type, field and code of the error.")
