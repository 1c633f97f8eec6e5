# ruff: noqa: RUF001, RUF002  # the tokens are spelled with these characters
"""DeepSeek V3, R1 and V3.1: calls between special tokens.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Paris"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>                                                      V3, R1

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>…   V3.1

Source: the chat templates of deepseek-ai/DeepSeek-V3-0324, DeepSeek-R1-0528 and DeepSeek-V3.1. The text after
the separator distinguishes the two formats: in V3.1 the arguments follow it. A call is final where its arguments begin.
"""

from __future__ import annotations

import re

from ferrule._text.parsers.json_calls import json_value
from ferrule._text.parsers.reader import Read
from ferrule._text.parsers.state import State

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
TYPE = "function"
FENCE, FENCE_END = ("```json", "```"), "```"
INSIDE = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END)
_NAME = re.compile(r"[\w.:/-]+")


def deepseek(state: State) -> Read[None]:
    """Reads content and the calls in it."""
    text = state.text
    inside = False
    while marker := (yield from state.content(*(INSIDE if inside else (CALLS_BEGIN,)))):
        if marker in (CALL_END, CALLS_END):
            inside = marker == CALL_END
            continue
        text.hold(marker)
        if marker == CALLS_BEGIN:
            yield from text.skip_space()
            marker = yield from text.accept(CALL_BEGIN)
        if marker and (yield from _call(state)):
            inside = True
        else:
            state.as_content()


def _call(state: State) -> Read[bool]:
    """Reads a call after its first marker; returns False if it is not a call, and the caller then holds its text."""
    text, draft = state.text, state.draft
    first = yield from text.run(_NAME)
    yield from text.skip_space()
    if not first or not (yield from text.accept(SEPARATOR)):
        return False
    yield from text.skip_space()
    second = yield from text.run(_NAME)
    if second and first != TYPE:
        return False
    yield from text.skip_space()
    opening = yield from text.accept(*((*FENCE, CALL_END) if second else (CALL_END,)))
    if opening != CALL_END:
        yield from text.skip_space()
    if not opening and (yield from text.peek()) != "{":
        return False
    text.held()
    draft.call(second or first)
    if opening == CALL_END:
        draft.arguments("{}")
        return True
    yield from json_value(text, draft.arguments, CALL_END)
    if opening:
        yield from text.skip_space()
        yield from text.accept(FENCE_END)
    return True
