"""Checks of single numbers that callers give: each error names the field, the value and the limit."""

import math
import numbers
import operator

from ferrule.errors import InvalidParameterError, shown


def check_whole(field: str, value: object, low: int, high: int) -> int:
    """`value` as an int, if it is a whole number from `low` to `high`."""
    limit = f"a whole number from {low} to {high}"
    if isinstance(value, bool):
        raise InvalidParameterError(f"{field} is {value}; it must be {limit}")
    try:
        whole = operator.index(value)  # type: ignore[arg-type]  # what is not an index raises TypeError
    except TypeError:
        raise InvalidParameterError(f"{field} is {shown(value)}; it must be {limit}") from None
    if not low <= whole <= high:
        raise InvalidParameterError(f"{field} is {shown(whole)}; it must be {limit}")
    return whole


def check_number(field: str, value: object, low: float, high: float, *, above_low: bool = False) -> float:
    """`value` as a float, if it is finite, from `low` (or above it) and up to `high`."""
    limit = f"a number above {low:g} and up to {high:g}" if above_low else f"a number from {low:g} to {high:g}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidParameterError(f"{field} is {shown(value)}; it must be {limit}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not low <= number <= high or (above_low and number == low):
        raise InvalidParameterError(f"{field} is {shown(value)}; it must be {limit}")
    return number
