"""Functionary v3.1 and other Llamas: a JSON object in a tag that names the function.

    <function=get_weather>{"city": "Paris"}</function>

Source: the chat template of meetkai/functionary-medium-v3.1, and "User-defined custom tool calling" in the prompt
format of Llama 3.1 (github.com/meta-llama/llama-models). A call is final from the opening brace; a tag around any other
text is content, tag included.
"""

from __future__ import annotations

import re

from ferrule._text.parsers.json_calls import json_value
from ferrule._text.parsers.reader import Read
from ferrule._text.parsers.state import State

BEGIN, END = "<function=", "</function>"
_NAME = re.compile(r"[^<>\s]+")


def functionary(state: State) -> Read[None]:
    """Reads content and the calls in it."""
    text = state.text
    while (yield from state.content(BEGIN)):
        text.hold(BEGIN)
        name = yield from text.run(_NAME)
        named = name and (yield from text.accept(">"))
        yield from text.skip_space()
        if not named or (yield from text.peek()) != "{":
            state.as_content()
            continue
        text.held()
        state.draft.call(name)
        yield from json_value(text, state.draft.arguments, END)
        yield from text.skip_space()
        yield from text.accept(END)
