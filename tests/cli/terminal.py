"""Terminals for tests: a pseudoterminal that runs programs, and a screen that renders their output."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

TESTS = Path(__file__).parent.parent
SECONDS = 180.0
"""Timeout for expected output, in seconds."""
_WRITTEN = re.compile(r"\x1b\[(\??)([\d;]*)([A-Za-z])|([^\x1b])", re.DOTALL)


class Terminal:
    """A pseudoterminal with a process; its output is read as it arrives."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, size: tuple[int, int] = (24, 80)
    ) -> None:
        self._controller, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        # The process uses the terminal's size, not the one that a shell or a test runner exported.
        inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            command,
            cwd=TESTS,
            env={**inherited, "TERM": "xterm-256color", **(environment or {})},
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
        )
        os.close(terminal)
        self._unread = ""
        self.written = ""
        """All output so far."""

    def read_until(self, text: str) -> str:
        """Returns the output up to and including a text."""
        deadline = time.monotonic() + SECONDS
        while text not in self._unread:
            assert self._receive(max(deadline - time.monotonic(), 0)), f"no {text!r} in {self._unread!r}"
        before, _, self._unread = self._unread.partition(text)
        return before + text

    def _receive(self, seconds: float) -> bool:
        """Reads output that arrives within some seconds, and returns whether there was any."""
        if not select.select([self._controller], [], [], seconds)[0]:
            return False
        new = os.read(self._controller, 10_000).decode(errors="replace")
        self._unread += new
        self.written += new
        assert "Traceback" not in self.written, self.written
        return True

    def send(self, text: str) -> None:
        """Writes keystrokes to the process."""
        os.write(self._controller, text.encode())

    def interrupt(self) -> None:
        """Sends Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def interrupt_until(self, text: str) -> None:
        """Repeats Ctrl-C until the output has a text.

        Between its prompt and its wait for keys, readline notes a signal and handles it with the next one.
        """
        self._repeat_until(self.interrupt, text)

    def send_until(self, keys: str, text: str) -> None:
        """Repeats keystrokes until the output has a text: a late Ctrl-C discards the line that has been typed."""
        self._repeat_until(lambda: self.send(keys), text)

    def _repeat_until(self, act: Callable[[], None], text: str) -> None:
        deadline = time.monotonic() + SECONDS
        while text not in self._unread:
            assert time.monotonic() < deadline, f"no {text!r} in {self._unread!r}"
            act()
            patience = time.monotonic() + 3.0
            while text not in self._unread and (left := patience - time.monotonic()) > 0:
                self._receive(left)
        self.read_until(text)

    def end(self) -> int:
        """Waits for the process to end and returns its exit code."""
        while True:
            try:
                if not select.select([self._controller], [], [], SECONDS)[0]:
                    break
                new = os.read(self._controller, 10_000).decode(errors="replace")
            except OSError:  # its end of the terminal is closed
                break
            self.written += new
        return self.process.wait(SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._controller)


class Screen:
    """Visible text of terminal output: the scrollback and the screen.

    It supports the escape sequences of the commands (colours, cursor up, hidden cursor, clear the line, or the rest of
    the line or of the screen); others are an error.
    """

    def __init__(self, height: int, width: int) -> None:
        self.height, self.width = height, width
        self.lines: list[str] = [""]
        self.row = self.column = 0

    def write(self, text: str) -> None:
        """Renders a text, including escape sequences."""
        assert "".join(match.group() for match in _WRITTEN.finditer(text)) == text, repr(text)
        for match in _WRITTEN.finditer(text):
            private, number, letter, character = match.groups()
            if character is not None:
                self._put(character)
            elif letter == "A":
                self.row -= int(number or 1)
                assert self.row >= len(self.lines) - self.height, "the cursor left the screen"
            elif letter == "K":
                self.lines[self.row] = "" if number == "2" else self.lines[self.row][: self.column]
            elif letter == "J":
                self.lines[self.row] = self.lines[self.row][: self.column]
                del self.lines[self.row + 1 :]
            else:
                assert letter == "m" or (private and number in ("25", "2026")), match.group()

    def _put(self, character: str) -> None:
        if character == "\r":
            self.column = 0
        elif character == "\n":
            self.row, self.column = self.row + 1, 0
            if self.row == len(self.lines):
                self.lines.append("")
        else:
            assert self.column < self.width, "a line is broken by the terminal"
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + character + line[self.column + 1 :]
            self.column += 1

    def text(self) -> str:
        """Returns all lines without trailing spaces."""
        return "\n".join(line.rstrip() for line in self.lines)
