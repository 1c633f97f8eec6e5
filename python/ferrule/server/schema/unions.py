"""Discriminators of fields that accept several JSON types.

With a discriminator pydantic validates the one branch that fits, so that an error names the item that is wrong and not
the branches that do not apply. Tags appear among the parts of an error's location: `<...>` keeps them apart from the
names of fields.
"""

from __future__ import annotations

from typing import Annotated, Any, cast

from pydantic import Discriminator, Tag


def str_or_list(value: object) -> str:
    """Tag of a field that is a string or a list."""
    return "<str>" if isinstance(value, str) else "<list>"


def str_or_object(value: object) -> str:
    """Tag of a field that is a string or an object."""
    return "<str>" if isinstance(value, str) else "<object>"


def str_list_or_object(value: object) -> str:
    """Tag of a field that is a string, a list or an object."""
    return "<list>" if isinstance(value, list) else str_or_object(value)


def prompt_kind(value: object) -> str:
    """Tag of a prompt: a string, token ids, or a list of either. The first item decides what a list holds."""
    if not isinstance(value, list) or not value:
        return "<strs>" if isinstance(value, list) else "<str>"
    first: object = cast("list[object]", value)[0]
    return "<lists>" if isinstance(first, list) else "<ids>" if isinstance(first, int) else "<strs>"


StrOrObject = Annotated[
    Annotated[str, Tag("<str>")] | Annotated[dict[str, Any], Tag("<object>")], Discriminator(str_or_object)
]
