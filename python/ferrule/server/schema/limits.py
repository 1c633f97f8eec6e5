"""Lists and mappings with a maximum size.

Validation of a list stops at the first invalid item: an error for each of a million items would take gigabytes and
block the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, TypeVar, cast

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from ferrule.server.schema.unions import str_or_list

MAX_FIELDS = 256
"""Maximum number of fields of an object with named fields."""
MAX_ITEMS = 1 << 14
"""Maximum number of items of a list, and of entries of a mapping; token ids have `MAX_TOKEN_IDS`."""
MAX_TOOLS = 1024
MAX_TOKEN_IDS = 1 << 20
"""Maximum number of token ids in a list: the length of the longest contexts."""
T = TypeVar("T")
BoundedList = Annotated[list[T], Field(fail_fast=True, max_length=MAX_ITEMS)]
ToolList = Annotated[list[T], Field(fail_fast=True, max_length=MAX_TOOLS)]
TokenIds = Annotated[list[int], Field(fail_fast=True, max_length=MAX_TOKEN_IDS)]
StrOrList = Annotated[
    Annotated[str, Tag("<str>")] | Annotated[BoundedList[str], Tag("<list>")], Discriminator(str_or_list)
]


def _limit_entries(limit: int) -> Callable[[object], object]:
    """Returns a validator that runs before the entries are validated, since each invalid entry would be an error."""

    def check(value: object) -> object:
        if isinstance(value, Mapping):
            count = len(cast("Mapping[object, object]", value))
            if count > limit:
                raise PydanticCustomError(
                    "too_many_fields", "must have at most {limit} fields, got {count}", {"count": count, "limit": limit}
                )
        return cast("object", value)

    return check


check_fields = _limit_entries(MAX_FIELDS)
BoundedDict = Annotated[dict[str, T], BeforeValidator(_limit_entries(MAX_ITEMS))]
