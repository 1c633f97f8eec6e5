"""Status line on stderr, so that a command never waits silently."""

from __future__ import annotations

import shutil
import sys
from threading import Lock, Timer

from ferrule._cli.terminal import harmless, is_styled

DELAY = 0.5
"""Seconds after which a status line appears."""
_ERASE = "\r\x1b[K"


class StatusLine:
    """Line on stderr that says what a command is doing, shown if nothing else is for `DELAY` seconds.

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
        """Erases the line; it does not appear again."""
        if self._timer is None:
            return
        self._timer.cancel()
        with self._lock:
            self._timer = None
            if self._shown:
                self._shown = False
                self._stream.write(_ERASE)
                self._stream.flush()

    def __enter__(self) -> StatusLine:
        if not self._quiet and is_styled(self._stream):
            self._timer = Timer(DELAY, self._show)
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

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
