"""An answer on the screen, as it grows.

On a terminal it is markdown. Blocks that can change no more are printed once and for all; the last one, which still
grows, is drawn again in its place below them, never higher than the screen. So nothing that has scrolled away is ever
drawn twice, and what is left in the scrollback is the answer as it reads.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TextIO

from ferrule._cli.chat.answers import Delta
from ferrule._cli.terminal import harmless, is_styled

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

INTERVAL = 0.05
"""Seconds between two drawings, or four times what one takes: a long block of code is slow to colour."""
_SYNCHRONIZED, _SHOWN = "\x1b[?2026h", "\x1b[?2026l"
"""Terminals that know these show everything between them at once; others ignore them."""


class Display(Protocol):
    """Shows one answer."""

    def add(self, delta: Delta) -> None:
        """Shows what is new."""
        ...

    def close(self) -> None:
        """Shows what is not shown yet, and ends the line."""
        ...


def display(*, plain: bool) -> Display:
    """For the next answer: markdown, or plain text where it is asked for or stdout is not made for more."""
    if plain or not is_styled(sys.stdout):
        return PlainDisplay(sys.stdout)
    return MarkdownDisplay()


class PlainDisplay:
    """The text as it comes. Reasoning is for people: what reads a pipe gets the answer alone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._reasoned = False
        self._answered = False

    def add(self, delta: Delta) -> None:
        """As `Display.add`."""
        self._answered = self._answered or bool(delta.content) or delta.usage is not None
        if self._terminal and delta.reasoning:
            self._reasoned = True
            self._stream.write(harmless(delta.reasoning))
        if delta.content:
            if self._reasoned:
                self._reasoned = False
                self._stream.write("\n\n")
            self._stream.write(harmless(delta.content) if self._terminal else delta.content)
        self._stream.flush()

    def close(self) -> None:
        """As `Display.close`. An answer without text is a line too, and what failed is none."""
        if self._answered or self._reasoned:
            self._stream.write("\n")
            self._stream.flush()


class MarkdownDisplay:
    """Reasoning dim, then the answer as markdown."""

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console

        # soft_wrap stays off: rich breaks lines, so that it is known how many there are.
        self._console = Console(highlight=False, markup=False, emoji=False) if console is None else console
        self._reasoning = ""
        """What is not printed for good yet, and likewise:"""
        self._content = ""
        self._printed = False
        self._drawn: list[int] = []
        """Columns of the lines that are drawn, and will be drawn again."""
        self._drawn_at = 0.0
        self._interval = 0.0
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._closed = False
        self._draw([], self._lines(_dim("...")))

    def add(self, delta: Delta) -> None:
        """As `Display.add`."""
        with self._lock:
            self._reasoning += harmless(delta.reasoning)
            self._content += harmless(delta.content)
            wait = self._drawn_at + self._interval - time.monotonic()
            if wait <= 0:
                self._show()
            elif self._timer is None:  # what comes before a long silence must not wait for its end
                self._timer = threading.Timer(wait, self._show_late)
                self._timer.daemon = True
                self._timer.start()

    def close(self) -> None:
        """As `Display.close`."""
        with self._lock:
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()
            self._show(final=True)

    def _show_late(self) -> None:
        with self._lock:
            self._timer = None
            if not self._closed:
                self._show()

    def _show(self, *, final: bool = False) -> None:
        from ferrule._cli.chat.markdown import Markdown, blocks

        began = time.monotonic()

        done: list[str] = []
        growing: list[str] = []
        if self._reasoning:
            ended = final or bool(self._content)
            lines = (self._reasoning.rstrip("\n") if ended else self._reasoning).split("\n")
            self._reasoning = "" if ended else lines.pop()
            done += self._lines(_dim("\n".join(lines))) if lines else []
            growing += self._lines(_dim(self._reasoning)) if self._reasoning else []
        # Each block by itself, so that it looks the same whatever came with it.
        *whole, last = blocks(self._content)
        for block, lines in (*((each, done) for each in whole), (last, done if final else growing)):
            drawn = _without_empty_ends(self._lines(Markdown(block))) if block.strip() else []
            if drawn and (self._printed or done):
                lines.append("")
            lines.extend(drawn)
        self._content = "" if final else last
        self._printed = self._printed or bool(done)
        self._draw(done, growing)
        self._drawn_at = time.monotonic()
        self._interval = max(INTERVAL, 4 * (self._drawn_at - began))

    def _draw(self, done: Sequence[str], growing: Sequence[str]) -> None:
        """Prints what is done over what was drawn, and draws below it the end of what grows."""
        growing = growing[-max(self._console.height - 1, 1) :]
        text = "".join(f"{line}\n" for line in done) + "\n".join(growing)
        self._console.file.write(f"{_SYNCHRONIZED}{self._up()}\x1b[J{text}{_SHOWN}")
        self._console.file.flush()
        self._drawn = [_columns(line) for line in growing]

    def _lines(self, shown: RenderableType) -> list[str]:
        with self._console.capture() as captured:
            self._console.print(shown)
        # rich fills lines with spaces, which would be copied too.
        return [line.rstrip(" ") for line in captured.get().removesuffix("\n").split("\n")]

    def _up(self) -> str:
        """Moves the cursor to where the drawing began; a window made narrower has broken its lines anew."""
        width = max(self._console.width, 1)
        rows = sum(max(1, -(-columns // width)) for columns in self._drawn)
        return "\r" if rows <= 1 else f"\r\x1b[{rows - 1}A"


def _dim(text: str) -> RenderableType:
    from rich.text import Text

    return Text(text, style="dim")


def _columns(line: str) -> int:
    return _plain(line).cell_len


def _plain(line: str) -> Text:
    from rich.text import Text

    return Text.from_ansi(line)


def _without_empty_ends(lines: list[str]) -> list[str]:
    full = [number for number, line in enumerate(lines) if _plain(line).plain.strip()]
    return lines[full[0] : full[-1] + 1] if full else []
