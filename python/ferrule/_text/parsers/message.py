"""An assistant's message, in parts: OpenAI's shape, whole and as it grows."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ToolCall:
    """A function that the model wants called."""

    id: str
    """Unique within the message."""
    name: str
    arguments: str
    """A JSON object, as text. Where the model wrote no valid JSON, or was cut off, what it wrote."""


@dataclass(frozen=True)
class ParsedMessage:
    """A model's output, told apart."""

    content: str | None
    """What is neither of the others; None where there is nothing else."""
    reasoning: str | None
    """What the model thought before it answered; None where it did not, or no reasoning parser was chosen."""
    tool_calls: list[ToolCall]


@dataclass(frozen=True)
class ToolCallDelta:
    """What is new of a tool call."""

    index: int
    """Of the call in its message, from 0."""
    id: str | None
    """With the first delta of a call, then None."""
    name: str | None
    """With the first delta of a call, whole; then None."""
    arguments: str
    """What follows on the arguments so far."""


@dataclass(frozen=True)
class MessageDelta:
    """What is new of a message; added up, the deltas are the message."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] = field(default_factory=list[ToolCallDelta])
    """Ordered by index."""

    def __bool__(self) -> bool:
        """Whether there is anything new."""
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
        """What must be added to an earlier sum of the same deltas to get this one."""
        known = {call.index: len(call.arguments) for call in earlier.tool_calls}
        calls = [
            ToolCallDelta(call.index, None, None, call.arguments[known[call.index] :]) if call.index in known else call
            for call in self.tool_calls
            if call.index not in known or len(call.arguments) > known[call.index]
        ]
        return MessageDelta(_rest(self.content, earlier.content), _rest(self.reasoning, earlier.reasoning), calls)

    def message(self) -> ParsedMessage:
        """The message that a sum of deltas is."""
        calls = [ToolCall(call.id or "", call.name or "", call.arguments) for call in self.tool_calls]
        return ParsedMessage(self.content, self.reasoning, calls)


def _joined(before: ToolCallDelta, later: ToolCallDelta) -> ToolCallDelta:
    return ToolCallDelta(before.index, before.id, before.name, before.arguments + later.arguments)


def _sum(before: str | None, later: str | None) -> str | None:
    return later if before is None else before + (later or "")


def _rest(whole: str | None, known: str | None) -> str | None:
    return (whole or "")[len(known or "") :] or None
