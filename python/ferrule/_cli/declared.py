"""Command line options derived from declared parameters: type, choices and help text come from the declaration."""

from __future__ import annotations

import inspect
import re
from typing import Any, TypeAlias, cast

import click

from ferrule._params.declaration import Bounds, Choice, Flag, Integer, Number, Parameter

Row: TypeAlias = tuple[tuple[str, ...], dict[str, Any]]
"""Names of an option, and keyword arguments for click.option."""
UNSET = " None: "
"""Separator in a parameter's documentation, before the effect of None, which is the effect of an absent option."""
WHETHER = "Whether to "
"""Beginning of the documentation of a flag."""


class Bounded(click.ParamType):  # pyright: ignore[reportMissingTypeArgument]  # not generic before click 8.3
    """Numbers within declared bounds; other values raise InvalidParameterError."""

    def __init__(self, bounds: Integer | Number) -> None:
        self.name = "integer" if isinstance(bounds, Integer) else "float"
        self._bounds = bounds

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Converts text to a number and checks its bounds."""
        try:
            number: object = int(value) if isinstance(self._bounds, Integer) else float(value)
        except ValueError:
            number = value
        return self._bounds.check("value" if param is None else str(param.name), number)


def row(parameter: Parameter, option: str = "", *, effect: str = "", unset: str = "", **settings: Any) -> Row:
    """Returns the option of a parameter, `--parameter-name` unless `option` is given.

    A flag whose default is True becomes `--no-parameter-name`. In the help text, `effect` replaces the documentation
    and `unset` the effect of an absent option. `settings` are further keyword arguments of click.option.
    """
    doc, _, declared_unset = parameter.doc.partition(UNSET)
    if isinstance(parameter.bounds, Flag):
        return _flag(parameter, option, effect or _imperative(_plain(doc), negated=parameter.default is True))
    if not unset and settings.get("default") is None:
        unset = _plain(declared_unset)
    default = f": {unset}" if unset else _shown_default(settings.get("default", parameter.default))
    repeated = " May be repeated." if settings.get("multiple") else ""
    text = f"{effect or _plain(doc)} (default{default}).{repeated}"
    return (option or f"--{_dashed(parameter.name)}", parameter.name), {
        **_kind(parameter.bounds),
        "help": text,
        **settings,
    }


def _flag(parameter: Parameter, option: str, effect: str) -> Row:
    name = _dashed(parameter.name)
    if parameter.default is True:
        return (option or f"--no-{name}", parameter.name), {"flag_value": False, "default": True, "help": f"{effect}."}
    return (option or f"--{name}", parameter.name), {"is_flag": True, "help": f"{effect}."}


def _imperative(doc: str, *, negated: bool) -> str:
    """Turns the documentation of a flag into its effect: "Whether to continue" becomes "Continue"."""
    effect = doc.removeprefix(WHETHER)
    return f"Do not {effect}" if negated else f"{effect[:1].upper()}{effect[1:]}"


def _kind(bounds: Bounds | None) -> dict[str, Any]:
    match bounds:
        case Integer() | Number():
            return {"type": Bounded(bounds)}
        case Choice():
            return {"type": click.Choice(bounds.names)}
        case _:
            return {}


def _plain(doc: str) -> str:
    """Writes parameters as options and other code without backticks, and removes the last period."""
    text = re.sub(r"`(\w+)`", lambda found: f"--{_dashed(found[1])}" if "_" in found[1] else found[1], doc)
    return text.rstrip(".")


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _shown_default(value: object) -> str:
    if value is None or value is inspect.Parameter.empty or value == ():
        return ": none"
    if isinstance(value, tuple):
        return f": {', '.join(map(repr, cast('tuple[object, ...]', value)))}"
    return f" {value:g}" if isinstance(value, float) else f" {value}"
