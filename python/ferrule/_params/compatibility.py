"""Parameters of vLLM, transformers and llama-cpp-python that ferrule names otherwise, ignores, or does not support.

A program that sets one of them gets a warning or an error that says what to use instead, and no bare TypeError. A value
that equals the other library's default passes silently.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import wraps
from typing import Any, NoReturn, ParamSpec, TypeAlias, TypeVar, cast

from ferrule.errors import CompatibilityWarning, InvalidParameterError

C = TypeVar("C")
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Ignored:
    """A parameter that has no effect here; other values than the default get a warning."""

    default: object
    reason: str
    """Reason that it has no effect, and the replacement."""


@dataclass(frozen=True)
class Refused:
    """A parameter that would change the result and is not supported; other values than the default are an error."""

    default: object
    instead: str
    """Replacement, as the text after "must be left out; "."""


@dataclass(frozen=True)
class Renamed:
    """A parameter that has another name here."""

    name: str
    convert: Callable[[Any], object] | None = None
    """Converts the value; None keeps it."""


Rule: TypeAlias = Ignored | Refused | Renamed
Rules: TypeAlias = Mapping[str, Rule]


def translate(rules: Rules, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns keyword arguments without those that `rules` handle, and with renamed ones under their own name.

    Raises InvalidParameterError for a refused one; warns of an ignored one.
    """
    kept: dict[str, Any] = {}
    for name, value in given.items():
        match rules.get(name):
            case None:
                kept.setdefault(name, value)
            case Ignored(default, reason):
                if value is not None and value != default:
                    message = f"{name} has no effect: {reason}"
                    warnings.warn(message, CompatibilityWarning, stacklevel=_level_of_caller())
            case Refused(default, instead):
                if value is not None and value != default:
                    raise InvalidParameterError(name, value, f"left out; {instead}")
            case Renamed(other, convert):
                converted = value if convert is None else convert(value)
                if given.get(other) is None:
                    kept[other] = converted
                elif converted not in (None, "auto", given[other]):
                    raise InvalidParameterError(name, value, f"left out with {other}, which means the same")
    return kept


def compatible(rules: Rules) -> Callable[[type[C]], type[C]]:
    """Applies rules to the arguments of a class's constructor."""

    def decorate(cls: type[C]) -> type[C]:
        construct = cast("Any", cls).__init__

        @wraps(construct)
        def __init__(self: C, *args: Any, **given: Any) -> None:  # noqa: N807  # it becomes the class's
            construct(self, *args, **translate(rules, given))

        cast("Any", cls).__init__ = __init__
        return cls

    return decorate


def compatible_call(rules: Rules) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Applies rules to the keyword arguments of a function."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **given: P.kwargs) -> R:
            return cast("Callable[..., R]", function)(*args, **translate(rules, given))

        return call

    return decorate


def refuse_unknown(caller: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raises the TypeError of the first keyword argument that is not `known`, with the nearest known name."""
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f". Did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{caller}() got an unexpected keyword argument {name!r}{hint}")


def refuse_attribute(owner: object, name: str, hints: Mapping[str, str]) -> NoReturn:
    """Raises the AttributeError of a class or object, with a hint where the attribute is one of vLLM's."""
    kind = owner.__name__ if isinstance(owner, type) else type(owner).__name__
    hint = hints.get(name)
    if hint is None:
        has_not = f"type object {kind!r}" if isinstance(owner, type) else f"{kind!r} object"
        raise AttributeError(f"{has_not} has no attribute {name!r}", name=name, obj=owner)
    raise AttributeError(f"{kind}.{name} is not supported; {hint}", name=name, obj=owner)


def _level_of_caller() -> int:
    """Returns the `stacklevel` with which a warning of the calling function names the code that called the package."""
    package = __name__.partition(".")[0]
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame, level = frame.f_back, level + 1
    return level
