"""Copies values of callers to plain data for templates, so that templates get no objects with methods."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from ferrule._text.chat.budget import ITEM, MAX_BITS, MAX_DEPTH
from ferrule._validation import shown
from ferrule.errors import ChatTemplateError

MAX_CHARACTERS = 1 << 24
"""Maximum number of characters of a conversation with its tools and documents."""


class _Location(NamedTuple):
    """Location of a value in the conversation; it is formatted only for errors, since keys may be long."""

    within: _Location | str
    key: object
    """Key of a dict, or index of a list."""
    is_key: bool = False
    """Whether the location is the key itself rather than its value."""

    def __str__(self) -> str:
        return f"a key of {self.within}" if self.is_key else f"{self.within}[{shown(self.key)}]"


class Plain:
    """Copier of values, which counts their size."""

    def __init__(self) -> None:
        self.characters = 0
        """Number of characters of all copies, plus ITEM for each value."""

    def copy(self, value: object, where: _Location | str, depth: int = 0) -> Any:
        """Returns a copy that consists of dicts, lists, tuples, strings, numbers and None only.

        Mappings, dataclasses and objects with `model_dump` (pydantic's and OpenAI's models) become dicts.

        Raises ChatTemplateError with the location, for any other value.
        """
        self.characters += ITEM + (len(value) if isinstance(value, str) else 0)
        if self.characters > MAX_CHARACTERS:
            raise ChatTemplateError(f"the conversation exceeds {MAX_CHARACTERS} characters at {where}")
        if isinstance(value, str):
            return str.__str__(value)
        if value is None or isinstance(value, (bool, float)):
            return value if value is None or isinstance(value, bool) else float.__float__(value)
        if isinstance(value, int):
            if value.bit_length() > MAX_BITS:
                raise ChatTemplateError(f"{where} must have at most {MAX_BITS} bits, got {shown(value)}")
            return int.__int__(value)
        if depth == MAX_DEPTH:
            raise ChatTemplateError(f"{where} is nested too deeply; the maximum is {MAX_DEPTH} levels")
        if isinstance(value, (list, tuple)):
            values = enumerate(cast("Sequence[object]", value))
            copies = [self.copy(each, _Location(where, index), depth + 1) for index, each in values]
            return copies if isinstance(value, list) else tuple(copies)
        fields = fields_of(value)
        if fields is None:
            raise ChatTemplateError(f"{where} must be a dict, list, string, number, bool or None, got {shown(value)}")
        return {
            self.copy(key, _Location(where, key, is_key=True), depth + 1): self.copy(
                each, _Location(where, key), depth + 1
            )
            for key, each in fields.items()
        }

    def dicts(self, values: object, where: str, what: str = "dicts") -> list[dict[str, Any]]:
        """Returns a copy of a list of dicts; `what` names them in error messages.

        Raises ChatTemplateError.
        """
        if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
            raise ChatTemplateError(f"{where} must be a list of {what}, got {shown(values)}")
        copies: list[dict[str, Any]] = []
        for index, value in enumerate(cast("Sequence[object]", values)):
            if fields_of(value) is None:
                raise ChatTemplateError(f"{where}[{index}] must be a dict, got {shown(value)}")
            copies.append(self.copy(value, f"{where}[{index}]"))
        return copies


def fields_of(value: object) -> Mapping[object, object] | None:
    """Returns the fields of a mapping, a dataclass or an object with `model_dump`; None for other values."""
    if isinstance(value, Mapping):
        return cast("Mapping[object, object]", value)
    if isinstance(value, type):
        return None
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    dump: Callable[[], object] | None = getattr(value, "model_dump", None)
    dumped = dump() if callable(dump) else None
    return cast("Mapping[object, object]", dumped) if isinstance(dumped, Mapping) else None
