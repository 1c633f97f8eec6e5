"""Mistral: two notations, which depend on the version of the tokenizer.

    [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]           up to v7
    [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_time[ARGS]{}       from v11

Source: the tokenizers of github.com/mistralai/mistral-common, v3 to v13. In v11 `[CALL_ID]` and an id precede
`[ARGS]`. Mistral's templates accept only ids of nine letters and digits. Reasoning is between `[THINK]` and `[/THINK]`.
"""

from __future__ import annotations

import re

from ferrule._text.parsers.json_calls import call_list, call_object, json_value
from ferrule._text.parsers.reader import Read
from ferrule._text.parsers.state import State, Thought

CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
THOUGHT = Thought("[THINK]", "[/THINK]", anywhere=True)
ID_LENGTH = 9
_NAME = re.compile(r"[\w.:/-]+")
_ID = re.compile(r"[A-Za-z0-9]+")


def mistral(state: State) -> Read[None]:
    """Reads content and the calls in it."""
    text = state.text
    while (yield from state.content(CALLS)):
        text.hold(CALLS)
        yield from text.skip_space()
        if (yield from text.accept("[")):
            written = yield from call_list(state, stop=CALLS)
        elif (yield from text.peek()) == "{":
            written = yield from call_object(state, stop=CALLS)
        else:
            written = yield from _named_call(state)
        if not written:
            state.as_content()


def _named_call(state: State) -> Read[bool]:
    """Reads a name and its arguments; returns False if they are missing, and the caller then holds the text."""
    text = state.text
    name = yield from text.run(_NAME)
    if not name:
        return False
    marker = yield from text.accept(CALL_ID, ARGS)
    call_id = None
    if marker == CALL_ID:
        call_id = yield from text.run(_ID)
        if len(call_id) != ID_LENGTH or not (yield from text.accept(ARGS)):
            return False
    yield from text.skip_space()
    if not marker and (yield from text.peek()) != "{":
        return False
    text.held()
    state.draft.call(name, call_id)
    yield from json_value(text, state.draft.arguments, CALLS)
    return True
