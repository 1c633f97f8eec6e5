"""Custom tools, whose input is text: the model calls them as functions with one argument."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, cast

from ferrule.server.schema.base import RequestModel

INPUT = "input"
"""Argument with the input of a custom tool."""
Syntax = Literal["lark", "regex"]


class InputGrammar(RequestModel):
    """Grammar of the input of a custom tool.

    The model reads it in the tool's description. A regular expression also constrains the input wherever the parameters
    of a strict function would be enforced.
    """

    syntax: Syntax
    definition: str

    @property
    def enforced(self) -> bool:
        """Whether the input is constrained to the grammar, as far as calls are."""
        return self.syntax == "regex"


def custom_function(name: str, description: str | None, grammar: InputGrammar | None) -> dict[str, Any]:
    """Returns the function that the model calls for a custom tool."""
    text = {"type": "string", "description": "Input of the tool, as text."}
    if grammar is not None:
        said = f"The input must match this {grammar.syntax} grammar:\n{grammar.definition}"
        description = f"{description}\n\n{said}" if description else said
        if grammar.enforced:
            text["pattern"] = f"^(?:{grammar.definition})$"
    parameters = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    return {"name": name, "description": description or "", "parameters": parameters}


def custom_arguments(text: str) -> str:
    """Returns the arguments of a call whose input is a text."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def tool_kind(given: object) -> str:
    """Returns the tag of a tool, of a choice or of a call: `<custom>` or `<function>`."""
    kind = cast("Mapping[str, object]", given).get("type") if isinstance(given, Mapping) else None
    return "<custom>" if kind == "custom" else "<function>"
