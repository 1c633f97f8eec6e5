"""Deltas of messages: what they add up to, and what is new since an earlier sum."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ferrule.parsers import MessageDelta, MessageFormat, ParsedMessage, ToolCallDelta

TEXT = 'Hm.<tool_call>{"name": "f", "arguments": {"a": 1}}{"name": "g", "arguments": {}}</tool_call> So.'


@given(first=st.integers(0, len(TEXT)), second=st.integers(0, len(TEXT)))
def test_a_sum_less_an_earlier_one_is_what_lies_between(first: int, second: int) -> None:
    first, second = sorted((first, second))
    parser, sums = MessageFormat("hermes").parser(seed=0), [MessageDelta()]
    for character in TEXT:
        sums.append(sums[-1] + parser.feed(character))
    sums.append(sums[-1] + parser.finish())
    assert sums[first] + sums[second].since(sums[first]) == sums[second]
    assert not sums[first].since(sums[first])
    assert sums[-1].message() == MessageFormat("hermes").parse(TEXT, seed=0)


def test_the_parts_of_a_sum() -> None:
    first = MessageDelta("a", None, [ToolCallDelta(0, "x", "f", "{")])
    second = MessageDelta(None, "b", [ToolCallDelta(0, None, None, "}"), ToolCallDelta(1, "y", "g", "{}")])
    whole = first + second
    assert whole == MessageDelta("a", "b", [ToolCallDelta(0, "x", "f", "{}"), ToolCallDelta(1, "y", "g", "{}")])
    assert whole.since(first) == second
    assert MessageDelta().message() == ParsedMessage(None, None, [])
