"""Status line on stderr, so that a command never waits silently."""

from __future__ import annotations

import shutil
import sys
import time
from threading import Lock, Timer

from ferrule._cli.terminal import harmless, is_styled

DELAY = 0.5
"""Seconds without output on the terminal after which a status line appears."""
_ERASE = "\r\x1b[K"


class Silence:
    """Time since a command last wrote to the terminal. All status lines share it, so that short steps cannot add up."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def end(self) -> None:
        """Starts the time again, since the command writes to the terminal or the user has entered something."""
        self._start = time.monotonic()

    def remaining(self) -> float:
        """Returns the number of seconds until a status line must appear."""
        return max(self._start + DELAY - time.monotonic(), 0.0)


SILENCE = Silence()
"""Silence of the running command."""


class StatusLine:
    """Line on stderr that says what a command is doing, shown once the command was silent for `DELAY` seconds.

    It is a context manager that erases the line at its end, also after an error or Ctrl-C. Code that writes to the
    terminal before calls `clear` first. Nothing is written to a stream that is not a terminal with cursor movement, and
    nothing with `quiet`.
    """

    def __init__(self, text: str, *, quiet: bool = False) -> None:
        self._stream = sys.stderr
        self._quiet = quiet
        self._text = text
        self._lock = Lock()
        self._timer: Timer | None = None
        """Timer of the first appearance; None before the start and once the line is cleared."""
        self._shown = False

    def update(self, text: str) -> None:
        """Replaces the text. The line still appears only after the delay."""
        with self._lock:
            self._text = text
            if self._shown:
                self._draw()

    def read_tokens(self, done: int, total: int) -> None:
        """Shows the number of prompt tokens that the model has read; a progress callback of `LLM.stream`."""
        self.update(f"reading the prompt: {done:,} of {total:,} tokens")

    def clear(self) -> None:
        """Erases the line for other output; it does not appear again."""
        if self._timer is not None:
            self._erase(self._timer)
            SILENCE.end()

    def __enter__(self) -> StatusLine:
        if not self._quiet and is_styled(self._stream):
            self._timer = Timer(SILENCE.remaining(), self._show)
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Erases the line. The next one takes its place at once, since nothing else was written."""
        if self._timer is not None:
            self._erase(self._timer)

    def _erase(self, timer: Timer) -> None:
        timer.cancel()
        with self._lock:
            self._timer = None
            if self._shown:
                self._shown = False
                self._stream.write(_ERASE)
                self._stream.flush()

    def _show(self) -> None:
        with self._lock:
            if self._timer is not None:  # not cleared while the timer ran out
                self._shown = True
                self._draw()

    def _draw(self) -> None:
        """Draws the text on one line and returns the cursor to its start, so that other messages replace it."""
        from rich.cells import cell_len, set_cell_size

        width = max(shutil.get_terminal_size().columns - 1, 0)
        text = harmless(self._text)
        self._stream.write(f"{_ERASE}{set_cell_size(text, min(cell_len(text), width))}\r")
        self._stream.flush()
