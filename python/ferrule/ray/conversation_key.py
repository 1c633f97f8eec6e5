"""`conversation_key`: identifies the conversation of a request by the part that all of its turns share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, cast

PROMPT_PREFIX = 256
"""Number of characters or tokens of a prompt without messages that are part of the key."""
QUESTIONS = ("system", "developer", "user")
"""Roles of the messages before the first answer."""


def conversation_key(body: bytes) -> str | None:
    """Returns a hash of the beginning of a request's prompt; None for a body without a prompt.

    The beginning of a chat is the messages before the first answer, to which later turns only append. The beginning of
    another prompt is its first characters or tokens. OpenAI's `prompt_cache_key` replaces both.
    """
    try:
        request: object = json.loads(body)
        if not isinstance(request, dict):
            return None
        fields = cast("dict[str, Any]", request)
        beginning = _beginning(fields)
        if beginning is None:
            return None
        return hashlib.sha256(json.dumps([fields.get("model"), beginning]).encode()).hexdigest()
    except (ValueError, RecursionError):  # the server answers with the error
        return None


def _beginning(fields: Mapping[str, Any]) -> object:
    if fields.get("prompt_cache_key") is not None:
        return fields["prompt_cache_key"]
    for name in ("messages", "input", "prompt"):  # `input` is text or messages of the Responses API
        prompt = fields.get(name)
        if isinstance(prompt, str):
            return [fields.get("instructions"), prompt[:PROMPT_PREFIX]]
        if isinstance(prompt, list):
            items = cast("list[Any]", prompt)
            if all(isinstance(item, dict) for item in items):
                return [fields.get("system"), fields.get("instructions"), _first_turn(items)]
            return items[:PROMPT_PREFIX]
    return None


def _first_turn(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the messages before the first answer."""
    return list(takewhile(lambda message: message.get("role") in QUESTIONS, messages))
