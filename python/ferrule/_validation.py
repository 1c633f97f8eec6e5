"""Validation of single values. Each error has the field, the requirement and the value."""

import math
import numbers
import operator

from ferrule.errors import InvalidParameterError, shown

__all__ = ["check_choice", "check_flag", "check_integer", "check_number", "integer_range", "number_range", "shown"]


def integer_range(low: int, high: int) -> str:
    """Describes the integers from `low` to `high`, as it reads after "must be"."""
    return f"an integer from {low} to {high}"


def number_range(low: float, high: float, *, above_low: bool = False) -> str:
    """Describes the numbers from `low` (excluded with `above_low`) to `high`, as it reads after "must be"."""
    return f"a number > {low:g} and <= {high:g}" if above_low else f"a number from {low:g} to {high:g}"


def check_integer(field: str, value: object, low: int, high: int) -> int:
    """Returns `value` as an int if it is an integer from `low` to `high`.

    Raises InvalidParameterError.
    """
    if not isinstance(value, bool):
        try:
            integer = operator.index(value)  # type: ignore[arg-type]  # raises TypeError for other types
        except TypeError:
            raise InvalidParameterError(field, value, integer_range(low, high)) from None
        if low <= integer <= high:
            return integer
    raise InvalidParameterError(field, value, integer_range(low, high))


def check_number(field: str, value: object, low: float, high: float, *, above_low: bool = False) -> float:
    """Returns `value` as a float if it is finite, at least `low` (more with `above_low`) and at most `high`.

    Raises InvalidParameterError.
    """
    requirement = number_range(low, high, above_low=above_low)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidParameterError(field, value, requirement)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not low <= number <= high or (above_low and number == low):
        raise InvalidParameterError(field, value, requirement)
    return number


def check_flag(field: str, value: object) -> bool:
    """Returns `value` if it is True or False.

    Raises InvalidParameterError.
    """
    if not isinstance(value, bool):
        raise InvalidParameterError(field, value, "True or False")
    return value


def check_choice(field: str, value: object, choices: tuple[str, ...]) -> str:
    """Returns `value` if it is one of `choices`.

    Raises InvalidParameterError.
    """
    if not isinstance(value, str) or value not in choices:
        raise InvalidParameterError(field, value, f"one of {', '.join(choices)}")
    return value
