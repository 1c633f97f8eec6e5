"""Base class of request models."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, model_validator

from ferrule.server.schema.limits import check_fields


class RequestModel(BaseModel):
    """A part of a request: strict types, and no fields beside the declared ones."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=False)

    _bounded = model_validator(mode="before")(check_fields)
