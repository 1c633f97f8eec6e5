"""Parsers of model outputs, which separate reasoning and tool calls from the answer.

    parsed = MessageFormat("hermes", "qwen3").parse(text)
    parsed.reasoning, parsed.content, parsed.tool_calls[0].arguments

Each format is one file and one line in `families`, or a description that is derived from a chat template (`notation`).
The same state machine reads a format at once or streamed (`MessageFormat.parser`), with these guarantees:

- No text is lost. Text outside the format is content, markers included; only whitespace beside markers is dropped.
- A call is final as soon as its function is known and its arguments begin, since arguments are streamed. If the output
  ends early or is not valid JSON, the arguments are the model's unchanged text.
- Time is proportional to the length of the text.
"""

from ferrule._text.parsers.families import (
    DERIVED,
    DESCRIBED_TOOLS_PARSER,
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    reasoning_parser_for,
    tool_call_parser_for,
)
from ferrule._text.parsers.message import MessageDelta, ParsedMessage, ToolCall, ToolCallDelta
from ferrule._text.parsers.parser import MessageFormat, MessageParser
from ferrule._text.parsers.tools import ToolSchema

__all__ = [
    "DERIVED",
    "DESCRIBED_TOOLS_PARSER",
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
