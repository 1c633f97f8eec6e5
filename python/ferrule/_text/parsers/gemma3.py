"""Gemma 1 to 3: calls in fenced code, as Google's guides describe.

    ```tool_code
    get_weather(city="Paris")
    ```

Source: "Function calling with Gemma" (ai.google.dev/gemma/docs/capabilities/function-calling) and the tool_code blocks
of Google's examples, some of them within `print(...)`. Unambiguous JSON objects in a `json` block are calls too, and so
is an answer that begins with either notation without a block. Other blocks are content.
"""

from __future__ import annotations

from ferrule._text.parsers import json_calls, python_calls
from ferrule._text.parsers.llama import json_calls as objects
from ferrule._text.parsers.reader import Read
from ferrule._text.parsers.state import State

CODE, JSON, FENCE = "```tool_code", "```json", "```"
PRINT = "print("


def gemma3(state: State) -> Read[None]:
    """Reads the calls that an answer begins with, then content and calls in blocks."""
    text = state.text
    block = ""
    while True:
        text.hold(block)
        yield from text.skip_space()
        if not block:
            block = yield from text.accept(CODE, JSON)
            yield from text.skip_space()
        if (yield from _calls(state, block)):
            text.hold()
            yield from text.skip_space()
            if block and (yield from text.accept(FENCE)):
                text.held()
        state.as_content()
        block = yield from state.content(CODE, JSON)
        if not block:
            return


def _calls(state: State, block: str) -> Read[bool]:
    text = state.text
    if (yield from text.peek()) == "{":
        return block != CODE and (yield from objects(state))
    if (yield from text.accept("[")):
        yield from text.skip_space()
        if (yield from text.peek()) == "{":
            return block != CODE and (yield from json_calls.call_list(state, certain=False))
        return block != JSON and (yield from python_calls.call_list(state))
    return block == CODE and (yield from _code(state))


def _code(state: State) -> Read[bool]:
    """Reads calls one after another."""
    text = state.text
    written = False
    while (yield from text.peek()) not in ("", "`"):
        printed = yield from text.accept(PRINT)
        yield from text.skip_space()
        if not (yield from python_calls.call(state)):
            break
        written = True
        text.hold()
        yield from text.skip_space()
        if printed and (yield from text.accept(")")):
            text.hold()
            yield from text.skip_space()
    if written:
        state.as_content()
    return written
