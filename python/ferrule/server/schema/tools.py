"""Definitions of tools in OpenAI's form, which Ollama uses too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from ferrule.server.schema.base import RequestModel


class FunctionDefinition(RequestModel):
    """Name, description and parameters of a function."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    returned: dict[str, Any] | None = Field(None, alias="return")
    """Schema of the returned value (transformers' field)."""
    strict: bool | None = None
    """Whether arguments match the schema and have every property and no other. Arguments always match where
    `tool_choice` is `required` or names the function; elsewhere where one tool is strict and calls are JSON in tags."""


class ToolDefinition(RequestModel):
    """A function that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


def tool_dicts(tools: Sequence[ToolDefinition]) -> list[dict[str, Any]]:
    """Converts tools to the dictionaries that chat templates and grammars read."""
    return [tool.model_dump(by_alias=True, exclude_none=True, exclude={"function": {"strict"}}) for tool in tools]
