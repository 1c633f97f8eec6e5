"""Qwen3-Coder and later models, and Seed-OSS: calls in XML-like notation.

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

Seed-OSS (ByteDance-Seed/Seed-OSS-36B-Instruct) has the outer tag `<seed:tool_call>`, and writes values without line
ends around them, so its values are the whole text. It reasons between `<seed:think>` and `</seed:think>`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ferrule._text.parsers.draft import Arguments
from ferrule._text.parsers.reader import Read
from ferrule._text.parsers.state import State, Thought
from ferrule._text.parsers.tools import STRING, json_of_text

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
SEED_THOUGHT = Thought("<seed:think>", "</seed:think>", anywhere=False)
_NAME = re.compile(r"[^<>\s]+")
_KEY = re.compile(r"[^<>\n]+")


@dataclass(frozen=True)
class Notation:
    """Differences between the models."""

    begin: str
    end: str
    line_ends: bool
    """Whether a value is between two line ends, which are not part of it."""


QWEN = Notation("<tool_call>", "</tool_call>", line_ends=True)
SEED = Notation("<seed:tool_call>", "</seed:tool_call>", line_ends=False)


def qwen3_coder(state: State) -> Read[None]:
    """Reads content and calls in Qwen's notation."""
    yield from _message(state, QWEN)


def seed_oss(state: State) -> Read[None]:
    """Reads content and calls in Seed-OSS's notation."""
    yield from _message(state, SEED)


def _message(state: State, notation: Notation) -> Read[None]:
    text = state.text
    inside = False
    while marker := (yield from state.content(notation.begin, FUNCTION, *((notation.end,) if inside else ()))):
        if marker == notation.end:
            inside = False
            continue
        text.hold(marker)
        if marker == notation.begin:
            yield from text.skip_space()
            marker = yield from text.accept(FUNCTION)
        if marker and (yield from _function(state, notation)):
            inside = True
        else:
            state.as_content()


def _function(state: State, notation: Notation) -> Read[bool]:
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
            yield from _parameter(state, notation, name, arguments)
        elif marker or (yield from text.peek()):
            arguments.end()
            return True
        else:
            return True


def _parameter(state: State, notation: Notation, function: str, arguments: Arguments) -> Read[None]:
    """Reads a parameter after its `=`."""
    text = state.text
    key = yield from text.run(_KEY)
    yield from text.accept(">")
    ends = (PARAMETER_END,)
    if notation.line_ends:
        yield from text.accept("\n")
        ends = ("\n" + PARAMETER_END, PARAMETER_END)
    types = state.tools.types(function, key)
    if types <= STRING:
        arguments.add(key, '"')
        if (yield from text.until(*ends, into=state.draft.string_in_arguments)):
            state.draft.arguments('"')
        return
    pieces: list[str] = []
    if (yield from text.until(*ends, into=pieces.append)):
        arguments.add(key, json_of_text("".join(pieces), types))
    else:
        arguments.cut(key, "".join(pieces))
