"""Fields of response models."""

from __future__ import annotations

from typing import Any

from pydantic import Field


def omitted_if_none(name: str | None = None) -> Any:
    """Returns a field that the JSON leaves out where it is None; `name` is its name in JSON, if that differs."""
    return Field(default=None, serialization_alias=name, exclude_if=lambda value: value is None)
