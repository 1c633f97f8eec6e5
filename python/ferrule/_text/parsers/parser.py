"""Parses model outputs into reasoning, answer and tool calls, streamed or at once."""

from __future__ import annotations

from collections.abc import Sequence

from ferrule._text.parsers.draft import Draft, call_ids
from ferrule._text.parsers.families import (
    HARMONY,
    HARMONY_REASONING,
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    ReasoningFamily,
    ToolCallFamily,
    find,
)
from ferrule._text.parsers.message import MessageDelta, ParsedMessage
from ferrule._text.parsers.reader import Read, Reader
from ferrule._text.parsers.state import State
from ferrule._text.parsers.tools import Tools, ToolSchema
from ferrule.errors import InvalidParameterError


class MessageFormat:
    """Format of a model's messages: a tool call parser, a reasoning parser, or both, by name or as a family.

    `tools` are the request's tools in OpenAI's form. They are used to recognize calls without markers and to determine
    the types of untyped values.

    Raises InvalidParameterError.
    """

    def __init__(
        self,
        tool_call_parser: str | ToolCallFamily | None = None,
        reasoning_parser: str | ReasoningFamily | None = None,
        *,
        tools: Sequence[ToolSchema] | None = None,
    ) -> None:
        calls, thinks = tool_call_parser, reasoning_parser
        if calls is not None and not isinstance(calls, ToolCallFamily):
            calls = find("tool_call_parser", TOOL_CALL_PARSERS, calls)
        if thinks is not None and not isinstance(thinks, ReasoningFamily):
            thinks = find("reasoning_parser", REASONING_PARSERS, thinks)
        if calls is HARMONY and thinks not in (None, HARMONY_REASONING):
            requirement = "openai_gptoss or None with tool_call_parser openai"
            raise InvalidParameterError("reasoning_parser", reasoning_parser, requirement)
        if thinks is HARMONY_REASONING and calls not in (None, HARMONY):
            requirement = "openai or None with reasoning_parser openai_gptoss"
            raise InvalidParameterError("tool_call_parser", tool_call_parser, requirement)
        if calls is HARMONY or thinks is HARMONY_REASONING:
            calls, thinks = HARMONY, HARMONY_REASONING
        self.tool_call_parser = None if calls is None else calls.names[0]
        self.reasoning_parser = None if thinks is None else thinks.names[0]
        self.keep = frozenset[str]().union(*(family.keep for family in (calls, thinks) if family is not None))
        """Special tokens that must stay in the text."""
        self.call_begin = "" if calls is None else calls.begin
        """Marker with which tool calls begin; empty if there is none."""
        self.json_call_end = "" if calls is None else calls.json_end
        """Marker at the end of a call, if calls are JSON objects with `name` and `arguments`; empty for other
        formats."""
        self._calls = calls
        self._thought = None if thinks is None else thinks.thought
        self._tools = Tools(tools)

    def reasoning_open(self, prompt: str) -> bool:
        """Whether a prompt with special tokens ends within reasoning, so that the output begins with reasoning.

        The last characters of the prompt suffice. The templates of DeepSeek's and Qwen's reasoning models end this way.
        """
        return self._thought is not None and prompt.rstrip().endswith(self._thought.begin.rstrip())

    def parser(self, *, reasoning_open: bool = False, seed: int | str | None = None) -> MessageParser:
        """Returns a parser for one message.

        A seed makes the ids of calls reproducible. Use a different seed for each message of a conversation, so that
        calls of different messages have different ids.
        """
        calls = self._calls
        prefix, length = ToolCallFamily.call_id if calls is None else calls.call_id
        thought = None if calls is HARMONY else self._thought
        dropped = (() if thought is None else thought.dropped) + (() if calls is None else calls.dropped)
        draft = Draft(call_ids(prefix, length, seed))
        state = State(Reader(), draft, self._tools, thought, tuple(dict.fromkeys(dropped)), reasoning_open)
        return MessageParser(state, calls)

    def parse(self, text: str, *, reasoning_open: bool = False, seed: int | str | None = None) -> ParsedMessage:
        """Parses a complete output. It never raises an error, since text outside of the format is content."""
        parser = self.parser(reasoning_open=reasoning_open, seed=seed)
        return (parser.feed(text) + parser.finish()).message()


class MessageParser:
    """Streaming parser of one message; text is emitted as soon as its part is known.

    The sum of the deltas does not depend on how the text is split.
    """

    def __init__(self, state: State, calls: ToolCallFamily | None) -> None:
        self._state = state
        self._machine = _machine(state, calls)
        self._finished = False

    def feed(self, text: str) -> MessageDelta:
        """Parses more output and returns the new parts of the message.

        If an exception such as KeyboardInterrupt interrupts it, the unread text becomes content.

        Raises InvalidParameterError after `finish` was called.
        """
        if self._finished:
            raise InvalidParameterError("text", text, "left out after finish(); create a new parser for each message")
        if not text:
            return MessageDelta()
        self._state.text.feed(text)
        try:
            next(self._machine)
        except BaseException:  # an exception ends a generator
            self._state.as_content()
            self._machine = self._state.content()
            raise
        return self._state.draft.take()

    def finish(self) -> MessageDelta:
        """Ends the output and returns the remaining parts of the message."""
        if self._finished:
            return MessageDelta()
        self._finished = True
        self._state.text.end()
        for _ in self._machine:
            pass
        self._state.draft.end()
        return self._state.draft.take()


def _machine(state: State, calls: ToolCallFamily | None) -> Read[object]:
    """Reads a message until the end of the text."""
    if calls is not HARMONY:  # its parser reads reasoning itself
        yield from state.begin()
    if calls is not None:
        yield from calls.read(state)
    else:
        yield from state.content()
