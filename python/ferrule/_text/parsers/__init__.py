"""Parsers of what models write: reasoning and tool calls, told apart from the answer.

    parsed = MessageFormat("hermes", "qwen3").parse(text)
    parsed.reasoning, parsed.content, parsed.tool_calls[0].arguments

Each family of models has its form, in a file of its own, and a line in `families`. A form is read by one machine,
whether its text comes at once or one character after another (`MessageFormat.parser`), and whatever a model writes:

- No text is lost. What is not in the form is content, markers included; whitespace beside markers alone is dropped.
- A call stands from the moment that its function is known and its arguments begin, for they are given out as they
  arrive. If the output breaks off later, or is no valid JSON, the arguments are what the model wrote.
- The time that it takes is in proportion to the length of the text.
"""

from ferrule._text.parsers.families import (
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    reasoning_parser_for,
    tool_call_parser_for,
)
from ferrule._text.parsers.message import MessageDelta, ParsedMessage, ToolCall, ToolCallDelta
from ferrule._text.parsers.parser import MessageFormat, MessageParser
from ferrule._text.parsers.tools import ToolSchema

__all__ = [
    "REASONING_PARSERS",
    "TOOL_CALL_PARSERS",
    "MessageDelta",
    "MessageFormat",
    "MessageParser",
    "ParsedMessage",
    "ToolCall",
    "ToolCallDelta",
    "ToolSchema",
    "reasoning_parser_for",
    "tool_call_parser_for",
]
