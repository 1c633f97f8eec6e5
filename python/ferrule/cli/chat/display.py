"""An answer on the screen, as it grows.

On a terminal it is markdown. Blocks that can change no more are printed once and for all; the last one, which still
grows, is drawn again in its place below them, never higher than the screen. So nothing that has scrolled away is ever
drawn twice, and what is left in the scrollback is the answer as it reads.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol, TextIO

from ferrule.cli.chat.answers import Delta
from ferrule.cli.terminal import harmless, is_styled

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

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
        self._draw([], [_dim("...")])

    def add(self, delta: Delta) -> None:
        """As `Display.add`."""
        self._reasoning += harmless(delta.reasoning)
        self._content += harmless(delta.content)
        if delta.usage is None and time.monotonic() - self._drawn_at >= self._interval:
            began = time.monotonic()
            self._show()
            self._drawn_at = time.monotonic()
            self._interval = max(INTERVAL, 4 * (self._drawn_at - began))

    def close(self) -> None:
        """As `Display.close`."""
        self._show(final=True)

    def _show(self, *, final: bool = False) -> None:
        from ferrule.cli.chat.markdown import Markdown, last_block

        done: list[RenderableType] = []
        growing: list[RenderableType] = []
        if self._reasoning:
            ended = final or bool(self._content)
            lines = (self._reasoning.rstrip("\n") if ended else self._reasoning).split("\n")
            last = [] if ended else [lines.pop()]
            done += map(_dim, lines)
            growing += map(_dim, last)
            self._reasoning = "".join(last)
        if self._content.strip():
            cut = len(self._content) if final else last_block(self._content)
            before, after = self._content[:cut], self._content[cut:]
            for text, parts in ((before, done), (after, growing)):
                if text.strip():
                    parts.extend(["", Markdown(text)] if self._printed or done else [Markdown(text)])
            self._content = after
        self._printed = self._printed or bool(done)
        self._draw(done, growing)

    def _draw(self, done: list[RenderableType], growing: list[RenderableType]) -> None:
        """Prints what is done over what was drawn, and draws below it the end of what grows."""
        lines = self._lines(growing)[-max(self._console.height - 1, 1) :]
        text = "".join(f"{line}\n" for line in self._lines(done)) + "\n".join(lines)
        self._console.file.write(f"{_SYNCHRONIZED}{self._up()}\x1b[J{text}{_SHOWN}")
        self._console.file.flush()
        self._drawn = [_columns(line) for line in lines]

    def _lines(self, parts: Iterable[RenderableType]) -> list[str]:
        with self._console.capture() as captured:
            for part in parts:
                self._console.print(part)
        return captured.get().removesuffix("\n").split("\n") if captured.get() else []

    def _up(self) -> str:
        """Moves the cursor to where the drawing began; a window made narrower has broken its lines anew."""
        width = max(self._console.width, 1)
        rows = sum(max(1, -(-columns // width)) for columns in self._drawn)
        return "\r" if rows <= 1 else f"\r\x1b[{rows - 1}A"


def _dim(text: str) -> RenderableType:
    from rich.text import Text

    return Text(text, style="dim")


def _columns(line: str) -> int:
    from rich.text import Text

    return Text.from_ansi(line).cell_len
