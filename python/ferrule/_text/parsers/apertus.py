"""Apertus (Swiss AI): a list of objects between special tokens, each with the name of a function as its key.

    <|tools_prefix|>[{"get_weather": {"city": "Paris"}}, {"get_time": {}}]<|tools_suffix|>

Source: the chat template of swiss-ai/Apertus-8B-Instruct-2509. Reasoning is between `<|inner_prefix|>` and
`<|inner_suffix|>`, also after other text. A call is final where its arguments begin.
"""

from __future__ import annotations

from ferrule._text.parsers.json_calls import json_string, json_value, tagged_lists
from ferrule._text.parsers.reader import Read
from ferrule._text.parsers.state import State, Thought

BEGIN, END = "<|tools_prefix|>", "<|tools_suffix|>"
THOUGHT = Thought("<|inner_prefix|>", "<|inner_suffix|>", anywhere=True)


def apertus(state: State) -> Read[None]:
    """Reads content and the calls in it."""
    yield from tagged_lists(state, BEGIN, END, _calls)


def _calls(state: State) -> Read[bool]:
    """Reads a list after its bracket; returns False if its first object is not a call."""
    return (yield from state.call_list(_call))


def _call(state: State) -> Read[bool]:
    """Reads an object; returns False if it is not a call, and the caller then holds its text."""
    text = state.text
    if not (yield from text.accept("{")):
        return False
    yield from text.skip_space()
    name = yield from json_string(text)
    yield from text.skip_space()
    if not name or not (yield from text.accept(":")):
        return False
    yield from text.skip_space()
    if (yield from text.peek()) != "{":
        return False
    text.held()
    state.draft.call(name)
    yield from json_value(text, state.draft.arguments, END)
    yield from text.skip_space()
    yield from text.accept("}")
    return True
