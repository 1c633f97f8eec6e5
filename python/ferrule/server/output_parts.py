"""An answer as a row of parts: what was thought, what was said, and calls of tools.

APIs whose answers are lists of typed parts are written from it, whole answers and streams alike. A stream has parts in
the order in which the model wrote them; a whole answer has its reasoning first, then its text, then its calls, which is
the order in which models write.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from ferrule._text.parsers import MessageDelta, ParsedMessage, ToolCallDelta
from ferrule.outputs import StreamDelta, TokenLogprobs

Kind = Literal["reasoning", "text", "call"]
INVALID_JSON = "INVALID_JSON"
"""The key under which Anthropic advises to hand on what a model wrote in place of a JSON object."""


@dataclass
class OutputPart:
    """One of them, as far as it has come."""

    kind: Kind
    index: int
    """Among the answer's parts."""
    pieces: list[str] = field(default_factory=list[str])
    """Its text, as it came."""
    call_id: str = ""
    name: str = ""
    """Of the tool that is called."""
    number: int = 0
    """Of a call, among the calls."""
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    """Of a text's tokens, where they were asked for."""

    @property
    def text(self) -> str:
        """All of it; of a call, its arguments."""
        return "".join(self.pieces)


@dataclass(frozen=True)
class PartEvent:
    """What happens to a part: it is opened, it grows, and it is closed before the next one is opened."""

    what: Literal["opened", "grown", "closed"]
    part: OutputPart
    text: str = ""
    """What is new, where it has grown."""
    logprobs: Sequence[TokenLogprobs] = ()


class OutputParts:
    """An answer's parts, as they come."""

    def __init__(self) -> None:
        self.all: list[OutputPart] = []
        self._open: OutputPart | None = None

    @classmethod
    def of(cls, message: ParsedMessage, logprobs: Sequence[TokenLogprobs] | None) -> OutputParts:
        """Those of a whole answer."""
        calls = [ToolCallDelta(i, call.id, call.name, call.arguments) for i, call in enumerate(message.tool_calls)]
        parts = cls()
        for _ in parts._add(MessageDelta(message.content, message.reasoning, calls), logprobs or ()):
            pass
        return parts

    def add(self, new: StreamDelta) -> Iterator[PartEvent]:
        """What happens with a delta."""
        message = MessageDelta(new.text) if new.message is None else new.message
        return self._add(message, new.logprobs or ())

    def end(self) -> Iterator[PartEvent]:
        """What happens when nothing more comes."""
        if self._open is not None:
            yield PartEvent("closed", self._open)
            self._open = None

    def _add(self, message: MessageDelta, logprobs: Sequence[TokenLogprobs]) -> Iterator[PartEvent]:
        calls = message.tool_calls
        if calls and self._open is not None and self._open.kind == "call" and self._open.number == calls[0].index:
            # A delta does not say in what order it came: only once a call is whole can there be something else.
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
        part.pieces.append(text)
        part.logprobs += logprobs
        yield PartEvent("grown", part, text, logprobs)

    def _begin(self, part: OutputPart) -> Iterator[PartEvent]:
        yield from self.end()
        self._open = part
        self.all.append(part)
        yield PartEvent("opened", part)


def call_input(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object; what is none, such as a call that was cut off, whole under INVALID_JSON."""
    try:
        parsed: object = json.loads(arguments or "{}", parse_constant=_refuse)
        # Half of a surrogate pair can be written in JSON, and not be sent.
        json.dumps(parsed, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        parsed = None
    return cast("dict[str, Any]", parsed) if isinstance(parsed, dict) else {INVALID_JSON: arguments}


def _refuse(constant: str) -> None:
    """NaN and the infinities, which Python reads and JSON has not."""
    raise ValueError(constant)
