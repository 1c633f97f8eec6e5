"""Kimi K2 and Kimi Linear (Moonshot AI): calls between special tokens, each with an id that contains its name.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}
    <|tool_call_end|><|tool_calls_section_end|>

Source: the chat template of moonshotai/Kimi-K2-Thinking and docs/tool_call_guidance.md beside it. A call is final where
its arguments begin. The number at the end of an id counts the calls of a conversation.
"""

from __future__ import annotations

import re

from ferrule._text.parsers.json_calls import json_value
from ferrule._text.parsers.reader import Read
from ferrule._text.parsers.state import State

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
TOKENS = (SECTION, SECTION_END, CALL, ARGUMENTS, CALL_END)
_ID = re.compile(r"[\w.:/-]+")
_NAME_IN_ID = re.compile(r"^(?:functions\.)?(.+?)(?::[0-9]+)?$")


def kimi(state: State) -> Read[None]:
    """Reads content and the calls in it."""
    text = state.text
    inside = False
    while marker := (yield from state.content(SECTION, CALL, *((CALL_END, SECTION_END) if inside else ()))):
        if marker in (CALL_END, SECTION_END):
            inside = marker == CALL_END
            continue
        text.hold(marker)
        if marker == SECTION:
            yield from text.skip_space()
            marker = yield from text.accept(CALL)
        if marker and (yield from _call(state)):
            inside = True
        else:
            state.as_content()


def _call(state: State) -> Read[bool]:
    """Reads a call after its first token; returns False if it is not a call, and the caller then holds its text."""
    text = state.text
    yield from text.skip_space()
    call_id = yield from text.run(_ID)
    name = _NAME_IN_ID.sub(r"\1", call_id)
    yield from text.skip_space()
    if not call_id or not (yield from text.accept(ARGUMENTS)):
        return False
    text.held()
    state.draft.call(name, call_id)
    yield from text.skip_space()
    yield from json_value(text, state.draft.arguments, CALL_END)
    return True
