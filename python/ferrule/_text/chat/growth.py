"""Upper bounds on result sizes of filters, tests and methods that can expand their operands.

Each bound is in units and depends on the operands only. It need not be tight, since it only prevents one step from
taking all memory. Operations that are not listed return at most ITEM times the size of their operands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from ferrule._text.chat.budget import ITEM, Size, breadth

Growth: TypeAlias = Callable[[Any, Size, Sequence[Any], Mapping[str, Any]], int]
"""Function that bounds a filter or test, from the value, the size of value and arguments, and the arguments."""
MethodGrowth: TypeAlias = Callable[[str, Sequence[Any]], int]
"""Function that bounds a string method."""

SLOW = ("lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip", "trim")
"""String methods that CPython runs in time proportional to the product of two lengths."""

_NESTED_FIELD = re.compile(r"\{[^}]*\{")
_DIGITS = re.compile(r"\d+")
_FAR_TOO_MUCH = 1 << 40


def formatted(text: str, size: Size) -> int:
    """Bounds `text % arguments` and `text.format(*arguments)` by all widths, and all arguments at every placeholder.

    `size` is the size of the arguments.
    """
    places = text.count("%") + text.count("{")
    widths = sum(int(digits) if len(digits) < 10 else _FAR_TOO_MUCH for digits in _DIGITS.findall(text))
    if "*" in text or _NESTED_FIELD.search(text):
        widths += size.numbers
    return len(text) + widths + ITEM * places * size.units


def _argument(arguments: Sequence[Any], named: Mapping[str, Any], position: int, name: str, default: object) -> Any:
    return arguments[position] if len(arguments) > position else named.get(name, default)


def _extent(value: object) -> int:
    """Returns the number of characters that a width can add."""
    if isinstance(value, int):
        return abs(value)
    return len(value) if isinstance(value, str) else 0


def _replaced(text: object, old: object, new: object) -> int:
    return len(text) + text.count(old) * _extent(new) if isinstance(text, str) and isinstance(old, str) else 0


def _center(value: Any, size: Size, arguments: Sequence[Any], named: Mapping[str, Any]) -> int:
    return _extent(_argument(arguments, named, 0, "width", 80))


def _format(value: Any, size: Size, arguments: Sequence[Any], named: Mapping[str, Any]) -> int:
    return formatted(str(value), size)


def _groups(value: Any, size: Size, arguments: Sequence[Any], named: Mapping[str, Any]) -> int:
    return ITEM * sum(map(_extent, (*arguments, *named.values())))


def _indent(value: Any, size: Size, arguments: Sequence[Any], named: Mapping[str, Any]) -> int:
    lines = 1 + (len(value.splitlines()) if isinstance(value, str) else size.units)
    return lines * _extent(_argument(arguments, named, 0, "width", 4))


def _join(value: Any, size: Size, arguments: Sequence[Any], named: Mapping[str, Any]) -> int:
    separator = _argument(arguments, named, 0, "d", "")
    return breadth(value) * (len(separator) if isinstance(separator, str) else size.units)


def _remainder(value: Any, size: Size, arguments: Sequence[Any], named: Mapping[str, Any]) -> int:
    return _format(value, size, arguments, named) if isinstance(value, str) else 0


def _replace(value: Any, size: Size, arguments: Sequence[Any], named: Mapping[str, Any]) -> int:
    return _replaced(value, _argument(arguments, named, 0, "old", ""), _argument(arguments, named, 1, "new", ""))


def _round(value: Any, size: Size, arguments: Sequence[Any], named: Mapping[str, Any]) -> int:
    # The filter multiplies by a power of ten, which repeats a string or list.
    if not isinstance(value, (int, float)):
        return _FAR_TOO_MUCH
    return _extent(_argument(arguments, named, 0, "precision", 0)) ** 2


def _sum(value: Any, size: Size, arguments: Sequence[Any], named: Mapping[str, Any]) -> int:
    start = _argument(arguments, named, 1, "start", 0)
    return 0 if isinstance(start, (int, float)) else breadth(value) * size.units


def _tojson(value: Any, size: Size, arguments: Sequence[Any], named: Mapping[str, Any]) -> int:
    indent = _extent(_argument(arguments, named, 1, "indent", 0))
    separators = _argument(arguments, named, 2, "separators", None) or ()
    return size.items * (indent * size.depth + sum(map(_extent, separators)))


FILTER_GROWTH: dict[str, Growth] = {
    "batch": _groups,
    "center": _center,
    "format": _format,
    "indent": _indent,
    "join": _join,
    "replace": _replace,
    "round": _round,
    "slice": _groups,
    "sum": _sum,
    "tojson": _tojson,
}

TEST_GROWTH: dict[str, Growth] = {"divisibleby": _remainder, "even": _remainder, "odd": _remainder}
"""Bounds `%`, which formats strings."""

METHOD_GROWTH: dict[str, MethodGrowth] = {
    "center": lambda text, arguments: sum(map(_extent, arguments)),
    "join": lambda text, arguments: len(text) * sum(map(breadth, arguments)),
    "ljust": lambda text, arguments: sum(map(_extent, arguments)),
    "replace": lambda text, arguments: _replaced(text, *(*arguments, "", "")[:2]),
    "rjust": lambda text, arguments: sum(map(_extent, arguments)),
    "zfill": lambda text, arguments: sum(map(_extent, arguments)),
}
