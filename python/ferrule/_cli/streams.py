"""The streams that a command was started with: missing, with what is no text, or with nobody behind them any more.

What a command makes goes to stdout, and it ends where nobody reads that. What it says on stderr is about the work,
which goes on without listeners: a server's, a batch's, and with the exit code that it would have had.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast


class Unheard:
    """A stream to which writing never fails."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes, or does not."""
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Likewise."""
        with suppress(OSError):
            self._stream.flush()


@contextmanager
def usable_streams() -> Generator[None]:
    """Opens what is missing, and keeps stderr's end from being the command's."""
    _open_missing()
    # What the terminal cannot show must not end the program, and bytes that are no text get an error of ours.
    for stream, errors in ((sys.stdout, "replace"), (sys.stderr, "replace"), (sys.stdin, "surrogateescape")):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors=errors)
    before = sys.stderr
    sys.stderr = cast("TextIO", Unheard(before))
    try:
        yield
    finally:
        sys.stderr = before


def discard_output() -> None:
    """Python flushes stdout once more at exit: gives it somewhere to go."""
    sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115  # stays open to the end


def _open_missing() -> None:
    """Python has None for a stream that the shell closed (`<&-`)."""
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: PTH123, SIM115  # stay open to the end
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: PTH123, SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: PTH123, SIM115
