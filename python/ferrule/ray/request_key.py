"""`request_key`: what the routing of a request depends on, its model and its conversation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple, cast

PROMPT_PREFIX = 256
"""Number of characters or tokens of a prompt without messages that are part of the key."""
QUESTIONS = ("system", "developer", "user")
"""Roles of the messages before the first answer."""


class RequestKey(NamedTuple):
    """Name of the model and conversation of a request."""

    model: str | None = None
    """Name of the model; None for a body that names none."""
    conversation: str | None = None
    """Hash of the part of the prompt that all turns of a conversation share; None for a body without a prompt."""


def request_key(body: bytes) -> RequestKey:
    """Returns the key of a request; an empty one for a body that is not a JSON object.

    The beginning of a chat is the messages before the first answer, to which later turns only append. The beginning of
    another prompt is its first characters or tokens. OpenAI's `prompt_cache_key` replaces both.
    """
    try:
        request: object = json.loads(body)
        if not isinstance(request, dict):
            return RequestKey()
        fields = cast("dict[str, Any]", request)
        model, beginning = fields.get("model"), _beginning(fields)
        conversation = None
        if beginning is not None:
            conversation = hashlib.sha256(json.dumps([model, beginning]).encode()).hexdigest()
        return RequestKey(model if isinstance(model, str) else None, conversation)
    except (ValueError, RecursionError):  # the server answers with the error
        return RequestKey()


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
