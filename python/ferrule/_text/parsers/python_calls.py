"""Calls in Python notation, `get_weather(city="Paris", days=3)`.

Code is not evaluated: a literal argument becomes JSON, and any other argument becomes a string. Arguments are streamed
one by one. Positional arguments get the names that the tool declares, in order, or else their index from 0. A call is
final from its opening parenthesis, even if the output ends early.
"""

from __future__ import annotations

import re

from ferrule._text.parsers.draft import Arguments
from ferrule._text.parsers.reader import Read, Reader, Sink
from ferrule._text.parsers.state import State
from ferrule._text.parsers.tools import json_of_literal

_NAME = re.compile(r"[\w.-]+")
_QUOTES = ('"""', "'''", '"', "'")
_OPENERS, _CLOSERS = ("(", "[", "{"), (")", "]", "}")


def call_list(state: State) -> Read[bool]:
    """Reads `f(...), g(...)]`; returns False if the first item is not a call, and the caller then holds its text."""
    return (yield from state.call_list(call))


def call(state: State) -> Read[bool]:
    """Reads a call; if tools are declared, it must name one. Returns False for other text, and holds it."""
    text = state.text
    name = yield from text.run(_NAME)
    if not name or name[0].isdigit() or not state.tools.allow(name) or not (yield from text.accept("(")):
        return False
    text.held()
    state.draft.call(name)
    arguments = Arguments(state.draft)
    unnamed = state.tools.parameters(name)
    position = 0
    while True:
        yield from text.skip_space()
        following = yield from text.peek()
        if following in ("", *_CLOSERS):
            break
        if (yield from text.accept(",")):
            continue
        key, start = yield from _keyword(text)
        if key is None:
            key = unnamed.pop(0) if unnamed else str(position)
        elif key in unnamed:
            unnamed.remove(key)
        position += 1
        pieces = [start]
        if not (yield from _value(text, pieces.append)):
            arguments.cut(key, "".join(pieces))
            return True
        arguments.add(key, json_of_literal("".join(pieces), state.tools.types(name, key)))
    if (yield from text.accept(")")) or (yield from text.peek()):
        arguments.end()
    return True


def _keyword(text: Reader) -> Read[tuple[str | None, str]]:
    """Reads a keyword and its `=`; returns the keyword, and the beginning of a value if there is no keyword."""
    text.hold()
    key = yield from text.run(_NAME)
    yield from text.skip_space()
    if key and (yield from text.accept("=", "==")) == "=":
        text.held()
        return key, ""
    return None, text.held()


def _value(text: Reader, into: Sink) -> Read[bool]:
    """Reads to the comma or parenthesis that ends an argument; returns False if the text ends first."""
    depth = 0
    while True:
        mark = yield from text.upto(*_QUOTES, *_OPENERS, *_CLOSERS, ",", into=into)
        if not mark or (not depth and (mark == "," or mark in _CLOSERS)):
            return bool(mark)
        text.take(mark, into)
        if mark in _QUOTES:
            if not (yield from _string(text, mark, into)):
                return False
        elif mark != ",":
            depth += 1 if mark in _OPENERS else -1


def _string(text: Reader, quotes: str, into: Sink) -> Read[bool]:
    """Reads a string after its opening quotes."""
    while True:
        mark = yield from text.until(quotes, "\\\\", "\\" + quotes[0], into=into)
        into(mark)
        if mark in ("", quotes):
            return bool(mark)
