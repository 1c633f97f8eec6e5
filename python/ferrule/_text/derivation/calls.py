"""Derives the notation of tool calls from the turns with one and with two calls."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ferrule._text.derivation.marks import (
    ARGS,
    ID,
    INTEGER,
    KEY,
    MARKS,
    NAME,
    NUMBER,
    OBJECT,
    STRING,
    first_mark,
    mark,
    shared_prefix,
    shared_suffix,
)
from ferrule._text.derivation.probes import ANSWER, Probes
from ferrule._text.parsers.notation import (
    KEY_MARK,
    Header,
    Hole,
    JsonArguments,
    JsonObjects,
    Kind,
    Notation,
    PythonCalls,
    Tagged,
    tags_and_words,
)

_KINDS = {NAME: Kind.NAME, ID: Kind.ID, NUMBER: Kind.NUMBER, KEY: Kind.KEY}
_GAP = f"([^{MARKS}]*)"
_ARGUMENTS = re.compile(f"{KEY}{_GAP}{STRING}{_GAP}{KEY}{_GAP}{INTEGER}", re.DOTALL)


class UnknownNotationError(ValueError):
    """A notation that cannot be described; the message says why."""


@dataclass(frozen=True)
class Frame:
    """Texts of a turn around its calls, without those that answers have too."""

    before: str
    after: str
    gap: str | None
    """Text between two calls; None if the template renders only one."""


def derive_calls(probes: Probes) -> Notation:
    """Returns the notation of calls.

    Raises UnknownNotationError.
    """
    if not probes.call:
        raise UnknownNotationError("the template does not render tool calls")
    one, members = mark(probes.call, named_ids=probes.named_ids)
    start = first_mark(one)
    if members is not None:
        start = one.index(OBJECT)
        return _objects(_framed(probes, start, start + 1), JsonObjects(members))
    if ARGS in one:
        start, end = max(first_mark(one), 0), one.index(ARGS)
        frame = _framed(probes, start, end + 1)
        return _notation(frame, one[start:end], "{", JsonArguments())
    found = _ARGUMENTS.search(_with_closed_keys(one))
    if found is None or NAME not in one[: found.start()]:
        raise UnknownNotationError("the name or the arguments of a call are not in the rendered text in this order")
    one = _with_closed_keys(one)
    if one[: found.start()].endswith(f"{NAME}(") and found[1].rstrip("\"'").strip() == "=":
        closing = one.find(")", found.end())
        if closing < 0:
            raise UnknownNotationError("a call in Python notation has no closing parenthesis")
        start = one.index(NAME)
        return _objects(_framed(probes, start, closing + 1), PythonCalls())
    return _tagged(probes, one, found)


def _with_closed_keys(text: str) -> str:
    """Marks keys in closing tags, so that each argument has one key."""
    return text.replace(f"/{KEY}", f"/{KEY_MARK}")


def _framed(probes: Probes, start: int, end: int) -> Frame:
    """Returns the frame of a call between two indices of the marked turn."""
    one = _with_closed_keys(mark(probes.call, named_ids=probes.named_ids)[0])
    before, core, after = one[:start], one[start:end], one[end:]
    gap = None
    if probes.calls:
        both = _with_closed_keys(mark(probes.calls, named_ids=probes.named_ids)[0])
        if not both.startswith(before + core):
            raise UnknownNotationError("the first of two calls is written differently from a single call")
        rest = both[len(before) + len(core) :]
        gap = rest[: first_mark(rest)]
    beginning, _, end_of_answer = probes.answer.partition(ANSWER)
    turn_end = shared_suffix(end_of_answer, after)
    before = before[len(shared_prefix(before, beginning)) :]
    answer_end = end_of_answer[: len(end_of_answer) - len(turn_end)]
    if answer_end.strip():
        before = before[len(shared_prefix(before, answer_end)) :]
    return Frame(before, after[: len(after) - len(turn_end)], gap)


def _objects(frame: Frame, body: JsonObjects | PythonCalls) -> Notation:
    """Returns the notation of calls that begin without a separate header, in a list or one by one."""
    before, after = frame.before.rstrip(), frame.after.lstrip()
    if before.endswith("[") and after.startswith("]"):
        return Notation(tuple(before[:-1].split()), (), body, (), (), tags_and_words(after[1:]))
    return _notation(frame, "", "", body)


def _notation(
    frame: Frame, header: str, following: str, body: JsonObjects | JsonArguments | PythonCalls | Tagged
) -> Notation:
    """Divides the frame into the parts around all calls and the parts around each call."""
    begin, end, separator = frame.before, frame.after, ""
    if frame.gap is not None:
        begin = shared_suffix(frame.before, frame.gap)
        between = frame.gap[: len(frame.gap) - len(begin)]
        end = shared_prefix(between, frame.after)
        separator = between[len(end) :]
    return Notation(
        section_begin=tuple(frame.before[: len(frame.before) - len(begin)].split()),
        header=_header(begin + header, following),
        body=body,
        call_end=tags_and_words(end),
        separator=tags_and_words(separator),
        section_end=tags_and_words(frame.after[len(end) :]),
    )


def _header(text: str, following: str) -> Header:
    """Returns the parts of a marked header, which is before a character."""
    parts: list[str | Hole] = []
    pieces = re.split(f"([{MARKS}])", text)
    for literal, hole, after in zip(pieces[::2], [*pieces[1::2], ""], [*pieces[2::2], ""], strict=False):
        parts += literal.split()
        if not hole:
            continue
        if hole not in _KINDS:
            raise UnknownNotationError("a header has values of arguments")
        parts.append(Hole(_KINDS[hole], (after or following)[:1].strip()))
    return tuple(parts)


def _tagged(probes: Probes, one: str, found: re.Match[str]) -> Notation:
    """Returns the notation of calls whose arguments are written one by one."""
    for_string, between, for_integer = found.groups()
    named = one[: found.start()]
    name_at = max(named.rfind(character) for character in (NAME, ID, NUMBER)) + 1
    begin = shared_suffix(named[name_at:], between)
    if not begin.strip():
        raise UnknownNotationError("arguments do not begin with a marker")
    quote, kinds, value_begin = "", None, ""
    if for_string != for_integer:
        quote = for_string.removeprefix(for_integer)
        if not for_string.startswith(for_integer) or not between.startswith(quote):
            quote = ""
            for_integer, kinds, value_begin = _kinds(for_string, for_integer)
    end = between[len(quote) : len(between) - len(begin)]
    end = shared_prefix(end, _end_after_string(probes, quote) or one[found.end() :])
    if not end.strip() or not one.startswith(end, found.end()):
        raise UnknownNotationError("values do not end with a marker")
    start = min(index for index in map(one.find, (NAME, ID, NUMBER)) if index >= 0)
    frame = _framed(probes, start, found.end() + len(end))
    last = value_begin if kinds is not None else for_integer
    tagged = Tagged(
        header=_header(f"{begin}{KEY}{for_integer}", ""),
        kinds=kinds,
        value_begin=tuple(value_begin.split()),
        end=tuple(end.split()),
        space=(last[len(last.rstrip()) :], end[: len(end) - len(end.lstrip())]),
        quote=quote,
    )
    if not isinstance(tagged.header[0], str):
        raise UnknownNotationError("arguments do not begin with a marker")
    return _notation(frame, one[start : found.start() - len(begin)], begin.lstrip(), tagged)


def _kinds(for_string: str, for_integer: str) -> tuple[str, tuple[str, str], str]:
    """Returns the text before the words that tell a string from an integer, the words, and the text after them."""
    words = re.split(r"(\w+)", for_string), re.split(r"(\w+)", for_integer)
    different = [index for index, pair in enumerate(zip(*words, strict=False)) if pair[0] != pair[1]]
    if len(words[0]) != len(words[1]) or len(different) != 1 or different[0] % 2 == 0:
        raise UnknownNotationError("strings and numbers differ in more than a word before the value")
    index = different[0]
    return "".join(words[0][:index]), (words[0][index], words[1][index]), "".join(words[0][index + 1 :])


def _end_after_string(probes: Probes, quote: str) -> str:
    """Returns the text after the last value of two calls, which is a string."""
    both = _with_closed_keys(mark(probes.calls, named_ids=probes.named_ids)[0])
    return both[both.rfind(STRING) + 1 :].removeprefix(quote) if both else ""
