"""Calls as JSON objects, `{"name": ..., "arguments": {...}}`, streamed as they arrive.

The parser finds the end of values but does not validate them, so callers get the arguments as the model wrote them. A
marker within a JSON string is part of the string; outside of strings it ends an unfinished value.

An object is a call as soon as it has a name and its arguments begin; the call is then final, even if the output ends
early. An object that ends or deviates before that is not a call. Other keys are dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ferrule._text.parsers.literals import whole_characters
from ferrule._text.parsers.reader import Read, Reader, Sink, discard
from ferrule._text.parsers.state import State


@dataclass(frozen=True)
class CallMembers:
    """Keys of the object of a call."""

    names: tuple[str, ...] = ("name", "tool_name")
    arguments: tuple[str, ...] = ("arguments", "parameters")
    inside: str = ""
    """Key of an inner object with name and arguments, such as `function` in OpenAI's form; empty if there is none."""
    name_is_key: bool = False
    """Whether the name of the function is itself the key of the arguments."""


MEMBERS = CallMembers()
KEYS = frozenset({"name", "type", "id", *MEMBERS.arguments})

_SCALAR = re.compile(r"[\w.+-]+")
_OPENERS, _CLOSERS = ("{", "["), ("}", "]")


def json_value(text: Reader, into: Sink, stop: str = "") -> Read[bool]:
    """Reads a value; returns False if the value is missing, or incomplete at the end of the text or at `stop`."""
    opener = yield from text.accept('"', *_OPENERS)
    into(opener)
    if opener == '"':
        return (yield from _string(text, into))
    if not opener:
        scalar = yield from text.run(_SCALAR)
        into(scalar)
        return bool(scalar)
    depth = 1
    stops = (stop,) if stop else ()
    while depth:
        mark = yield from text.upto('"', *_OPENERS, *_CLOSERS, *stops, into=into)
        if mark in ("", *stops):
            return False
        text.take(mark, into)
        if mark == '"':
            if not (yield from _string(text, into)):
                return False
        else:
            depth += 1 if mark in _OPENERS else -1
    return True


def json_string(text: Reader) -> Read[str | None]:
    """Reads a string and returns its content; returns None if the string is missing or incomplete."""
    pieces: list[str] = []
    if not (yield from text.accept('"')) or not (yield from _string(text, pieces.append)):
        return None
    return _decoded('"' + "".join(pieces))


def call_object(state: State, *, stop: str = "", certain: bool = True, members: CallMembers = MEMBERS) -> Read[bool]:
    """Reads an object and emits its call; returns False if it is not a call, and the caller then holds its text.

    `certain` means that a marker announced a call. Otherwise an object is a call only if it has arguments, no keys that
    a call does not have, and the name of a declared tool, if tools are declared.
    """
    text, draft = state.text, state.draft
    found = _Found(members)
    yield from text.accept("{")
    ended = yield from _members(state, found, stop, certain=certain)
    if found.written:
        if ended:
            text.held()
        state.as_content()
        return True
    enough = found.arguments is not None or certain or state.tools.declares(found.name or "")
    if not ended or found.name is None or not enough:
        return False
    text.held()
    draft.call(found.name)
    draft.arguments("{}" if found.arguments is None else found.arguments)
    return True


def call_list(state: State, *, stop: str = "", certain: bool = True, members: CallMembers = MEMBERS) -> Read[bool]:
    """Reads a list of call objects after its bracket; returns False if the first object is not a call."""

    def read_call(state: State) -> Read[bool]:
        if (yield from state.text.peek()) != "{":
            return False
        return (yield from call_object(state, stop=stop, certain=certain, members=members))

    return (yield from state.call_list(read_call))


def tagged_objects(state: State, begin: str, end: str) -> Read[None]:
    """Reads a message with one or several objects in tags; a tag around any other text is content, tag included."""
    text = state.text
    inside = False
    while marker := (yield from state.content(begin, *((end,) if inside else ()))):
        if marker == end:
            inside = False
            continue
        text.hold(begin)
        yield from text.skip_space()
        while (yield from text.peek()) == "{" and (yield from call_object(state, stop=end)):
            inside = True
            text.hold()
            yield from text.skip_space()
        state.as_content()


