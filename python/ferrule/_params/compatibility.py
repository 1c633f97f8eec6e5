"""Parameters of vLLM, transformers and llama-cpp-python that ferrule renames, ignores, or does not support.

Setting such a parameter gives a warning or an error that says what to use instead, rather than a bare TypeError. The
other library's default value is accepted silently.
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
    """A parameter that has no effect in ferrule; a value other than the default gives a warning."""

    default: object
    reason: str
    """Reason why the parameter has no effect, with a replacement if there is one."""


@dataclass(frozen=True)
class Refused:
    """An unsupported parameter that would change the result; a value other than the default is an error."""

    default: object
    instead: str
    """Replacement or reason, which ends the message `NAME is not supported, got VALUE; ...`."""


@dataclass(frozen=True)
class Renamed:
    """A parameter that has another name in ferrule."""

    name: str
    """Name in ferrule."""
    convert: Callable[[Any], object] | None = None
    """Function that converts the value; None keeps the value."""


Rule: TypeAlias = Ignored | Refused | Renamed
Rules: TypeAlias = Mapping[str, Rule]


def translate(rules: Rules, given: Mapping[str, Any]) -> dict[str, Any]:
    """Applies the rules to keyword arguments and returns the arguments that remain, under ferrule's names.

    Raises InvalidParameterError for a refused argument. Issues a CompatibilityWarning for an ignored one.
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
                    raise InvalidParameterError(name, value, f"left out with {other}; both mean the same")
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
    """Raises a TypeError for the first keyword argument that is not `known`, with the most similar known name."""
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f". Did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{caller}() got an unexpected keyword argument {name!r}{hint}")


def refuse_attribute(owner: object, name: str, hints: Mapping[str, str]) -> NoReturn:
    """Raises an AttributeError for a class or object; for an attribute of vLLM it has a hint."""
    kind = owner.__name__ if isinstance(owner, type) else type(owner).__name__
    hint = hints.get(name)
    if hint is None:
        described = f"type object {kind!r}" if isinstance(owner, type) else f"{kind!r} object"
        raise AttributeError(f"{described} has no attribute {name!r}", name=name, obj=owner)
    raise AttributeError(f"{kind}.{name} is not supported; {hint}", name=name, obj=owner)


def _level_of_caller() -> int:
    """Returns the `stacklevel` that makes a warning point to the code that called this package."""
    package = __name__.partition(".")[0]
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame, level = frame.f_back, level + 1
    return level
