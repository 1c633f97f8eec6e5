"""Assistant messages in OpenAI's form, complete and as deltas."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ToolCall:
    """A tool call of the model."""

    id: str
    """Id of the call, unique within the message."""
    name: str
    arguments: str
    """Arguments as the text of a JSON object; the model's unchanged text if it is invalid or incomplete JSON."""


@dataclass(frozen=True)
class ParsedMessage:
    """A parsed model output."""

    content: str | None
    """Text that is neither reasoning nor calls; None if there is none."""
    reasoning: str | None
    """Reasoning before the answer; None without reasoning or without a reasoning parser."""
    tool_calls: list[ToolCall]


@dataclass(frozen=True)
class ToolCallDelta:
    """New parts of a tool call."""

    index: int
    """Index of the call in its message, from 0."""
    id: str | None
    """Id of the call in its first delta, then None."""
    name: str | None
    """Function name in the first delta of a call, then None."""
    arguments: str
    """Text to append to the arguments so far."""


@dataclass(frozen=True)
class MessageDelta:
    """New parts of a message; the sum of all deltas is the message."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] = field(default_factory=list[ToolCallDelta])
    """Deltas of calls, ordered by index."""

    def __bool__(self) -> bool:
        """Whether the delta has any parts."""
        return bool(self.content or self.reasoning or self.tool_calls)

    def __add__(self, later: MessageDelta) -> MessageDelta:
        calls = {call.index: call for call in self.tool_calls}
        for call in later.tool_calls:
            before = calls.get(call.index)
            calls[call.index] = call if before is None else _joined(before, call)
        return MessageDelta(
            _sum(self.content, later.content), _sum(self.reasoning, later.reasoning), [calls[i] for i in sorted(calls)]
        )

    def since(self, earlier: MessageDelta) -> MessageDelta:
        """Returns the delta from an earlier sum of the same deltas to this one."""
        known = {call.index: len(call.arguments) for call in earlier.tool_calls}
        calls = [
            ToolCallDelta(call.index, None, None, call.arguments[known[call.index] :]) if call.index in known else call
            for call in self.tool_calls
            if call.index not in known or len(call.arguments) > known[call.index]
        ]
        return MessageDelta(_rest(self.content, earlier.content), _rest(self.reasoning, earlier.reasoning), calls)

    def message(self) -> ParsedMessage:
        """Returns the message of a sum of deltas."""
        calls = [ToolCall(call.id or "", call.name or "", call.arguments) for call in self.tool_calls]
        return ParsedMessage(self.content, self.reasoning, calls)


def _joined(before: ToolCallDelta, later: ToolCallDelta) -> ToolCallDelta:
    return ToolCallDelta(before.index, before.id, before.name, before.arguments + later.arguments)


def _sum(before: str | None, later: str | None) -> str | None:
    return later if before is None else before + (later or "")


def _rest(whole: str | None, known: str | None) -> str | None:
    return (whole or "")[len(known or "") :] or None