def tagged_lists(
    state: State, begin: str, end: str, read_list: Callable[[State], Read[bool]] | None = None
) -> Read[None]:
    """Reads a message with lists of calls in tags; a tag around any other text is content, tag included.

    `read_list` reads a list after its bracket, by default one of JSON objects, and returns whether it has calls.
    """
    read_list = read_list or partial(call_list, stop=end)
    text = state.text
    inside = False
    while marker := (yield from state.content(begin, *((end,) if inside else ()))):
        if marker == end:
            inside = False
            continue
        text.hold(begin)
        yield from text.skip_space()
        inside = bool((yield from text.accept("["))) and (yield from read_list(state))
        if not inside:
            state.as_content()


@dataclass
class _Found:
    """State of an object that is being read."""

    members: CallMembers
    name: str | None = None
    arguments: str | None = None
    """Arguments that precede the name."""
    written: bool = False
    """Whether the call is final."""
    entered: bool = False
    """Whether the inner object of `members` has begun."""


def _members(state: State, found: _Found, stop: str, *, certain: bool) -> Read[bool]:
    """Reads to the end of an object; returns False if it is incomplete or not a call."""
    text = state.text
    while True:
        yield from text.skip_space()
        if (yield from text.accept("}")):
            return True
        key = yield from json_string(text)
        if key is None or not (certain or key in KEYS):
            return False
        yield from text.skip_space()
        if not (yield from text.accept(":")):
            return False
        yield from text.skip_space()
        if not (yield from _value(state, key, found, stop, certain=certain)):
            return False
        yield from text.skip_space()
        if not (yield from text.accept(",")) and (yield from text.peek()) != "}":
            return False


def _value(state: State, key: str, found: _Found, stop: str, *, certain: bool) -> Read[bool]:
    """Reads the value of a key; returns False if it is incomplete or the object is not a call."""
    text, members = state.text, found.members
    if key and key == members.inside and not found.entered and (yield from text.accept("{")):
        found.entered = True
        return (yield from _members(state, found, stop, certain=certain))
    if members.name_is_key and found.name is None:
        found.name = key or None
        is_arguments = found.name is not None
    else:
        is_arguments = key in members.arguments
    if key in members.names and found.name is None:
        name = yield from json_string(text)
        found.name = name if name and (certain or state.tools.allow(name)) else None
        return found.name is not None
    if not is_arguments or found.arguments is not None or found.written:
        return (yield from json_value(text, discard, stop))
    first = yield from text.peek()
    if not first or not (certain or first == "{"):
        return False
    if found.name is None:
        pieces: list[str] = []
        whole = yield from _arguments(text, pieces.append, stop)
        found.arguments = "".join(pieces)
    else:
        text.held()
        state.draft.call(found.name)
        found.written = True
        whole = yield from _arguments(text, state.draft.arguments, stop)
        text.hold()
    return whole


def _string(text: Reader, into: Sink) -> Read[bool]:
    """Reads a string after its opening quotation mark."""
    while True:
        mark = yield from text.until('"', "\\\\", '\\"', into=into)
        into(mark)
        if mark in ("", '"'):
            return bool(mark)


def _arguments(text: Reader, into: Sink, stop: str) -> Read[bool]:
    """Reads the arguments of a call: an object, an object encoded as a string, or null."""
    first = yield from text.peek()
    if first not in ('"', "n"):
        return (yield from json_value(text, into, stop))
    pieces: list[str] = []
    whole = yield from json_value(text, pieces.append, stop)
    value = "".join(pieces)
    if whole:
        value = "{}" if value == "null" else _decoded(value) or value
    into(value)
    return whole


def _decoded(string: str) -> str | None:
    try:
        # Models often write line ends in strings without escapes.
        value: object = json.loads(string, strict=False)
    except ValueError:
        return None
    return whole_characters(value) if isinstance(value, str) else None
