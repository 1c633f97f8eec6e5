"""Calls in XML-like notation: a tag with the name of the function, which contains a tag for each argument.

The outer tag may be missing, since models sometimes omit it. A call is final from the end of the tag with its name;
other text in the outer tag is content, tag included.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from ferrule._text.parsers.draft import Arguments
from ferrule._text.parsers.reader import Read
from ferrule._text.parsers.state import State


@dataclass(frozen=True)
class Tags:
    """Tags of a notation."""

    begin: str
    end: str
    call: str
    """Beginning of a call's tag, before the name of the function."""
    named: str
    """End of a call's tag, after the name."""
    call_end: str
    argument: str
    """Beginning of an argument's tag, before its name."""
    name: re.Pattern[str]
    """Pattern of the names of functions."""


ReadArgument: TypeAlias = Callable[[State, str, Arguments], Read[None]]
"""Function that reads an argument of the named function after the beginning of the argument's tag."""


def tagged_calls(state: State, tags: Tags, read_argument: ReadArgument) -> Read[None]:
    """Reads content and the calls in it."""
    text = state.text
    inside = False
    while marker := (yield from state.content(tags.begin, tags.call, *((tags.end,) if inside else ()))):
        if marker == tags.end:
            inside = False
            continue
        text.hold(marker)
        if marker == tags.begin:
            yield from text.skip_space()
            marker = yield from text.accept(tags.call)
        if marker and (yield from _call(state, tags, read_argument)):
            inside = True
        else:
            state.as_content()


def _call(state: State, tags: Tags, read_argument: ReadArgument) -> Read[bool]:
    """Reads a call after the beginning of its tag; returns False if it is not a call."""
    text = state.text
    name = yield from text.run(tags.name)
    if not name or not (yield from text.accept(tags.named)):
        return False
    text.held()
    state.draft.call(name)
    arguments = Arguments(state.draft)
    while True:
        yield from text.skip_space()
        marker = yield from text.accept(tags.call_end, tags.end, tags.argument)
        if marker == tags.argument:
            yield from read_argument(state, name, arguments)
            continue
        if marker or (yield from text.peek()):
            arguments.end()
        return True
