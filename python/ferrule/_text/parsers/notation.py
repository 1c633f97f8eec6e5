"""Description of how a chat template writes tool calls, with a parser for any notation that can be described.

    Notation(
        section_begin=("<tool_calls>",), header=("<tool_call>", Hole(Kind.NAME, "<")), body=Tagged(...),
        call_end=("</tool_call>",), section_end=("</tool_calls>",),
    )

Markers are tuples of words: white space between words may differ from the template's. `derivation` finds the notation
of a template. A call is final from the end of its header; text that is not in the notation is content, markers
included.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TypeAlias

from ferrule._text.parsers import python_calls
from ferrule._text.parsers.draft import Arguments, quoted
from ferrule._text.parsers.json_calls import CallMembers, call_list, call_object, json_value
from ferrule._text.parsers.literals import whole_characters
from ferrule._text.parsers.reader import Read
from ferrule._text.parsers.state import State
from ferrule._text.parsers.tools import is_json, json_of_text

Words: TypeAlias = tuple[str, ...]


class Kind(Enum):
    """Meaning of a variable part of a header."""

    NAME = "name"
    ID = "id"
    NUMBER = "number"
    KEY = "key"


@dataclass(frozen=True)
class Hole:
    """Variable part of a header; it ends before the character `before`, or before white space if that is empty."""

    kind: Kind
    before: str

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Pattern of the characters of the part."""
        if self.kind is Kind.NUMBER:
            return re.compile("[0-9]+")
        space = r"\n" if self.kind is Kind.KEY and self.before else r"\s"
        return re.compile(f"[^{space}{re.escape(self.before)}]+")


Header: TypeAlias = tuple["str | Hole", ...]


@dataclass(frozen=True)
class JsonObjects:
    """Calls that are JSON objects with name and arguments, one by one or in a list."""

    members: CallMembers


@dataclass(frozen=True)
class JsonArguments:
    """Arguments that are a JSON object after the header."""


@dataclass(frozen=True)
class PythonCalls:
    """Calls in Python notation, one by one or in a list."""


@dataclass(frozen=True)
class Tagged:
    """Arguments that are between markers, one by one."""

    header: Header
    """Parts up to the value; the first is a marker."""
    kinds: tuple[str, str] | None
    """Words at the end of the header that say that a value is a string, or other JSON; None if nothing says it."""
    value_begin: Words
    """Words between the header, or its last word on kinds, and the value."""
    end: Words
    """Words after a value; KEY_MARK in a word stands for the key."""
    space: tuple[str, str]
    """White space before and after a value that is not part of it."""
    quote: str
    """Text around strings, and not around other values; empty if there is none."""


KEY_MARK = "\ue009"
"""Character that stands for the key in the end of a tagged argument."""


