"""Handling of standard streams that are closed, contain invalid text, or lose their reader.

A command ends when the reader of stdout exits. When the reader of stderr exits, it continues and keeps its exit code,
since stderr carries only messages.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast


class IgnoringErrors:
    """A stream whose write errors are ignored."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes text; errors are ignored."""
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flushes the stream; errors are ignored."""
        with suppress(OSError):
            self._stream.flush()


@contextmanager
def usable_streams() -> Generator[None]:
    """Opens missing streams, and ignores write errors of stderr."""
    _open_missing()
    # Characters that the terminal cannot show are replaced; invalid bytes in stdin are an error of the command.
    for stream, errors in ((sys.stdout, "replace"), (sys.stderr, "replace"), (sys.stdin, "surrogateescape")):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors=errors)
    before = sys.stderr
    sys.stderr = cast("TextIO", IgnoringErrors(before))
    try:
        yield
    finally:
        sys.stderr = before


def discard_output() -> None:
    """Redirects stdout to the null device, since Python would fail when it flushes stdout at exit."""
    sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115  # stays open to the end


def _open_missing() -> None:
    """Opens the null device for streams that the shell closed (`<&-`), which are None in Python."""
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: PTH123, SIM115  # stay open to the end
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: PTH123, SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: PTH123, SIM115
