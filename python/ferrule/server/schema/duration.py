"""Durations of Ollama's API: a number of seconds, or a text such as `5m` or `1h30m`."""

from __future__ import annotations

import math
import re
from typing import Annotated

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from ferrule._validation import shown
from ferrule.server.settings import MAX_KEEP_ALIVE

_NUMBER = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
# Go writes microseconds with either of two characters, U+00B5 and U+03BC.
_UNITS = {"ns": 1e-9, "us": 1e-6, "\u00b5s": 1e-6, "\u03bcs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(rf"({_NUMBER})(ns|us|\u00b5s|\u03bcs|ms|s|m|h)")
_TEXT = re.compile(rf"[+-]?(?:{_NUMBER}|(?:{_NUMBER}(?:ns|us|\u00b5s|\u03bcs|ms|s|m|h))+)")


def _check_duration(value: float | str) -> float | str:
    """Checks the notation of Go's `time.ParseDuration`; a text without a unit counts seconds."""
    if isinstance(value, str) and _TEXT.fullmatch(value) is None:
        message = "must be a number of seconds or a duration such as '5m' or '1h30m', got {value}"
        raise PydanticCustomError("duration", message, {"value": shown(value)})
    return value


def seconds(value: float | str) -> float:
    """Returns a valid duration in seconds; infinity for a negative or very long one."""
    if isinstance(value, str):
        parts = _PART.findall(value)
        size = sum(float(number) * _UNITS[unit] for number, unit in parts) if parts else abs(float(value))
        value = -size if value.startswith("-") else size
    return value if 0 <= value <= MAX_KEEP_ALIVE else math.inf


Duration = Annotated[float | str, AfterValidator(_check_duration)]
"""Seconds, or a text of numbers with units from `ns` to `h`; negative means without end."""
