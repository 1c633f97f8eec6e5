"""Which of its forms a field has, so that what is wrong within is named as it is, and not as what it is not.

pydantic puts the form among the names of what is wrong: it must be none that a request has.
"""

from __future__ import annotations

from typing import cast


def text_or_list(value: object) -> str:
    """A text, or a list."""
    return "<text>" if isinstance(value, str) else "<list>"


def text_or_object(value: object) -> str:
    """A text, or an object."""
    return "<text>" if isinstance(value, str) else "<object>"


def text_list_or_object(value: object) -> str:
    """Any of them."""
    return "<list>" if isinstance(value, list) else text_or_object(value)


def texts_or_ids(value: object) -> str:
    """A text, token ids, or a list of either, as prompts are; a list is what its first is."""
    if not isinstance(value, list) or not value:
        return "<texts>" if isinstance(value, list) else "<text>"
    first: object = cast("list[object]", value)[0]
    return "<lists>" if isinstance(first, list) else "<ids>" if isinstance(first, int) else "<texts>"
