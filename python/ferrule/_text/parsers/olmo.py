"""OLMo 3 and OLMo hybrid (Ai2): Python calls in a tag, one on each line.

    <function_calls>
    get_weather(city="Paris")
    get_time()
    </function_calls>

Source: the chat template of allenai/Olmo-3-7B-Instruct. A tag around any other text is content, tag included.
"""

from __future__ import annotations

from ferrule._text.parsers import python_calls
from ferrule._text.parsers.reader import Read
from ferrule._text.parsers.state import State

BEGIN, END = "<function_calls>", "</function_calls>"


def olmo(state: State) -> Read[None]:
    """Reads content and the calls in it."""
    text = state.text
    inside = False
    while marker := (yield from state.content(BEGIN, *((END,) if inside else ()))):
        if marker == END:
            inside = False
            continue
        text.hold(BEGIN)
        yield from text.skip_space()
        while (yield from python_calls.call(state)):
            inside = True
            text.hold()
            yield from text.skip_space()
        state.as_content()
