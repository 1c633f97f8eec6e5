"""Output as a list of parts: reasoning, text and tool calls.

APIs whose answers are lists of typed parts are written from it, whole answers and streams. A stream has parts in the
order of generation; a whole answer has reasoning, then text, then calls, which is the order in which models generate.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from ferrule._text.parsers import MessageDelta, ParsedMessage, ToolCallDelta
from ferrule.outputs import StreamDelta, TokenLogprobs
from ferrule.server.schema.custom_tools import INPUT

Kind = Literal["reasoning", "text", "call"]
INVALID_JSON = "INVALID_JSON"
"""Key under which Anthropic recommends to pass on arguments that are not a JSON object."""


@dataclass
class OutputPart:
    """A part of the output, as far as it is generated."""

    kind: Kind
    index: int
    """Index among the parts of the output."""
    deltas: list[str] = field(default_factory=list[str])
    """Text in the order of arrival."""
    call_id: str = ""
    name: str = ""
    """Name of the called tool."""
    number: int = 0
    """Index of a call among the calls."""
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    """Log-probabilities of the tokens of a text, where the request asks for them."""

    @property
    def text(self) -> str:
        """The whole text; the arguments of a call."""
        return "".join(self.deltas)


@dataclass(frozen=True)
class PartEvent:
    """Start, delta or stop of a part; a part stops before the next one starts."""

    kind: Literal["start", "delta", "stop"]
    part: OutputPart
    text: str = ""
    """New text of a delta."""
    logprobs: Sequence[TokenLogprobs] = ()


class OutputParts:
    """Parts of the output of a completion."""

    def __init__(self) -> None:
        self.all: list[OutputPart] = []
        self._open: OutputPart | None = None

    @classmethod
    def of(cls, message: ParsedMessage, logprobs: Sequence[TokenLogprobs] | None) -> OutputParts:
        """Returns the parts of a finished completion."""
        calls = [ToolCallDelta(i, call.id, call.name, call.arguments) for i, call in enumerate(message.tool_calls)]
        parts = cls()
        for _ in parts._add(MessageDelta(message.content, message.reasoning, calls), logprobs or ()):
            pass
        return parts

    def add(self, new: StreamDelta) -> Iterator[PartEvent]:
        """Adds a delta and yields the events that follow from it."""
        message = MessageDelta(new.text) if new.message is None else new.message
        return self._add(message, new.logprobs or ())

    def end(self) -> Iterator[PartEvent]:
        """Yields the events at the end of the output."""
        if self._open is not None:
            yield PartEvent("stop", self._open)
            self._open = None

    def _add(self, message: MessageDelta, logprobs: Sequence[TokenLogprobs]) -> Iterator[PartEvent]:
        calls = message.tool_calls
        if calls and self._open is not None and self._open.kind == "call" and self._open.number == calls[0].index:
            # A delta does not say in which order its fields came; other parts can only follow a complete call.
            if calls[0].arguments:
                yield from self._grow("call", calls[0].arguments)
            calls = calls[1:]
        if message.reasoning:
            yield from self._grow("reasoning", message.reasoning)
        if message.content or logprobs:
            yield from self._grow("text", message.content or "", logprobs)
        for call in calls:
            part = OutputPart("call", len(self.all), call_id=call.id or "", name=call.name or "", number=call.index)
            yield from self._begin(part)
            if call.arguments:
                yield from self._grow("call", call.arguments)

    def _grow(self, kind: Kind, text: str, logprobs: Sequence[TokenLogprobs] = ()) -> Iterator[PartEvent]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(OutputPart(kind, len(self.all)))
        part = self.all[-1]
        part.deltas.append(text)
        part.logprobs += logprobs
        yield PartEvent("delta", part, text, logprobs)

    def _begin(self, part: OutputPart) -> Iterator[PartEvent]:
        yield from self.end()
        self._open = part
        self.all.append(part)
        yield PartEvent("start", part)


def call_input(arguments: str) -> dict[str, Any]:
    """Parses the arguments of a call; text that is not a JSON object is returned under the key INVALID_JSON."""
    try:
        parsed: object = json.loads(arguments or "{}", parse_constant=_refuse)
        # JSON can escape a lone surrogate, which UTF-8 cannot encode.
        json.dumps(parsed, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        parsed = None
    return cast("dict[str, Any]", parsed) if isinstance(parsed, dict) else {INVALID_JSON: arguments}


def custom_input(arguments: str) -> str:
    """Returns the input of a custom tool; arguments in another form are the input itself."""
    found = call_input(arguments).get(INPUT)
    return found if isinstance(found, str) else arguments


def _refuse(constant: str) -> None:
    """Rejects NaN and infinities, which Python's parser accepts and JSON does not have."""
    raise ValueError(constant)
