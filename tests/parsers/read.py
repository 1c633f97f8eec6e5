"""Functions that parse a text and return its parts as tuples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ferrule._text.parsers import MessageDelta, MessageFormat, ParsedMessage, ToolSchema

Calls = list[tuple[str, str]]

WEATHER: list[ToolSchema] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "metric": {"type": "boolean"},
                    "spots": {"type": "array"},
                    "where": {"type": "object"},
                    "most": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                },
            },
        },
    },
    {"name": "get_time"},
]


def in_pieces(form: MessageFormat, pieces: Iterable[str], **options: Any) -> ParsedMessage:
    """Parses a streamed text."""
    parser, message = form.parser(seed=0, **options), MessageDelta()
    for piece in pieces:
        message += parser.feed(piece)
    return (message + parser.finish()).message()


def read(form: MessageFormat, text: str, **options: Any) -> tuple[str | None, str | None, Calls]:
    """Returns content, reasoning and calls of a text, after checking that streaming gives the same message."""
    message = form.parse(text, seed=0, **options)
    assert in_pieces(form, text, **options) == message
    ids = [call.id for call in message.tool_calls]
    assert len(set(ids)) == len(ids)
    return message.content, message.reasoning, [(call.name, call.arguments) for call in message.tool_calls]


def emitted(form: MessageFormat, text: str, **options: Any) -> tuple[str | None, str | None, Calls]:
    """Returns the deltas of an unfinished text."""
    parser, message = form.parser(**options), MessageDelta()
    for piece in text:
        message += parser.feed(piece)
    return message.content, message.reasoning, [(call.name or "", call.arguments) for call in message.tool_calls]
