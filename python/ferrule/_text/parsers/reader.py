"""Reader of streamed text, with which parsers are written as if the whole text were available.

A parser is a generator. It yields if it needs more text, and continues when more text has arrived or the text has
ended. The results of all methods depend on the characters only, never on how the text was split. Each character is read
a bounded number of times.
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


def discard(text: str) -> None:
    """Discards the text."""


class Reader:
    """A text and the position up to which it has been read."""

    def __init__(self) -> None:
        self._buffer = ""
        self._position = 0
        self._ended = False
        self._held: list[str] | None = None

    def feed(self, text: str) -> None:
        """Appends text."""
        self._buffer = self._buffer[self._position :] + text
        self._position = 0

    def end(self) -> None:
        """Marks the end of the text."""
        self._ended = True

    def hold(self, text: str = "") -> None:
        """Holds the text that is read from here on, preceded by `text`, until it is known what it is part of."""
        self._held = [text]

    def held(self) -> str:
        """Returns the text that was read since `hold`, and stops holding it."""
        held, self._held = self._held or (), None
        return "".join(held)

    def upto(self, *markers: str, into: Sink = discard) -> Read[str]:
        """Reads up to the first of the markers, and returns the marker without reading it; "" if the text ends first.

        If one marker is a prefix of another, the longer one is matched. Otherwise no marker may occur within another.
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

    def until(self, *markers: str, into: Sink = discard) -> Read[str]:
        """Reads up to the first of the markers like `upto`, and reads the marker too."""
        marker = yield from self.upto(*markers, into=into)
        self.take(marker, discard)
        return marker

    def take(self, marker: str, into: Sink) -> None:
        """Reads the marker that `upto` returned."""
        self._take(self._position + len(marker), into)

    def accept(self, *markers: str) -> Read[str]:
        """Reads the longest of the markers with which the unread text begins; returns "" if there is none."""
        pattern, beginnings, longest = _compiled(markers)
        while self._may_grow(beginnings, longest):
            yield
        found = pattern.match(self._buffer, self._position)
        if found is None:
            return ""
        self._take(found.end(), discard)
        return found.group()

    def run(self, characters: re.Pattern[str]) -> Read[str]:
        """Reads characters as long as they match; the pattern must be a character class with `+`."""
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
        """Returns the next character without reading it; "" at the end."""
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
        """Whether the unread text is a prefix of a marker."""
        unread = len(self._buffer) - self._position
        return not self._ended and unread < longest and self._buffer[self._position :] in beginnings

    def _beginning(self, beginnings: frozenset[str], longest: int) -> int:
        """Returns the number of characters at the end that may become a marker."""
        unread = 0 if self._ended else len(self._buffer) - self._position
        lengths = range(min(unread, longest - 1), 0, -1)
        return next((length for length in lengths if self._buffer[-length:] in beginnings), 0)


class _Markers(NamedTuple):
    pattern: re.Pattern[str]
    beginnings: frozenset[str]
    """All proper prefixes of markers, including markers that are prefixes of other markers."""
    longest: int


@lru_cache(maxsize=256)
def _compiled(markers: tuple[str, ...]) -> _Markers:
    # A regular expression takes the first alternative that matches, so longer markers come first. Without markers, the
    # pattern matches nothing.
    ordered = sorted(markers, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, ordered)) or "(?!)")
    beginnings = frozenset(marker[:length] for marker in markers for length in range(len(marker)))
    return _Markers(pattern, beginnings, max(map(len, markers), default=0))
