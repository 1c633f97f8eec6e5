"""Answers as sequences of parts: events that open, extend and close a part."""

from __future__ import annotations

import pytest

from ferrule._text.parsers import MessageDelta, ParsedMessage, ToolCall, ToolCallDelta
from ferrule.outputs import Logprob, StreamDelta
from ferrule.server.output_parts import INVALID_JSON, OutputPart, OutputParts, call_input


def delta(
    message: MessageDelta | None, text: str = "", logprobs: list[dict[int, Logprob]] | None = None
) -> StreamDelta:
    return StreamDelta(text, [], logprobs, message=message)


def call(index: int, arguments: str, name: str | None = None) -> MessageDelta:
    begun = ToolCallDelta(index, f"call{index}" if name else None, name, arguments)
    return MessageDelta(tool_calls=[begun])


def changes(parts: OutputParts, *deltas: StreamDelta) -> list[tuple[str, int, str]]:
    events = [event for each in deltas for event in parts.add(each)]
    events += parts.end()
    return [(event.kind, event.part.index, event.text) for event in events]


def shown(parts: list[OutputPart]) -> list[tuple[str, str, str, str]]:
    return [(part.kind, part.text, part.call_id, part.name) for part in parts]


def test_parts_are_sequential() -> None:
    parts = OutputParts()
    assert changes(
        parts,
        delta(MessageDelta(reasoning="Hm")),
        delta(MessageDelta()),
        delta(MessageDelta(reasoning=".", content="I ")),
        delta(MessageDelta(content="ask.")),
        delta(call(0, "", "f")),
        delta(call(0, "{}")),
        delta(MessageDelta(tool_calls=[*call(1, "[", "g").tool_calls])),
        delta(MessageDelta(content=" Now.")),
    ) == [
        ("start", 0, ""),
        ("delta", 0, "Hm"),
        ("delta", 0, "."),
        ("stop", 0, ""),
        ("start", 1, ""),
        ("delta", 1, "I "),
        ("delta", 1, "ask."),
        ("stop", 1, ""),
        ("start", 2, ""),
        ("delta", 2, "{}"),
        ("stop", 2, ""),
        ("start", 3, ""),
        ("delta", 3, "["),
        ("stop", 3, ""),
        ("start", 4, ""),
        ("delta", 4, " Now."),
        ("stop", 4, ""),
    ]
    assert shown(parts.all) == [
        ("reasoning", "Hm.", "", ""),
        ("text", "I ask.", "", ""),
        ("call", "{}", "call0", "f"),
        ("call", "[", "call1", "g"),
        ("text", " Now.", "", ""),
    ]
    assert not list(parts.end()), "it has ended"


def test_several_calls_in_one_delta() -> None:
    parts = OutputParts()
    both = MessageDelta(tool_calls=[*call(0, "1", "f").tool_calls, *call(1, "2", "g").tool_calls])
    changes(parts, delta(both))
    assert shown(parts.all) == [("call", "1", "call0", "f"), ("call", "2", "call1", "g")]


def test_call_is_closed_before_other_parts_of_its_last_delta() -> None:
    parts = OutputParts()
    end = MessageDelta(
        content=" So.",
        tool_calls=[*call(0, "}").tool_calls, *call(1, "[", "g").tool_calls, *call(2, "2", "h").tool_calls],
    )
    changes(parts, delta(call(0, "{", "f")), delta(end), delta(call(2, "3")))
    assert shown(parts.all) == [
        ("call", "{}", "call0", "f"),
        ("text", " So.", "", ""),
        ("call", "[", "call1", "g"),
        ("call", "23", "call2", "h"),
    ]


def test_whole_message_has_text_before_calls() -> None:
    parts = OutputParts.of(ParsedMessage("said", "thought", [ToolCall("call0", "f", "{}")]), None).all
    assert shown(parts) == [
        ("reasoning", "thought", "", ""),
        ("text", "said", "", ""),
        ("call", "{}", "call0", "f"),
    ]
    assert not OutputParts.of(ParsedMessage(None, None, []), None).all


def test_logprobs_of_tokens_without_text_belong_to_text_part() -> None:
    parts = OutputParts()
    first, second = ({1: Logprob(-1.0, 1, "\N{REPLACEMENT CHARACTER}")}, {2: Logprob(-2.0, 1, "é")})
    assert changes(parts, delta(None, "", [first]), delta(None, "é", [second]), delta(None)) == [
        ("start", 0, ""),
        ("delta", 0, ""),
        ("delta", 0, "é"),
        ("stop", 0, ""),
    ]
    assert parts.all[0].logprobs == [first, second]


@pytest.mark.parametrize("arguments", ["[1]", "{", '{"a": NaN}', '{"a": "\\ud800"}', "[" * 100_000])
def test_arguments_that_are_not_an_object_are_marked_invalid(arguments: str) -> None:
    assert call_input(arguments) == {INVALID_JSON: arguments}


def test_valid_arguments_are_parsed() -> None:
    assert call_input('{"a": ["é"]}') == {"a": ["é"]}
    assert call_input("") == {}
