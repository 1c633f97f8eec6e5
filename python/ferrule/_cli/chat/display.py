"""Display of an answer while it is generated.

On a terminal the answer is rendered as Markdown. Complete blocks are printed once. The last block, which still grows,
is redrawn in place below them and is never higher than the screen. Text that has scrolled off the screen is therefore
never drawn again, and the scrollback contains the answer once.
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
"""Minimum seconds between two redraws. The interval is also at least four times the duration of the last redraw,
because highlighting long code blocks is slow."""
_SYNCHRONIZED, _SHOWN = "\x1b[?2026h", "\x1b[?2026l"
"""Escape sequences of synchronized output; a terminal shows everything between them at once, or ignores them."""


class Display(Protocol):
    """Display of one answer."""

    def add(self, delta: Delta) -> None:
        """Shows a delta."""
        ...

    def close(self) -> None:
        """Shows the rest of the answer and ends the line."""
        ...


def display(*, plain: bool) -> Display:
    """Creates the display of an answer: rendered Markdown on a terminal without `plain`, else plain text."""
    if plain or not is_styled(sys.stdout):
        return PlainDisplay(sys.stdout)
    return MarkdownDisplay()


class PlainDisplay:
    """Display as plain text. Reasoning is shown on a terminal only, so a pipe receives just the answer."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._reasoned = False
        self._answered = False

    def add(self, delta: Delta) -> None:
        """Implements `Display.add`."""
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
        """Implements `Display.close`. An answer without text is an empty line; a failed answer prints none."""
        if self._answered or self._reasoned:
            self._stream.write("\n")
            self._stream.flush()


class MarkdownDisplay:
    """Display as rendered Markdown, with dimmed reasoning."""

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console

        # soft_wrap stays off, so that rich wraps lines and their number is known.
        self._console = Console(highlight=False, markup=False, emoji=False) if console is None else console
        self._reasoning = ""
        """Text of the blocks that are not yet complete, and so may be redrawn."""
        self._content = ""
        self._printed = False
        self._drawn: list[int] = []
        """Widths of the lines that will be redrawn, in columns."""
        self._drawn_at = 0.0
        self._interval = 0.0
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._closed = False
        self._draw([], self._lines(_dim("...")))

    def add(self, delta: Delta) -> None:
        """Implements `Display.add`."""
        with self._lock:
            self._reasoning += harmless(delta.reasoning)
            self._content += harmless(delta.content)
            wait = self._drawn_at + self._interval - time.monotonic()
            if wait <= 0:
                self._show()
            elif self._timer is None:  # the text before a pause must not wait for the next delta
                self._timer = threading.Timer(wait, self._show_late)
                self._timer.daemon = True
                self._timer.start()

    def close(self) -> None:
        """Implements `Display.close`."""
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
        # Each block is rendered separately, so that the result does not depend on how the text was split into deltas.
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
        """Prints complete blocks in place of the drawn lines, and draws the growing block below them."""
        growing = growing[-max(self._console.height - 1, 1) :]
        text = "".join(f"{line}\n" for line in done) + "\n".join(growing)
        self._console.file.write(f"{_SYNCHRONIZED}{self._up()}\x1b[J{text}{_SHOWN}")
        self._console.file.flush()
        self._drawn = [_columns(line) for line in growing]

    def _lines(self, shown: RenderableType) -> list[str]:
        with self._console.capture() as captured:
            self._console.print(shown)
        # rich pads lines with spaces, which a user would copy with the text.
        return [line.rstrip(" ") for line in captured.get().removesuffix("\n").split("\n")]

    def _up(self) -> str:
        """Returns the escape sequence to the start of the drawn lines, which a narrower window has wrapped again."""
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
