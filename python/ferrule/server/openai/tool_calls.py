"""Tool calls in answers of chat completions: of functions, and of custom tools, which have text as input."""

from __future__ import annotations

import json
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from ferrule._text.parsers import ToolCall as ParsedCall
from ferrule._text.parsers import ToolCallDelta as Call
from ferrule.server.openai.protocol.chat import (
    CustomCall,
    CustomToolCall,
    CustomToolCallDelta,
    FunctionCall,
    ToolCall,
    ToolCallDelta,
)
from ferrule.server.output_parts import custom_input

AnyCallDelta = ToolCallDelta | CustomToolCallDelta


@dataclass
class ToolCallWriter:
    """Writes tool calls.

    The input of a custom tool is an argument of the function that the model calls; a stream reports it once the
    arguments are complete.
    """

    custom: Set[str]
    """Names of custom tools."""
    _arguments: dict[tuple[int, int], str] = field(default_factory=dict[tuple[int, int], str])
    """Arguments of calls of custom tools in progress, by the index of the completion and of the call."""

    def whole(self, call: ParsedCall) -> ToolCall | CustomToolCall:
        """Returns a call of a finished completion."""
        if call.name in self.custom:
            custom = CustomCall(name=call.name, input=custom_input(call.arguments))
            return CustomToolCall(id=call.id, type="custom", custom=custom)
        return ToolCall(id=call.id, type="function", function=FunctionCall(name=call.name, arguments=call.arguments))

    def deltas(self, completion: int, calls: Sequence[Call], *, last: bool) -> list[AnyCallDelta]:
        """Returns the new parts of the calls of a completion; `last` ends calls that are not complete."""
        found = [each for call in calls if (each := self._delta((completion, call.index), call)) is not None]
        if last:
            rest = [place for place in self._arguments if place[0] == completion]
            found += [self._input(place) for place in rest]
        return found

    def _delta(self, place: tuple[int, int], call: Call) -> AnyCallDelta | None:
        if call.name in self.custom:
            self._arguments[place] = call.arguments
            custom = CustomCall(name=call.name, input="")
            begun = CustomToolCallDelta(index=call.index, id=call.id, type="custom", custom=custom)
            if _is_complete(call.arguments):
                begun.custom.input = self._input(place).custom.input
            return begun
        if place in self._arguments:
            self._arguments[place] += call.arguments
            return self._input(place) if _is_complete(self._arguments[place]) else None
        return ToolCallDelta(
            index=call.index,
            id=call.id,
            type=None if call.id is None else "function",
            function=FunctionCall(name=call.name, arguments=call.arguments),
        )

    def _input(self, place: tuple[int, int]) -> CustomToolCallDelta:
        text = custom_input(self._arguments.pop(place))
        return CustomToolCallDelta(index=place[1], custom=CustomCall(input=text))


def _is_complete(arguments: str) -> bool:
    """Whether arguments are a whole JSON object; parts that end elsewhere are not parsed."""
    if not arguments.rstrip().endswith("}"):
        return False
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
        return False
    return True
