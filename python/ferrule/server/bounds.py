"""Lists and mappings of requests, no wider than any use of them.

Reading one stops at the first thing that is wrong with it: an error for each of a million members takes gigabytes, and
holds up everybody while it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, TypeVar, cast

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from ferrule.server.forms import text_or_list

MAX_FIELDS = 256
"""Of an object whose fields are known."""
MAX_MEMBERS = 1 << 14
"""Of any list of a request but those of token ids."""
MAX_TOOLS = 1024
MAX_IDS = 1 << 20
"""Token ids in a list: as many as the longest contexts have."""
T = TypeVar("T")
Many = Annotated[list[T], Field(fail_fast=True, max_length=MAX_MEMBERS)]
Tools = Annotated[list[T], Field(fail_fast=True, max_length=MAX_TOOLS)]
Ids = Annotated[list[int], Field(fail_fast=True, max_length=MAX_IDS)]
TextOrTexts = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Many[str], Tag("<list>")], Discriminator(text_or_list)
]


def _no_wider(limit: int) -> Callable[[object], object]:
    """Checks an object before its fields are looked at: what is wrong with each would be an error of its own."""

    def check(given: object) -> object:
        if isinstance(given, Mapping):
            count = len(cast("Mapping[object, object]", given))
            if count > limit:
                message = "it has {count} fields; the limit is {limit}"
                raise PydanticCustomError("too_many_fields", message, {"count": count, "limit": limit})
        return cast("object", given)

    return check


check_fields = _no_wider(MAX_FIELDS)
Pairs = Annotated[dict[str, T], BeforeValidator(_no_wider(MAX_MEMBERS))]
