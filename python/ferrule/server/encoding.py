"""Embedding and reranking of texts, for all protocols."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from ferrule.errors import InvalidParameterError
from ferrule.server.errors import UNAVAILABLE, ApiError, unsupported
from ferrule.server.models import ServedModel
from ferrule.server.request_record import PromptRecord, current_record

MAX_TEXTS = 2048
"""Maximum number of texts of a request, as in OpenAI's API."""
T = TypeVar("T")


def check_not_adapter(served: ServedModel) -> ServedModel:
    """Returns the model and notes it in the request's record.

    Raises ApiError for an adapter.
    """
    if served.adapter is not None:
        raise unsupported("model", f"model must not be an adapter for this route, got {served.name}")
    record = current_record.get()
    if record is not None:
        record.model = served.name
    return served


def check_texts(texts: Sequence[object]) -> None:
    """Raises InvalidParameterError for too many texts."""
    if len(texts) > MAX_TEXTS:
        raise InvalidParameterError("input", len(texts), f"a list of at most {MAX_TEXTS} texts")


def record_input_tokens(tokens: Sequence[int]) -> None:
    """Notes the number of tokens of each text in the request's record."""
    record = current_record.get()
    if record is not None:
        record.prompts += [PromptRecord(each, 0) for each in tokens]


def input_field_names(*, several: bool) -> dict[str, str]:
    """Returns the names of the library's fields in requests for embeddings; a single text is the input itself."""
    names: dict[str, str] = dict.fromkeys(("prompts", "prompt_token_ids", "prompt"), "input")
    return names if several else {"prompts[0]": "input", **names}


async def before_deadline(work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`.

    Raises ApiError where the request's deadline passes before.
    """
    record = current_record.get()
    try:
        async with asyncio.timeout(None if record is None else record.remaining):
            return await work
    except TimeoutError:
        message = "the request exceeded its timeout"
        raise ApiError(UNAVAILABLE, message, code="deadline_exceeded") from None
