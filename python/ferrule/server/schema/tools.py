"""Definitions of tools in OpenAI's form, which Ollama uses too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from ferrule.server.schema.base import RequestModel
from ferrule.server.schema.custom_tools import InputGrammar, custom_function, tool_kind


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


class TextFormat(RequestModel):
    """Format of an input that is any text."""

    type: Literal["text"]


class GrammarFormat(RequestModel):
    """Format of an input that matches a grammar."""

    type: Literal["grammar"]
    grammar: InputGrammar


class CustomDefinition(RequestModel):
    """Name, description and input format of a custom tool."""

    name: str = Field(min_length=1)
    description: str | None = None
    format: Annotated[TextFormat | GrammarFormat, Discriminator("type")] | None = None

    @property
    def grammar(self) -> InputGrammar | None:
        """Grammar of the input; None for any text."""
        return self.format.grammar if isinstance(self.format, GrammarFormat) else None


class CustomToolDefinition(RequestModel):
    """A tool whose input is text."""

    type: Literal["custom"]
    custom: CustomDefinition


Tool = Annotated[
    Annotated[ToolDefinition, Tag("<function>")] | Annotated[CustomToolDefinition, Tag("<custom>")],
    Discriminator(tool_kind),
]


def tool_dicts(tools: Sequence[ToolDefinition | CustomToolDefinition]) -> list[dict[str, Any]]:
    """Converts tools to the dictionaries that chat templates and grammars read."""
    return [_tool_dict(tool) for tool in tools]


def _tool_dict(tool: ToolDefinition | CustomToolDefinition) -> dict[str, Any]:
    if isinstance(tool, ToolDefinition):
        return tool.model_dump(by_alias=True, exclude_none=True, exclude={"function": {"strict"}})
    function = custom_function(tool.custom.name, tool.custom.description, tool.custom.grammar)
    return {"type": "function", "function": function}


def strict_names(tools: Sequence[ToolDefinition | CustomToolDefinition]) -> set[str]:
    """Returns the names of the tools whose calls are constrained wherever their format allows it."""
    functions = {tool.function.name for tool in tools if isinstance(tool, ToolDefinition) and tool.function.strict}
    custom = [tool.custom for tool in tools if isinstance(tool, CustomToolDefinition)]
    return functions | {tool.name for tool in custom if tool.grammar is not None and tool.grammar.enforced}
