"""Deltas of messages: their sum, and the difference to an earlier sum."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrule._text.parsers import MessageDelta, MessageFormat, ParsedMessage, ToolCallDelta, python_calls

TEXT = 'Hm.<tool_call>{"name": "f", "arguments": {"a": 1}}{"name": "g", "arguments": {}}</tool_call> So.'


@given(first=st.integers(0, len(TEXT)), second=st.integers(0, len(TEXT)))
def test_since_returns_the_later_deltas(first: int, second: int) -> None:
    first, second = sorted((first, second))
    parser, sums = MessageFormat("hermes").parser(seed=0), [MessageDelta()]
    for character in TEXT:
        sums.append(sums[-1] + parser.feed(character))
    sums.append(sums[-1] + parser.finish())
    assert sums[first] + sums[second].since(sums[first]) == sums[second]
    assert not sums[first].since(sums[first])
    assert sums[-1].message() == MessageFormat("hermes").parse(TEXT, seed=0)


def test_sum_of_deltas() -> None:
    first = MessageDelta("a", None, [ToolCallDelta(0, "x", "f", "{")])
    second = MessageDelta(None, "b", [ToolCallDelta(0, None, None, "}"), ToolCallDelta(1, "y", "g", "{}")])
    whole = first + second
    assert whole == MessageDelta("a", "b", [ToolCallDelta(0, "x", "f", "{}"), ToolCallDelta(1, "y", "g", "{}")])
    assert whole.since(first) == second
    assert MessageDelta().message() == ParsedMessage(None, None, [])


def test_text_after_an_interruption_is_content(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(text: str, types: frozenset[str]) -> str:
        raise KeyboardInterrupt

    parser = MessageFormat("pythonic").parser(seed=0)
    first = parser.feed("[f(a=")
    with monkeypatch.context() as patched:
        patched.setattr(python_calls, "json_of_literal", interrupt)
        with pytest.raises(KeyboardInterrupt):
            parser.feed("1), g(")
    message = (first + parser.feed("b=2)] So.") + parser.finish()).message()
    assert [(call.name, call.arguments) for call in message.tool_calls] == [("f", "")]
    assert message.content == "), g(b=2)] So."
