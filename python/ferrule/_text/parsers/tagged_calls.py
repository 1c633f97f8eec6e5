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
from ferrule._text.parsers.tools import STRING, json_of_text


@dataclass(frozen=True)
class Tags:
    """Tags of a notation."""

    begin: str
    """Beginning of the outer tag; empty if there is none."""
    end: str
    call: str
    """Beginning of a call's tag, before the name of the function."""
    named: str
    """End of a call's tag, after the name; empty if another tag follows the name."""
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
    begins = (tags.begin, tags.call) if tags.begin else (tags.call,)
    while marker := (yield from state.content(*begins, *((tags.end,) if inside and tags.end else ()))):
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
    if not name:
        return False
    if not tags.named:
        yield from text.skip_space()
    if not ((yield from text.accept(tags.named)) if tags.named else (yield from text.peek()) == "<"):
        return False
    text.held()
    state.draft.call(name)
    arguments = Arguments(state.draft)
    while True:
        yield from text.skip_space()
        marker = yield from text.accept(tags.call_end, tags.argument, *((tags.end,) if tags.end else ()))
        if marker == tags.argument:
            yield from read_argument(state, name, arguments)
            continue
        if marker or (yield from text.peek()):
            arguments.end()
        return True


def text_value(state: State, function: str, key: str, arguments: Arguments, *ends: str) -> Read[None]:
    """Reads a value up to one of `ends`: it has its declared type, or else is a string, which is streamed."""
    text = state.text
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
