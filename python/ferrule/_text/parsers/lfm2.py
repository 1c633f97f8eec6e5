"""LFM2 and LFM2.5 (Liquid AI): a list of Python calls between special tokens.

    <|tool_call_start|>[get_weather(city="Paris"), get_time()]<|tool_call_end|>

Source: the chat template of LiquidAI/LFM2.5-8B-A1B and "Tool use" in its model card, by which a system prompt may ask
for a list of JSON objects instead. Other text between the tokens is content, tokens included.
"""

from __future__ import annotations

from ferrule._text.parsers import json_calls, python_calls
from ferrule._text.parsers.reader import Read
from ferrule._text.parsers.state import State

BEGIN, END = "<|tool_call_start|>", "<|tool_call_end|>"
LISTED = ("<|tool_list_start|>", "List of tools: [")
"""Beginnings of the list of tools in templates that do not render calls."""


def lfm2(state: State) -> Read[None]:
    """Reads content and the calls in it."""
    yield from json_calls.tagged_lists(state, BEGIN, END, _calls)


def _calls(state: State) -> Read[bool]:
    """Reads a list of calls after its bracket, in either notation."""
    yield from state.text.skip_space()
    if (yield from state.text.peek()) == "{":
        return (yield from json_calls.call_list(state, stop=END))
    return (yield from python_calls.call_list(state))
