"""What callers give, as the plain data that templates may see: nothing with methods of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from ferrule._text.chat.budget import ITEM, MAX_BITS, MAX_DEPTH
from ferrule._validation import shown
from ferrule.errors import ChatTemplateError

MAX_CHARACTERS = 1 << 24
"""Of a conversation with its tools and documents, as Plain counts them."""


class _Place(NamedTuple):
    """Where a value is. It becomes words for an error alone: a key may be long, and stand above many values."""

    within: _Place | str
    key: object
    """Of a map, or the index in a list."""
    is_key: bool = False
    """Whether the key itself is meant, not what stands under it."""

    def __str__(self) -> str:
        return f"a key of {self.within}" if self.is_key else f"{self.within}[{shown(self.key)}]"


class Plain:
    """Copies values, and counts how much they hold."""

    def __init__(self) -> None:
        self.characters = 0
        """Of all copies so far, with ITEM for each value in them."""

    def copy(self, value: object, where: _Place | str, depth: int = 0) -> Any:
        """A value made of dicts, lists, tuples, strings, numbers and None alone.

        Maps, dataclasses and what has a `model_dump`, as pydantic's models and so OpenAI's messages have, are dicts.

        Raises ChatTemplateError that says where in the arguments something else is.
        """
        self.characters += ITEM + (len(value) if isinstance(value, str) else 0)
        if self.characters > MAX_CHARACTERS:
            raise ChatTemplateError(f"{where} is where the conversation exceeds {MAX_CHARACTERS} characters, the limit")
        if isinstance(value, str):
            return str.__str__(value)
        if value is None or isinstance(value, (bool, float)):
            return value if value is None or isinstance(value, bool) else float.__float__(value)
        if isinstance(value, int):
            if value.bit_length() > MAX_BITS:
                raise ChatTemplateError(f"{where} is {shown(value)}; the limit is {MAX_BITS} bits")
            return int.__int__(value)
        if depth == MAX_DEPTH:
            raise ChatTemplateError(f"{where} has more levels than the limit, {MAX_DEPTH}")
        if isinstance(value, (list, tuple)):
            values = enumerate(cast("Sequence[object]", value))
            copies = [self.copy(each, _Place(where, index), depth + 1) for index, each in values]
            return copies if isinstance(value, list) else tuple(copies)
        fields = _fields(value)
        if fields is None:
            raise ChatTemplateError(f"{where} is {shown(value)}; a template gets maps, lists, strings and numbers")
        return {
            self.copy(key, _Place(where, key, is_key=True), depth + 1): self.copy(each, _Place(where, key), depth + 1)
            for key, each in fields.items()
        }

    def maps(self, values: object, where: str, what: str = "maps") -> list[dict[str, Any]]:
        """The copy of a list of maps; messages of errors say `what` they are.

        Raises ChatTemplateError.
        """
        if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
            raise ChatTemplateError(f"{where} is {shown(values)}; it must be a list of {what}")
        copies: list[dict[str, Any]] = []
        for index, value in enumerate(cast("Sequence[object]", values)):
            if _fields(value) is None:
                raise ChatTemplateError(f"{where}[{index}] is {shown(value)}; it must be a map")
            copies.append(self.copy(value, f"{where}[{index}]"))
        return copies


def _fields(value: object) -> Mapping[object, object] | None:
    if isinstance(value, Mapping):
        return cast("Mapping[object, object]", value)
    if isinstance(value, type):
        return None
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    dump: Callable[[], object] | None = getattr(value, "model_dump", None)
    dumped = dump() if callable(dump) else None
    return cast("Mapping[object, object]", dumped) if isinstance(dumped, Mapping) else None
