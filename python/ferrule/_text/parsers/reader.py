"""Text that arrives in pieces, read by parsers written as if all of it were there.

A parser is a generator: where it needs more text than there is it yields, and goes on when more has come or none will.
Each way of reading decides by the characters alone, never by where a piece ends, so that no split of a stream changes
what a parser makes of it; and each looks at a character a bounded number of times.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import NamedTuple, TypeAlias, TypeVar

T = TypeVar("T")
Read: TypeAlias = Generator[None, None, T]
Sink: TypeAlias = Callable[[str], object]

SPACE = " \t\r\n"
_SPACES = re.compile(f"[{SPACE}]+")


def nowhere(text: str) -> None:
    """The sink for what is only skipped."""


class Reader:
    """A text and how far it has been read."""

    def __init__(self) -> None:
        self._buffer = ""
        self._position = 0
        self._ended = False
        self._held: list[str] | None = None

    def feed(self, text: str) -> None:
        """More text."""
        self._buffer = self._buffer[self._position :] + text
        self._position = 0

    def end(self) -> None:
        """No more text will come."""
        self._ended = True

    def hold(self, text: str = "") -> None:
        """Keeps what is read from here on, after `text`, until it is known what it is."""
        self._held = [text]

    def held(self) -> str:
        """What was read since `hold`, which is kept no longer."""
        held, self._held = self._held or (), None
        return "".join(held)

    def upto(self, *markers: str, into: Sink = nowhere) -> Read[str]:
        """Reads on to the first of the markers, which is returned but not read; "" where the text ends before.

        Where one marker begins another, the longer one counts. None may lie in another one's midst.
        """
        pattern, beginnings, longest = _compiled(markers)
        while True:
            found = pattern.search(self._buffer, self._position)
            if found is None:
                self._take(len(self._buffer) - self._beginning(beginnings, longest), into)
                if self._ended:
                    return ""
            else:
                self._take(found.start(), into)
                if not self._may_grow(beginnings, longest):
                    return found.group()
            yield

    def until(self, *markers: str, into: Sink = nowhere) -> Read[str]:
        """As `upto`, and reads the marker."""
        marker = yield from self.upto(*markers, into=into)
        self.take(marker, nowhere)
        return marker

    def take(self, marker: str, into: Sink) -> None:
        """Reads the marker that `upto` has returned."""
        self._take(self._position + len(marker), into)

    def accept(self, *markers: str) -> Read[str]:
        """Reads a marker that comes next, the longest such; "" where there is none."""
        pattern, beginnings, longest = _compiled(markers)
        while self._may_grow(beginnings, longest):
            yield
        found = pattern.match(self._buffer, self._position)
        if found is None:
            return ""
        self._take(found.end(), nowhere)
        return found.group()

    def run(self, characters: re.Pattern[str]) -> Read[str]:
        """Reads on as long as the pattern matches, a class of characters with `+`."""
        pieces: list[str] = []
        while True:
            found = characters.match(self._buffer, self._position)
            if found is not None:
                self._take(found.end(), pieces.append)
            if self._ended or self._position < len(self._buffer):
                return "".join(pieces)
            yield

    def skip_space(self) -> Read[None]:
        """Reads whitespace."""
        yield from self.run(_SPACES)

    def peek(self) -> Read[str]:
        """The next character, unread; "" at the end."""
        while self._position == len(self._buffer) and not self._ended:
            yield
        return self._buffer[self._position : self._position + 1]

    def _take(self, end: int, into: Sink) -> None:
        if end > self._position:
            piece = self._buffer[self._position : end]
            self._position = end
            if self._held is not None:
                self._held.append(piece)
            into(piece)

    def _may_grow(self, beginnings: frozenset[str], longest: int) -> bool:
        """Whether all that is unread is the beginning of a marker."""
        unread = len(self._buffer) - self._position
        return not self._ended and unread < longest and self._buffer[self._position :] in beginnings

    def _beginning(self, beginnings: frozenset[str], longest: int) -> int:
        """Characters at the end that may become a marker."""
        unread = 0 if self._ended else len(self._buffer) - self._position
        lengths = range(min(unread, longest - 1), 0, -1)
        return next((length for length in lengths if self._buffer[-length:] in beginnings), 0)


class _Markers(NamedTuple):
    pattern: re.Pattern[str]
    beginnings: frozenset[str]
    """All that a marker can begin with, but no whole one that begins no other."""
    longest: int


@lru_cache(maxsize=256)
def _compiled(markers: tuple[str, ...]) -> _Markers:
    # An alternation takes the first that fits. Without markers, nothing fits.
    ordered = sorted(markers, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, ordered)) or "(?!)")
    beginnings = frozenset(marker[:length] for marker in markers for length in range(len(marker)))
    return _Markers(pattern, beginnings, max(map(len, markers), default=0))
