"""Durations of Ollama's API: a number of seconds, or a text such as `5m` or `1h30m`."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from ferrule._validation import shown

_NUMBER = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
# Go writes microseconds with either of two characters, U+00B5 and U+03BC.
_TEXT = re.compile(rf"[+-]?(?:{_NUMBER}|(?:{_NUMBER}(?:ns|us|\u00b5s|\u03bcs|ms|s|m|h))+)")


def _check_duration(value: float | str) -> float | str:
    """Checks the notation of Go's `time.ParseDuration`; a text without a unit counts seconds."""
    if isinstance(value, str) and _TEXT.fullmatch(value) is None:
        message = "must be a number of seconds or a duration such as '5m' or '1h30m', got {value}"
        raise PydanticCustomError("duration", message, {"value": shown(value)})
    return value


Duration = Annotated[float | str, AfterValidator(_check_duration)]
"""Seconds, or a text of numbers with units from `ns` to `h`; negative means without end."""
