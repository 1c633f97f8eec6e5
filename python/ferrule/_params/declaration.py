"""Declarations of parameters: type, bounds and documentation of each parameter in one place.

A dataclass declares a parameter as `name: Annotated[type, bounds, Doc(text)] = default`. The signatures of `LLM` and
`AsyncLLM`, the options of the command line, the models of HTTP requests and the tables of the documentation are derived
from the declaration through `parameters`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from functools import cache, wraps
from types import NoneType
from typing import Annotated, Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, get_args, get_origin

from ferrule._validation import check_choice, check_flag, check_integer, check_number, integer_range, number_range

P = ParamSpec("P")
S = TypeVar("S")


class Bounds(Protocol):
    """Allowed values of a parameter."""

    @property
    def requirement(self) -> str:
        """Requirement as it reads after "must be"."""
        ...

    def check(self, field: str, value: object) -> object:
        """Returns the value, converted to the declared type.

        Raises InvalidParameterError.
        """
        ...


@dataclass(frozen=True)
class Integer:
    """Integers from `low` to `high`."""

    low: int
    high: int

    @property
    def requirement(self) -> str:
        """Requirement as it reads after "must be"."""
        return integer_range(self.low, self.high)

    def check(self, field: str, value: object) -> int:
        """Returns the value as an int.

        Raises InvalidParameterError.
        """
        return check_integer(field, value, self.low, self.high)


@dataclass(frozen=True)
class Number:
    """Finite numbers from `low` to `high`; `above_low` excludes `low`."""

    low: float
    high: float
    above_low: bool = False

    @property
    def requirement(self) -> str:
        """Requirement as it reads after "must be"."""
        return number_range(self.low, self.high, above_low=self.above_low)

    def check(self, field: str, value: object) -> float:
        """Returns the value as a float.

        Raises InvalidParameterError.
        """
        return check_number(field, value, self.low, self.high, above_low=self.above_low)


@dataclass(frozen=True)
class Flag:
    """True or False."""

    requirement = "True or False"

    def check(self, field: str, value: object) -> bool:
        """Returns the value.

        Raises InvalidParameterError.
        """
        return check_flag(field, value)


@dataclass(frozen=True)
class Choice:
    """Names to choose from."""

    names: tuple[str, ...]

    @property
    def requirement(self) -> str:
        """Requirement as it reads after "must be"."""
        return f"one of {', '.join(self.names)}"

    def check(self, field: str, value: object) -> str:
        """Returns the value.

        Raises InvalidParameterError.
        """
        return check_choice(field, value, self.names)


@dataclass(frozen=True)
class Doc:
    """Documentation of a parameter: effect and unit, in sentences that stand alone."""

    text: str


@dataclass(frozen=True)
class Parameter:
    """A declared parameter."""

    name: str
    """Name, in Python and in JSON."""
    type: Any
    """Type without the annotations."""
    default: object
    """Default value; `inspect.Parameter.empty` where the parameter is required."""
    bounds: Bounds | None
    """Bounds that every value except None must satisfy; None if the dataclass checks the parameter itself."""
    doc: str
    """Documentation, in sentences."""

    @property
    def optional(self) -> bool:
        """Whether the parameter may be None."""
        return NoneType in get_args(self.type)


@cache
def parameters(declaration: type) -> dict[str, Parameter]:
    """Returns the parameters that a dataclass declares, by name, in their order."""
    hints: dict[str, Any] = {}
    for owner in reversed(declaration.__mro__):
        hints |= inspect.get_annotations(owner, eval_str=True)
    found: dict[str, Parameter] = {}
    for field in fields(declaration):
        hint, metadata = hints[field.name], tuple[object, ...]()
        if get_origin(hint) is Annotated:
            hint, *metadata = get_args(hint)
        default: object = field.default
        if field.default is MISSING:
            default = inspect.Parameter.empty
            if field.default_factory is not MISSING:
                default = field.default_factory()
        bounds = next((each for each in metadata if isinstance(each, (Integer, Number, Flag, Choice))), None)
        doc = next((each.text for each in metadata if isinstance(each, Doc)), "")
        found[field.name] = Parameter(field.name, hint, default, bounds, doc)
    return found


def check_bounds(declared: object) -> None:
    """Checks and converts every parameter of a frozen dataclass that has bounds.

    Raises InvalidParameterError.
    """
    for parameter in parameters(type(declared)).values():
        value: object = getattr(declared, parameter.name)
        if parameter.bounds is not None and not (value is None and parameter.optional):
            object.__setattr__(declared, parameter.name, parameter.bounds.check(parameter.name, value))


def signature_of(
    declaration: Callable[P, object],
) -> Callable[[Callable[Concatenate[S, ...], None]], Callable[Concatenate[S, P], None]]:
    """Gives a constructor the signature of a dataclass, for type checkers, editors and `help`."""

    def decorate(constructor: Callable[Concatenate[S, ...], None]) -> Callable[Concatenate[S, P], None]:
        @wraps(constructor)
        def construct(self: S, *args: P.args, **options: P.kwargs) -> None:
            constructor(self, *args, **options)

        own = next(iter(inspect.signature(constructor).parameters.values()))
        types = parameters(cast("type", declaration))
        declared = inspect.signature(declaration).parameters.values()
        plain = [each.replace(annotation=types[each.name].type) for each in declared]
        cast("Any", construct).__signature__ = inspect.Signature([own, *plain], return_annotation=None)
        return construct

    return decorate
