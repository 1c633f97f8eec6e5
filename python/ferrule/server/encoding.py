"""Work of models that read texts and write none, as any API asks for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from ferrule.errors import InvalidParameterError
from ferrule.server.errors import UNAVAILABLE, ApiError, unsupported
from ferrule.server.models import ServedModel
from ferrule.server.request_record import PromptRecord, current_record

MAX_TEXTS = 2048
"""Texts of a request, as in OpenAI's API."""
T = TypeVar("T")


def check_not_adapter(served: ServedModel) -> ServedModel:
    """The model itself, noted in the request's record.

    Raises ApiError for an adapter.
    """
    if served.adapter is not None:
        raise unsupported("model", f"{served.name} is an adapter; texts are encoded without adapters")
    record = current_record.get()
    if record is not None:
        record.model = served.name
    return served


def check_texts(texts: Sequence[object]) -> None:
    """Raises InvalidParameterError where they are too many."""
    if len(texts) > MAX_TEXTS:
        raise InvalidParameterError(f"input has {len(texts)} texts; the limit is {MAX_TEXTS}")


def record_input_tokens(tokens: Sequence[int]) -> None:
    """Notes in the request's record how many tokens its texts had."""
    record = current_record.get()
    if record is not None:
        record.prompts += [PromptRecord(each, 0) for each in tokens]


def input_field_names(*, several: bool) -> dict[str, str]:
    """What requests for vectors call the library's fields; one text is the input itself."""
    return {**({} if several else {"prompts[0]": "input"}), "prompts": "input", "prompt": "input"}


async def before_deadline(work: Coroutine[Any, Any, T]) -> T:
    """Raises ApiError where the request's time is over before."""
    record = current_record.get()
    try:
        async with asyncio.timeout(None if record is None else record.remaining):
            return await work
    except TimeoutError:
        message = "the request was ended: its time is over"
        raise ApiError(UNAVAILABLE, message, code="deadline_exceeded") from None
