"""Qwen3-Coder and later models: calls in XML-like notation.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

Source: the chat template of Qwen/Qwen3-Coder-30B-A3B-Instruct. A value is the text between its tags without one line
end on either side. The declared type decides its type; the default is a string, and strings are streamed. The outer
tag may be missing, since models omit it at times. A call is final from `<function=...>`; other text in the outer tag
is content, tag included.
"""

from __future__ import annotations

import re

from ferrule._text.parsers.draft import Arguments
from ferrule._text.parsers.reader import Read
from ferrule._text.parsers.state import State
from ferrule._text.parsers.tools import STRING, json_of_text

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^<>\s]+")
_KEY = re.compile(r"[^<>\n]+")


def qwen3_coder(state: State) -> Read[None]:
    """Reads content and the calls in it."""
    text = state.text
    inside = False
    while marker := (yield from state.content(BEGIN, FUNCTION, *((END,) if inside else ()))):
        if marker == END:
            inside = False
            continue
        text.hold(marker)
        if marker == BEGIN:
            yield from text.skip_space()
            marker = yield from text.accept(FUNCTION)
        if marker and (yield from _function(state)):
            inside = True
        else:
            state.as_content()


def _function(state: State) -> Read[bool]:
    """Reads a function after its `=`; False if it is not a call."""
    text = state.text
    name = yield from text.run(_NAME)
    if not name or not (yield from text.accept(">")):
        return False
    text.held()
    state.draft.call(name)
    arguments = Arguments(state.draft)
    while True:
        yield from text.skip_space()
        marker = yield from text.accept(PARAMETER, FUNCTION_END)
        if marker == PARAMETER:
            yield from _parameter(state, name, arguments)
        elif marker or (yield from text.peek()):
            arguments.end()
            return True
        else:
            return True


def _parameter(state: State, function: str, arguments: Arguments) -> Read[None]:
    """Reads a parameter after its `=`."""
    text = state.text
    key = yield from text.run(_KEY)
    yield from text.accept(">")
    yield from text.accept("\n")
    types = state.tools.types(function, key)
    if types <= STRING:
        arguments.add(key, '"')
        if (yield from text.until("\n" + PARAMETER_END, PARAMETER_END, into=state.draft.string_in_arguments)):
            state.draft.arguments('"')
        return
    pieces: list[str] = []
    if (yield from text.until("\n" + PARAMETER_END, PARAMETER_END, into=pieces.append)):
        arguments.add(key, json_of_text("".join(pieces), types))
    else:
        arguments.cut(key, "".join(pieces))
