"""Functions and filters that transformers adds to Jinja templates."""

from __future__ import annotations

import json
from datetime import datetime

import jinja2
import jinja2.utils

from ferrule._text.chat.budget import BUDGET, breadth

PAIRS = 256
"""Pairs of a dict that may cost as much as one unit each: keys that are numbers can be made to collide."""


def tojson(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002, RUF100  # templates pass it by position too
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002, RUF100
) -> str:
    """JSON for models: Jinja's own escapes HTML, which they have never seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: object) -> None:
    """Refuses the conversation."""
    raise jinja2.TemplateError(str(message))


def strftime_now(form: str) -> str:
    """The time here."""
    return datetime.now().strftime(form)


def make_dict(*args: object, **kwargs: object) -> dict[object, object]:
    """Replacement of `dict` in templates: a function, since the class has methods."""
    BUDGET.get().spend(sum(map(breadth, args)) ** 2 // PAIRS**2)
    return dict(*args, **kwargs)  # type: ignore[call-overload]  # a wrong argument is the template's own error


class Namespace(jinja2.utils.Namespace):
    """Variables that survive the loop they are set in. Names with an underscore in front would be Python's own."""

    def __init__(*args: object, **kwargs: object) -> None:  # so that `self` can be a variable's name
        self, given = args[0], dict(*args[1:], **kwargs)  # type: ignore[call-overload]
        for name in given:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, given)  # type: ignore[arg-type]

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        # Jinja's shows what is in it, itself perhaps.
        return "<Namespace>"


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no {name!r}: no name in it begins with an underscore")


FUNCTIONS: dict[str, object] = {
    "dict": make_dict,
    "namespace": Namespace,
    "raise_exception": raise_exception,
    "strftime_now": strftime_now,
}
