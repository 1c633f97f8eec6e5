"""Solar Open: messages between special tokens, one of which may contain tool calls.

    <|think|>They ask for the weather.<|end|><|begin|>assistant<|tool_calls|>
    <|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>get_weather<|tool_call:args|>{"city": "Paris"}<|tool_call:end|>
    <|calls|>                                                                             without the line ends

Source: the chat template of upstage/Solar-Open-100B. The prompt contains the header of the first message. A call is
final from its opening brace; an incomplete header is content, markers included.
"""

from __future__ import annotations

import re

from ferrule._text.parsers.json_calls import json_value
from ferrule._text.parsers.reader import Read
from ferrule._text.parsers.state import State, Thought

BEGIN, END = "<|tool_call:begin|>", "<|tool_call:end|>"
NAME, ARGS = "<|tool_call:name|>", "<|tool_call:args|>"
AROUND = ("<|tool_calls|>", "<|calls|>")
THOUGHT = Thought("<|think|>", "<|end|>", anywhere=True, dropped=("<|begin|>assistant", "<|content|>", "<|end|>"))
_WORD = re.compile(r"[\w.:/-]+")


def solar(state: State) -> Read[None]:
    """Reads content and the calls in it."""
    text = state.text
    while marker := (yield from state.content(BEGIN, *AROUND)):
        if marker in AROUND:
            state.draft.mark()
            continue
        text.hold(BEGIN)
        call_id = yield from text.run(_WORD)
        name = ""
        if (yield from text.accept(NAME)):
            name = yield from text.run(_WORD)
        if not name or not (yield from text.accept(ARGS)):
            state.as_content()
            continue
        yield from text.skip_space()
        if (yield from text.peek()) != "{":
            state.as_content()
            continue
        text.held()
        state.draft.call(name, call_id or None)
        yield from json_value(text, state.draft.arguments, END)
        yield from text.skip_space()
        yield from text.accept(END)
