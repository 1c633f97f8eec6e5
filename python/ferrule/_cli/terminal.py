"""Properties of terminals, and text that is safe to print."""

from __future__ import annotations

import os
from typing import TextIO

_PICTURES = {code: 0x2400 + code for code in range(0x20) if code not in (0x09, 0x0A)}
_SHOWN = {**_PICTURES, 0x0D: None, 0x7F: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}


def harmless(text: str) -> str:
    """Removes control characters from a model's text; they could rename windows or write to the clipboard."""
    return text.translate(_SHOWN)


def is_styled(stream: TextIO) -> bool:
    """Whether a stream is a terminal that supports colors and cursor movement (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "") not in ("", "dumb")
