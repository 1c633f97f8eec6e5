"""Hermes (Nous Research) and Qwen 2.5 and 3: a JSON object in a tag for each call.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

Source: the chat templates of NousResearch/Hermes-3-Llama-3.1-8B and Qwen/Qwen3-8B. A tag around several objects holds
several calls; a tag around any other text is content, tag included.
"""

from __future__ import annotations

from ferrule._text.parsers.json_calls import call_object
from ferrule._text.parsers.reader import Read
from ferrule._text.parsers.state import State

BEGIN, END = "<tool_call>", "</tool_call>"


def hermes(state: State) -> Read[None]:
    """Reads content and the calls in it."""
    text = state.text
    inside = False
    while marker := (yield from state.content(BEGIN, *((END,) if inside else ()))):
        if marker == END:
            inside = False
            continue
        text.hold(BEGIN)
        yield from text.skip_space()
        while (yield from text.peek()) == "{" and (yield from call_object(state, stop=END)):
            inside = True
            text.hold()
            yield from text.skip_space()
        state.as_content()