@dataclass(frozen=True)
class Notation:
    """Notation of calls. The first word of `section_begin`, or else of `header`, announces calls."""

    section_begin: Words
    header: Header
    body: JsonObjects | JsonArguments | PythonCalls | Tagged
    call_end: Words
    separator: Words
    section_end: Words

    @property
    def begins(self) -> tuple[str, ...]:
        """Words with which calls begin."""
        first = (*self.section_begin[:1], *self.header[:1])
        return tuple(dict.fromkeys(word for word in first if isinstance(word, str)))

    @property
    def ends(self) -> tuple[str, ...]:
        """Words after calls, and tags between them."""
        return tuple(dict.fromkeys((*self.call_end, *self._tags_between, *self.section_end)))

    @property
    def _tags_between(self) -> Words:
        return tuple(word for word in self.separator if word[0] in "<[")

    @property
    def _last(self) -> str:
        """Word after which no end follows; empty if it is not known."""
        return (self.section_end or (() if self._tags_between else self.call_end) or ("",))[-1]

    def read(self, state: State) -> Read[None]:
        """Reads content and the calls in it."""
        begins, ends = self.begins, self.ends
        inside = False
        while marker := (yield from state.content(*begins, *(ends if inside else ()))):
            if marker not in begins:
                inside = marker != self._last
                state.draft.mark()
                continue
            state.text.hold(marker)
            if (yield from self._read_call(state, marker)):
                inside = bool(ends)
                state.as_content()
            elif marker in state.dropped:
                state.draft.mark()
                state.draft.content(state.text.held().removeprefix(marker))
            else:
                state.as_content()

    def _read_call(self, state: State, marker: str) -> Read[bool]:
        """Reads calls after a first word; returns False if there are none, and the caller then holds their text."""
        header = self.header[1:]
        if marker in self.section_begin[:1]:
            if not (yield from _accept(state, self.section_begin[1:])):
                return False
            header = self.header
        found = yield from _read_header(state, header)
        if found is None:
            return False
        name, call_id = found.get(Kind.NAME, ""), found.get(Kind.ID)
        yield from state.text.skip_space()
        match self.body:
            case JsonObjects():
                return (yield from self._json_objects(state, self.body.members))
            case PythonCalls():
                return (yield from self._python_calls(state))
            case JsonArguments():
                return (yield from self._json_arguments(state, name, call_id))
            case Tagged():
                state.text.held()
                state.draft.call(name, call_id)
                yield from self._tagged(state, name, self.body)
                return True

    @property
    def _stop(self) -> str:
        return next(iter(self.ends), "")

    def _json_objects(self, state: State, members: CallMembers) -> Read[bool]:
        text = state.text
        if (yield from text.accept("[")):
            return (yield from call_list(state, stop=self._stop, members=members))
        written = False
        while (yield from text.peek()) == "{" and (yield from call_object(state, stop=self._stop, members=members)):
            written = True
            text.hold()
            yield from self._separator(state)
        return written

    def _json_arguments(self, state: State, name: str, call_id: str | None) -> Read[bool]:
        text = state.text
        if (yield from text.peek()) != "{":
            if not self.call_end or not (yield from text.accept(self.call_end[0])):
                return False
            text.held()
            state.draft.call(name, call_id)
            state.draft.arguments("{}")
            return True
        text.held()
        state.draft.call(name, call_id)
        yield from json_value(text, state.draft.arguments, self._stop)
        text.hold()
        return True

    def _python_calls(self, state: State) -> Read[bool]:
        text = state.text
        if (yield from text.accept("[")):
            return (yield from python_calls.call_list(state))
        written = False
        while (yield from python_calls.call(state)):
            written = True
            text.hold()
            yield from self._separator(state)
        return written

    def _separator(self, state: State) -> Read[None]:
        yield from state.text.skip_space()
        if self.separator and (yield from _accept(state, self.separator)):
            yield from state.text.skip_space()

    def _tagged(self, state: State, name: str, tagged: Tagged) -> Read[None]:
        text = state.text
        arguments = Arguments(state.draft)
        begin = str(tagged.header[0])
        while True:
            yield from text.skip_space()
            marker = yield from text.accept(begin, *self.ends)
            if marker != begin:
                if marker or (yield from text.peek()):
                    arguments.end()
                return
            text.hold(begin)
            if not (yield from self._argument(state, name, tagged, arguments)):
                arguments.end()
                state.as_content()
                return

    def _argument(self, state: State, name: str, tagged: Tagged, arguments: Arguments) -> Read[bool]:
        """Reads an argument after the first word of its header; returns False if it is not in the notation."""
        text = state.text
        found = yield from _read_header(state, tagged.header[1:])
        if found is None:
            return False
        key = found.get(Kind.KEY, "")
        types = state.tools.types(name, key)
        kind = ""
        if tagged.kinds is not None:
            kind = yield from text.run(_WORD)
        if not (yield from _accept(state, tagged.value_begin)):
            return False
        text.held()
        end = [word.replace(KEY_MARK, key) for word in tagged.end]
        pieces: list[str] = []
        whole = yield from text.until(end[0], into=pieces.append)
        value = _without_space("".join(pieces), tagged.space)
        if not whole:
            arguments.cut(key, value)
            return True
        arguments.add(key, _value(value, types, tagged, kind))
        for word in end[1:]:
            yield from text.skip_space()
            yield from text.accept(word)
        return True


_WORD = re.compile(r"\w+")
_CDATA = "<![CDATA["
"""Beginning of a string in XML (section 2.7 of the specification), with which templates escape tags in values."""


def _value(value: str, types: frozenset[str], tagged: Tagged, kind: str) -> str:
    """Returns a value as JSON. What the notation says of its type comes before the declared types."""
    is_string = kind == tagged.kinds[0] if tagged.kinds is not None else False
    if tagged.quote:
        stripped = value.strip()
        inner = stripped.removeprefix(tagged.quote).removesuffix(tagged.quote)
        is_string = len(stripped) - len(inner) == 2 * len(tagged.quote)
        if is_string and tagged.quote == '"' and is_json(stripped):
            return stripped
        value = inner if is_string else value
    if value.startswith(_CDATA) and value.endswith("]]>"):
        return quoted(value[len(_CDATA) : -len("]]>")])
    if is_string:
        return quoted(whole_characters(value))
    if (tagged.quote or tagged.kinds is not None) and is_json(value):
        return value.strip()
    return json_of_text(value, types)


def tags_and_words(text: str) -> Words:
    """Returns the words of a text, with adjacent tags as separate words."""
    return tuple(text.replace("><", "> <").split())


def _without_space(value: str, space: tuple[str, str]) -> str:
    before, after = space
    return value.removeprefix(before).removesuffix(after)


def _read_header(state: State, header: Header) -> Read[dict[Kind, str] | None]:
    """Reads a header and returns its variable parts; None if the text differs."""
    found: dict[Kind, str] = {}
    for part in header:
        yield from state.text.skip_space()
        if isinstance(part, str):
            if not (yield from state.text.accept(part)):
                return None
        else:
            found[part.kind] = yield from state.text.run(part.pattern)
            if not found[part.kind]:
                return None
    return found


def _accept(state: State, words: Words) -> Read[bool]:
    for word in words:
        yield from state.text.skip_space()
        if not (yield from state.text.accept(word)):
            return False
    return True
