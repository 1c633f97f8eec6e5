"""Marks for the variable parts of a rendered turn, and the parts that two texts share."""

from __future__ import annotations

import json
import re
from typing import Any, cast

from ferrule._text.derivation.probes import ARGUMENTS, IDS, NAMED_IDS, NAMES, common_length
from ferrule._text.parsers.json_calls import CallMembers

OBJECT, ARGS, NAME, ID, NUMBER, KEY, STRING, INTEGER = map(chr, range(0xE000, 0xE008))
"""Characters of a private use area that stand for a call, arguments, a name, an id, a number, a key and values."""
MARKS = f"{OBJECT}-{INTEGER}"
"""Marks as the content of a character class."""

_MARK = re.compile(f"[{MARKS}]")
_NUMBER = re.compile(r"(?<![\w.])[0-2](?![\w.])")
_STRINGS = ("qzparis", "qztokyo")
_DECODER = json.JSONDecoder()


def mark(text: str, *, named_ids: bool) -> tuple[str, CallMembers | None]:
    """Replaces the variable parts of a turn by marks; returns the members of its calls too, if they are objects."""
    pieces: list[str] = []
    members = None
    position = 0
    while (start := text.find("{", position)) >= 0:
        try:
            value, end = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):
            value, end = None, start + 1
        found = None if value is None else _members(value)
        members = members or found
        kind = OBJECT if found is not None else ARGS if value in ARGUMENTS else None
        pieces += [text[position:start], text[start:end] if kind is None else kind]
        position = end
    marked = "".join(pieces) + text[position:]
    if named_ids:
        for each, name in zip(NAMED_IDS, NAMES, strict=True):
            marked = marked.replace(each, each.replace(name, NAME))
    for words, character in ((NAMES, NAME), (IDS, ID), (_KEYS, KEY), (_STRINGS, STRING), (("98761",), INTEGER)):
        for word in words:
            marked = marked.replace(word, character)
    return _NUMBER.sub(NUMBER, marked), members


def first_mark(text: str) -> int:
    """Returns the index of the first mark; -1 if there is none."""
    found = _MARK.search(text)
    return -1 if found is None else found.start()


def shared_prefix(first: str, second: str) -> str:
    """Returns the longest common prefix that ends between two markers or words in both texts."""
    length = common_length(first, second)
    while not (_divides(first, length) and _divides(second, length)):
        length -= 1
    return first[:length]


def shared_suffix(first: str, second: str) -> str:
    """Returns the longest common suffix that begins between two markers or words in both texts."""
    length = common_length(first[::-1], second[::-1])
    while not (_divides(first, len(first) - length) and _divides(second, len(second) - length)):
        length -= 1
    return first[len(first) - length :]


_KEYS = tuple(key for each in ARGUMENTS for key in each)


def _divides(text: str, index: int) -> bool:
    """Whether a marker or a word ends or begins at an index."""
    if index in (0, len(text)):
        return True
    before, after = text[index - 1], text[index]
    if before.isspace() or after.isspace() or before in ">]" or after in "<[":
        return True
    return _MARK.match(before) is not None or _MARK.match(after) is not None


def _members(value: object) -> CallMembers | None:
    """Returns the keys of name and arguments of an object that is one of the calls."""
    if not isinstance(value, dict):
        return None
    held = cast("dict[str, Any]", value)
    found = _plain_members(held)
    if found is not None:
        return found
    for key, inner in held.items():
        found = _plain_members(cast("dict[str, Any]", inner)) if isinstance(inner, dict) else None
        if found is not None and not found.name_is_key:
            return CallMembers(found.names, found.arguments, inside=key)
    return None


def _plain_members(value: dict[str, Any]) -> CallMembers | None:
    for name, arguments in zip(NAMES, ARGUMENTS, strict=True):
        names = [key for key, each in value.items() if each == name]
        written = [key for key, each in value.items() if each in (arguments, json.dumps(arguments))]
        if written == [name]:
            return CallMembers((), (), name_is_key=True)
        if names and written:
            return CallMembers((names[0],), (written[0],))
    return None
