"""Functions and filters that transformers adds to Jinja templates."""

from __future__ import annotations

import json
from datetime import datetime

import jinja2
import jinja2.utils

from ferrule._text.chat.budget import BUDGET, breadth

PAIRS = 256
"""Number of pairs of a dict up to which a pair costs one unit; beyond it, colliding hashes can take quadratic time."""


def tojson(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002, RUF100  # templates pass it by position too
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002, RUF100
) -> str:
    """Returns a value as JSON. Unlike Jinja's filter it does not escape HTML; models are not trained on escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: object) -> None:
    """Raises an error with a message of the template, which rejects the conversation."""
    raise jinja2.TemplateError(str(message))


def strftime_now(form: str) -> str:
    """Returns the local time in this format."""
    return datetime.now().strftime(form)


def make_dict(*args: object, **kwargs: object) -> dict[object, object]:
    """Creates a dict. Templates get this function instead of the class `dict`, whose methods they must not call."""
    BUDGET.get().spend(sum(map(breadth, args)) ** 2 // PAIRS**2)
    return dict(*args, **kwargs)  # type: ignore[call-overload]  # a wrong argument is the template's own error


class Namespace(jinja2.utils.Namespace):
    """Object for variables that outlive a loop. Their names must not begin with an underscore."""

    def __init__(*args: object, **kwargs: object) -> None:  # so that `self` can be a variable's name
        self, given = args[0], dict(*args[1:], **kwargs)  # type: ignore[call-overload]
        for name in given:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, given)  # type: ignore[arg-type]

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        # The representation of the base class shows all values, and a namespace may contain itself.
        return "<Namespace>"


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r} must not begin with an underscore")


FUNCTIONS: dict[str, object] = {
    "dict": make_dict,
    "namespace": Namespace,
    "raise_exception": raise_exception,
    "strftime_now": strftime_now,
}
